"""Responses that may be read again and answered: bounded in number and in bytes, the oldest dropped first.

    response 1 ──► transcript 1 (its input and output)
    response 2 ──► transcript 2 ──► transcript 1          its `previous_response_id` is response 1
    response 3 ──► transcript 3 ──► transcript 1          so is its

A transcript is held, and counted, once, for as long as a kept response needs it: dropping response 1 leaves what
responses 2 and 3 answer. Memory only: a restart forgets everything. Knows neither HTTP nor what items mean.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvwatch_engine.server.api_keys import Caller

RESPONSE_OVERHEAD: Final = 512
"""Bytes that a response counts beside its text: what Python's objects around it take."""
ITEM_OVERHEAD: Final = 384
"""The same for an item, with its place in the index of items."""


class Owner(NamedTuple):
    """On whose behalf a response was made; only they find it again."""

    key_name: str
    tenant: str


class KeptItem(NamedTuple):
    """An item that is kept."""

    id: str
    body: bytes
    """The item as JSON."""


class Transcript:
    """The items of one exchange, input and output, as JSON; what went before is in the one that it follows."""

    __slots__ = ("follows", "items", "num_bytes", "num_holders", "owner")

    def __init__(self, follows: "Transcript | None", owner: Owner | None, items: Sequence[KeptItem]) -> None:
        self.follows = follows
        self.owner = owner
        """None where nobody is asked for a key."""
        self.items = tuple(items)
        self.num_bytes = sum(len(item.id) + len(item.body) + ITEM_OVERHEAD for item in self.items)
        self.num_holders = 0
        """Kept responses and transcripts that lead here; the store's."""

    def backwards(self) -> Iterator[KeptItem]:
        """Give all items, the newest first."""
        node: Transcript | None = self
        while node is not None:
            yield from reversed(node.items)
            node = node.follows


def owner_of(caller: Caller | None) -> Owner | None:
    """Return on whose behalf a caller makes responses; None where nobody is asked for a key."""
    return None if caller is None else Owner(caller.key_name, caller.tenant)


class KeptResponse(NamedTuple):
    """A response that is kept."""

    id: str
    body: bytes
    """The response as JSON."""
    num_inputs: int
    """Items at the beginning of its own transcript that are input."""
    transcript: Transcript

    @property
    def owner(self) -> Owner | None:
        """Who made it; None where nobody is asked for a key."""
        return self.transcript.owner

    @property
    def num_bytes(self) -> int:
        """Bytes that it counts beside its transcript."""
        return len(self.body) + RESPONSE_OVERHEAD

    def inputs(self) -> list[KeptItem]:
        """Return the items that it answers, the newest first."""
        before = self.transcript.follows
        own = self.transcript.items[: self.num_inputs]
        return [*reversed(own), *(before.backwards() if before is not None else ())]


class ResponseStore:
    """Keeps responses. Event loop only."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        """Begin empty.

        Args:
            max_responses: most that are kept; 0 keeps none.
            max_bytes: most bytes of all responses and transcripts.
        """
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: dict[str, KeptResponse] = {}
        self._items: dict[tuple[Owner | None, str], KeptItem] = {}
        self._num_bytes = 0

    @property
    def num_responses(self) -> int:
        """Responses that are kept."""
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Bytes that they count, each transcript once."""
        return self._num_bytes

    @property
    def is_off(self) -> bool:
        """Whether nothing is ever kept."""
        return self._max_responses == 0

    def keep(self, response: KeptResponse) -> None:
        """Keep a response, the oldest ones dropped where there is no room; one that is too large alone is not kept."""
        assert response.id not in self._kept, "ids are made up"
        self._kept[response.id] = response
        self._num_bytes += response.num_bytes
        self._hold(response.transcript)
        while len(self._kept) > self._max_responses or self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def find(self, response_id: str, owner: Owner | None) -> KeptResponse | None:
        """Return a response; none if there is none of this id, or it is somebody else's."""
        found = self._kept.get(response_id)
        return found if found is not None and found.owner == owner else None

    def find_item(self, item_id: str, owner: Owner | None) -> KeptItem | None:
        """Return an item of a conversation that is kept; none if there is none of this id, or it is somebody else's."""
        return self._items.get((owner, item_id))

    def remove(self, response_id: str, owner: Owner | None) -> bool:
        """Forget a response; return whether there was one of this id that is the owner's."""
        if self.find(response_id, owner) is None:
            return False
        self._drop(response_id)
        return True

    def _drop(self, response_id: str) -> None:
        response = self._kept.pop(response_id)
        self._num_bytes -= response.num_bytes
        self._release(response.transcript)

    def _hold(self, transcript: Transcript) -> None:
        """Count a transcript, and what it follows, unless they are counted already.

        What it follows may have been dropped while the response was generated.
        """
        node: Transcript | None = transcript
        while node is not None:
            node.num_holders += 1
            if node.num_holders > 1:
                return
            self._num_bytes += node.num_bytes
            self._items.update(((node.owner, item.id), item) for item in node.items)
            node = node.follows

    def _release(self, transcript: Transcript) -> None:
        node: Transcript | None = transcript
        while node is not None:
            node.num_holders -= 1
            if node.num_holders:
                return
            self._num_bytes -= node.num_bytes
            for item in node.items:
                if self._items.get((node.owner, item.id)) is item:  # clients may send an item again, with its id
                    del self._items[node.owner, item.id]
            node = node.follows

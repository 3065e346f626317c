"""Kept responses are bounded at every moment, belong to one owner, and are counted as what they hold."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from kvwatch_engine.server.responses.store import (
    ITEM_OVERHEAD,
    RESPONSE_OVERHEAD,
    KeptItem,
    KeptResponse,
    Owner,
    ResponseStore,
    Transcript,
)

OWNERS_OF_ALL = [None, Owner("a", "x"), Owner("b", "x"), Owner("a", "y")]
OWNERS = st.sampled_from(OWNERS_OF_ALL)
ITEMS = st.lists(st.binary(max_size=300), min_size=1, max_size=3)


class StoreMachine(RuleBasedStateMachine):
    """The store against a list of all that was ever made, the oldest first."""

    made = Bundle("made")

    @initialize(max_responses=st.integers(0, 6), max_bytes=st.integers(0, 6000))
    def begin(self, max_responses: int, max_bytes: int) -> None:
        self.limits = max_responses, max_bytes
        self.store = ResponseStore(max_responses, max_bytes)
        self.kept: list[KeptResponse] = []
        self.content: dict[str, list[KeptItem]] = {}
        self.count = 0

    @rule(target=made, owner=OWNERS, items=ITEMS, body=st.binary(max_size=300))
    def make(self, owner: Owner | None, items: list[bytes], body: bytes) -> KeptResponse:
        return self.keep(owner, None, items, body)

    @rule(target=made, before=made, owner=OWNERS, items=ITEMS)
    def follow(self, before: KeptResponse, owner: Owner | None, items: list[bytes]) -> object:
        """Answer one that is kept; or one that was dropped while its answer was generated."""
        found = self.store.find(before.id, owner)
        assert (found is before) == (before in self.kept and before.owner == owner)
        return multiple() if before.owner != owner else self.keep(owner, before, items, b"{}")

    @rule(response=made, owner=OWNERS)
    def remove(self, response: KeptResponse, owner: Owner | None) -> None:
        is_theirs = response in self.kept and response.owner == owner
        assert self.store.remove(response.id, owner) == is_theirs
        if is_theirs:
            self.kept.remove(response)

    def keep(self, owner: Owner | None, before: KeptResponse | None, items: list[bytes], body: bytes) -> KeptResponse:
        self.count += 1
        named = [KeptItem(f"i{self.count}.{place}", item) for place, item in enumerate(items)]
        transcript = Transcript(None if before is None else before.transcript, owner, named)
        made = KeptResponse(f"r{self.count}", body, len(items), transcript)
        self.content[made.id] = ([] if before is None else self.content[before.id]) + named
        self.store.keep(made)
        self.kept.append(made)
        while len(self.kept) > self.limits[0] or self.num_bytes() > self.limits[1]:
            self.kept.pop(0)
        return made

    def num_bytes(self) -> int:
        held: dict[int, Transcript] = {}
        for response in self.kept:
            node: Transcript | None = response.transcript
            while node is not None:
                held[id(node)] = node
                node = node.follows
        parts = sum(len(item.id) + len(item.body) + ITEM_OVERHEAD for node in held.values() for item in node.items)
        return parts + sum(len(response.body) + RESPONSE_OVERHEAD for response in self.kept)

    @invariant()
    def bounds_hold_and_everything_is_counted_once(self) -> None:
        assert self.store.num_responses == len(self.kept) <= self.limits[0]
        assert self.store.num_bytes == self.num_bytes() <= self.limits[1]

    @invariant()
    def what_is_kept_is_whole(self) -> None:
        for response in self.kept:
            assert self.store.find(response.id, response.owner) is response
            assert response.inputs() == list(response.transcript.backwards()) == self.content[response.id][::-1]

    @invariant()
    def items_are_found_while_a_conversation_needs_them_by_whoever_has_it(self) -> None:
        needed = {(response.owner, item) for response in self.kept for item in self.content[response.id]}
        for owner in OWNERS_OF_ALL:
            for item in {item for content in self.content.values() for item in content}:
                assert (self.store.find_item(item.id, owner) is not None) == ((owner, item) in needed)


StoreMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestResponseStore = StoreMachine.TestCase


def test_a_long_conversation_is_let_go_without_recursion() -> None:
    store = ResponseStore(10_000, 1 << 30)
    before: Transcript | None = None
    for number in range(50_000):
        before = Transcript(before, None, [KeptItem(str(number), b"x")])
        store.keep(KeptResponse(str(number), b"", 1, before))
    assert store.num_responses == 10_000
    before = None
    for number in range(40_000, 50_000):
        assert store.remove(str(number), None)

    assert store.num_bytes == 0

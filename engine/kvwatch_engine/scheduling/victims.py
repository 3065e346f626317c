"""Who yields when blocks are short. Pure: it looks, and decides; `preemption.py` acts."""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ReadOnlySequence
from dataclasses import dataclass
from types import MappingProxyType

from kvwatch_engine.contracts.settings import EngineSettings, VictimPolicy
from kvwatch_engine.scheduling.policy import NS_PER_SECOND
from kvwatch_engine.scheduling.request import Request

Key = tuple[int, ...]

FreedBy = Callable[[Iterable[Request]], int]
"""Returns how many blocks become free when all these requests lose theirs; shared ones count once, or not at all."""


@dataclass(frozen=True, slots=True)
class VictimOrder:
    """Orders requests by how readily they yield: the highest key first.

    Priorities come first in every policy. Inside one those come last that were preempted too often already.
    """

    settings: EngineSettings
    now_ns: int

    def key(self, request: Request) -> Key:
        """Return a request's key."""
        return _KEYS[self.settings.victim_policy](self, request)

    def level(self, request: Request) -> int:
        """Return a request's priority, less what its time since arrival is worth."""
        aging_ns = round(self.settings.priority_aging_seconds * NS_PER_SECOND)
        if request.priority == 0 or aging_ns <= 0:
            return request.priority
        return max(0, request.priority - (self.now_ns - request.queued_ns) // aging_ns)

    def is_free_to_yield(self, request: Request) -> int:
        """Return 0 for a request that was preempted so often that it is protected, else 1."""
        return int(request.num_preemptions < self.settings.protect_after_preemptions)


def _newest(order: VictimOrder, request: Request) -> Key:
    """The last to arrive has lost the least turn."""
    return order.level(request), order.is_free_to_yield(request), request.arrival


def _least_computed(order: VictimOrder, request: Request) -> Key:
    """Whoever has the fewest computed tokens loses the least work."""
    num_computed = sum(sequence.num_computed for sequence in request.live_sequences())
    return order.level(request), order.is_free_to_yield(request), -num_computed, request.arrival


def _lowest_priority(order: VictimOrder, request: Request) -> Key:
    """The priority that was asked for, however long it has been there; of equals the newest."""
    return request.priority, order.is_free_to_yield(request), request.arrival


_KEYS: Mapping[VictimPolicy, Callable[[VictimOrder, Request], Key]] = MappingProxyType(
    {"newest": _newest, "least-computed": _least_computed, "lowest-priority": _lowest_priority}
)


def choose_victims(
    candidates: ReadOnlySequence[Request], needy: Request, num_blocks: int, order: VictimOrder, freed_by: FreedBy
) -> list[Request]:
    """Return who yields so that `num_blocks` more blocks become free for `needy`.

    Nobody yields to a request that would yield more readily: then it is the needy one itself. Nobody yields who is not
    needed for it, least of all who frees nothing.

    Args:
        candidates: running requests that hold blocks, `needy` among them.
        needy: who needs blocks.
        num_blocks: blocks that are missing.
        order: who yields first.
        freed_by: tells what yielding brings.

    Returns:
        The victims; `[needy]` if only its own yielding helps the others; empty if nobody's would bring a block.
    """
    chosen: list[Request] = []
    for request in sorted(candidates, key=order.key, reverse=True):
        if request is needy:
            break
        chosen.append(request)
        if freed_by(chosen) >= num_blocks:
            return _without_needless(chosen, num_blocks, freed_by)
    return [needy] if freed_by([needy]) else []


def choose_room_makers(
    candidates: ReadOnlySequence[Request], num_blocks: int, order: VictimOrder, freed_by: FreedBy
) -> list[Request]:
    """Return who yields so that `num_blocks` more blocks become free for nobody in particular; all if that is too few.

    Args:
        candidates: running requests that hold blocks.
        num_blocks: blocks that are missing.
        order: who yields first.
        freed_by: tells what yielding brings.
    """
    chosen: list[Request] = []
    for request in sorted(candidates, key=order.key, reverse=True):
        if freed_by(chosen) >= num_blocks:
            break
        chosen.append(request)
    return _without_needless(chosen, num_blocks, freed_by) if freed_by(chosen) >= num_blocks else chosen


def _without_needless(chosen: list[Request], num_blocks: int, freed_by: FreedBy) -> list[Request]:
    """Leave out, the most readily yielding last, whoever the others can do without."""
    for request in chosen[-2::-1]:
        others = [other for other in chosen if other is not request]
        if freed_by(others) >= num_blocks:
            chosen = others
    return chosen

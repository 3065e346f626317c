"""Makes room when a running request needs blocks and none are free: waits for what is coming, or preempts others."""

from collections.abc import Iterable

from kvwatch.telemetry.events.request import PreemptionReason
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.contracts.tiers import Tiers, TransferKind
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.block_pool import Owner
from kvwatch_engine.scheduling.cost_model import CostModel
from kvwatch_engine.scheduling.lifecycle import Lifecycle, Preempted
from kvwatch_engine.scheduling.request import Request
from kvwatch_engine.scheduling.victims import VictimOrder, choose_room_makers, choose_victims


class Preemption:
    """Preempts by recomputation, by swap, or by what is cheaper. Engine thread only.

    Blocks of a request that is being swapped out stay its own until the transfer has ended. Whoever needs them waits
    for as many steps; nobody else is preempted for that need.
    """

    def __init__(
        self,
        settings: EngineSettings,
        manager: BlockManager,
        lifecycle: Lifecycle,
        cost: CostModel,
        log: EventLog,
        tiers: Tiers | None,
    ) -> None:
        self.settings = settings
        self.num_preemptions = 0
        """Preemptions so far."""
        self.has_shortage = False
        """Whether somebody needed blocks in this step and had to wait, or others had to yield."""
        self._manager = manager
        self._lifecycle = lifecycle
        self._cost = cost
        self._log = log
        self._tiers = tiers
        self._leaving: dict[str, list[Owner]] = {}
        """Sequences whose blocks are being swapped out, by request."""
        self._num_claimed = 0

    def begin_step(self) -> None:
        """Begin a step: nobody waits for anything yet."""
        self.has_shortage = False
        self._num_claimed = 0
        if self._leaving:
            held = self._manager.owners()
            self._leaving = {
                name: owners for name, owners in self._leaving.items() if any(owner in held for owner in owners)
            }

    def make_room(self, needy: Request, num_blocks: int, pending_copies: Iterable[Request]) -> list[Request]:
        """Have blocks become free for a running request that needs `num_blocks`, more than are free.

        Args:
            needy: the request.
            num_blocks: blocks that it needs in all.
            pending_copies: requests with copies in this step that are not carried out yet.

        Returns:
            Who was preempted, perhaps `needy` itself. What was recomputed has freed its blocks; what is swapped out
            will. Empty when enough blocks are coming, or nobody has any to give: then `needy` waits.
        """
        self.has_shortage = True
        missing = num_blocks - self._manager.pool.num_free
        if missing <= self._num_coming() - self._num_claimed:
            self._num_claimed += missing
            return []
        order = VictimOrder(self.settings, self._log.now_ns)
        victims = choose_victims(self._lifecycle.running, needy, missing, order, self.num_blocks_freed_by)
        copying = set(pending_copies)
        for victim in victims:
            self._preempt(victim, needy, can_swap=victim not in copying)
        if needy not in victims:
            self._num_claimed += max(0, num_blocks - self._manager.pool.num_free)
        return victims

    def yielding_order(self) -> list[Request]:
        """Return the running requests, those first that would yield first."""
        order = VictimOrder(self.settings, self._log.now_ns)
        return sorted(self._lifecycle.running, key=order.key, reverse=True)

    def room_makers(self, num_blocks: int) -> list[Request]:
        """Return who would yield so that `num_blocks` more blocks are free: everybody if that is too few."""
        order = VictimOrder(self.settings, self._log.now_ns)
        return choose_room_makers(self._lifecycle.running, num_blocks, order, self.num_blocks_freed_by)

    def num_blocks_freed_by(self, requests: Iterable[Request]) -> int:
        """Return how many blocks become free when all these running requests yield."""
        return self._manager.num_blocks_freed_by(
            sequence.owner for request in requests for sequence in request.active_sequences()
        )

    def drop(self, request: Request, reason: PreemptionReason) -> None:
        """Have a running request computed again: its step could not be carried out, or its blocks are taken away."""
        self._lifecycle.preempt(request, None, Preempted("recompute", reason))
        self.num_preemptions += 1

    # ------------------------------------------------------------------ parts

    def _num_coming(self) -> int:
        """Return how many blocks become free when the transfers that are in flight have ended."""
        if not self._leaving:
            return 0
        return self._manager.num_blocks_freed_by(owner for owners in self._leaving.values() for owner in owners)

    def _preempt(self, victim: Request, needy: Request, *, can_swap: bool) -> None:
        owners = [sequence.owner for sequence in victim.active_sequences()]
        recompute = self._cost.recompute_seconds(victim.num_tokens_to_lose)
        swap = None if self._tiers is None else self._tiers.estimate_seconds(self._manager.num_distinct_blocks(owners))
        is_swap = can_swap and self._wants_swap(recompute, swap) and self._has_room(victim)
        how = Preempted("swap" if is_swap else "recompute", "blocks", _ns(recompute), _ns(swap))
        self.num_preemptions += 1
        if not is_swap:
            self._lifecycle.preempt(victim, needy, how)
            return
        assert self._tiers is not None, "only tiers have room"
        self._leaving[victim.request_id] = owners
        victim.transfer = TransferKind.SWAP_OUT
        self._tiers.begin_out(victim.request_id)
        self._lifecycle.preempt(victim, needy, how)

    def _wants_swap(self, recompute_seconds: float | None, swap_seconds: float | None) -> bool:
        mode = self.settings.preemption_mode
        if mode != "auto" or recompute_seconds is None:
            return mode != "recompute"
        if swap_seconds is None:
            return not self._leaving  # what was never measured is measured now, by one request at a time
        return swap_seconds < recompute_seconds

    def _has_room(self, victim: Request) -> bool:
        return self._tiers is not None and victim.num_tokens_to_lose > 0 and self._tiers.can_take(victim.request_id)


def _ns(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e9)

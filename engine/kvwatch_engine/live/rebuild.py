"""Lays the cache of a serving engine out anew: blocks of another size, or keys and values of another type.

    check ──▶ transfers end ──▶ swaps and victims are to be recomputed ──▶ tiers ──▶ memory ──▶ commit ──▶ told
    refused   too late: refused                                          failed: tiers and memory as before

Of a new block size the live tokens are copied, bit for bit; where memory does not suffice for both caches, and for
another type, everything is computed again. Prefixes that no running request holds are lost. Engine thread only.

Whatever can fail does so before the commit, which only assigns what was computed before. What has happened by then
(requests to be recomputed) harms nobody.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from time import monotonic
from typing import Final

import structlog

from kvwatch.errors import ChangeFailed, ChangeRefused, KVWatchError
from kvwatch.telemetry.events import PoolRebuilt
from kvwatch.telemetry.events.control import RebuildOutcome
from kvwatch_engine.contracts.cache import BlockLayout, BlockMemory
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.layout import HeldTokens, Layout, plan_layout
from kvwatch_engine.resize import AcceptedRequest, check_limits, check_worst_cases
from kvwatch_engine.scheduling.limits import max_unpinned_len
from kvwatch_engine.scheduling.request import Request, RequestState, Sequence

_WAIT_SECONDS: Final = 0.01
_PINS_END: Final = "the blocks get another size or type"

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RebuildPlan:
    """What a rebuild would do now."""

    layout: BlockLayout
    is_copied: bool
    """Whether live tokens are copied; else all of them are computed again."""
    victims: tuple[Request, ...]
    """Running requests that are computed again."""
    num_slots: int
    """Slots that are copied."""
    extra_bytes: int
    """Memory beside that of the present pool."""


class Rebuilder:
    """Rebuilds the pool of one engine, its memory, and the tiers behind it."""

    def __init__(
        self,
        core: EngineCore,
        memory: BlockMemory,
        max_pause_seconds: float,
        on_phase: Callable[[str], None] = lambda _phase: None,
    ) -> None:
        """Rebuild `core`'s pool over `memory`.

        Args:
            core: the engine.
            memory: of its pool's blocks.
            max_pause_seconds: longest time to wait for transfers; what is estimated to take longer is refused.
            on_phase: is told each phase as it begins; what it raises is a failure of that phase.
        """
        self._core = core
        self._memory = memory
        self._max_pause_seconds = max_pause_seconds
        self._on_phase = on_phase
        self.sized_as = core.settings
        """Settings of the last time that somebody chose the number of blocks: other layouts get as much memory."""

    def sized(self, wanted: EngineSettings) -> EngineSettings:
        """Return the settings with as many blocks as fit into the memory that somebody last chose for the pool.

        So the way back to a layout leads back to its number of blocks, however they were rounded.

        Raises:
            ChangeRefused: such blocks are not possible.
        """
        now, capacity = self._layout(self.sized_as), self.sized_as.num_blocks - 1
        then = self._layout(wanted)
        if now.has_same_content(then):
            num_blocks = 1 + capacity * now.block_size // then.block_size
        else:
            num_blocks = 1 + capacity * now.block_bytes // then.block_bytes
        ratio = wanted.watermark_ratio
        watermark = wanted.watermark_blocks if ratio is None else round(ratio * (num_blocks - 1))
        return replace(wanted, num_blocks=num_blocks, watermark_blocks=watermark)

    def plan(self, wanted: EngineSettings, accepted: Iterable[AcceptedRequest]) -> RebuildPlan:
        """Find out whether the pool can be rebuilt, and what that would do. Changes nothing.

        Raises:
            ChangeRefused: it cannot.
        """
        check_limits(wanted)
        check_worst_cases(wanted, accepted)
        now, then = self._layout(self._core.settings), self._layout(wanted)
        new_bytes = wanted.num_blocks * then.block_bytes
        free, old_bytes = self._memory.free_bytes(), self._core.settings.num_blocks * now.block_bytes
        if new_bytes > free + old_bytes:
            raise ChangeRefused(
                f"a pool of {wanted.num_blocks} blocks of {then.block_bytes} bytes takes {new_bytes} bytes, but "
                f"{free + old_bytes} are there, that of the present pool included; ask for fewer blocks"
            )
        victims, layout = self._choose_victims(wanted)
        slots, _ = layout.slots()
        is_copied = now.has_same_content(then) and new_bytes <= free
        if is_copied:
            return RebuildPlan(then, is_copied, tuple(victims), len(slots), new_bytes)
        return RebuildPlan(then, is_copied, tuple(self._core.scheduler.lifecycle.running), 0, 0)

    def carry_out(self, plan: RebuildPlan, wanted: EngineSettings, reason: str) -> list[Request]:
        """Rebuild as planned; return who is computed again. The engine follows `wanted` from now on.

        Raises:
            ChangeRefused: transfers do not end; nothing was changed.
            ChangeFailed: the memory, or a tier, cannot be had. All is as it was; some requests are computed again.
        """
        core, begun_ns = self._core, self._core.log.clock.monotonic_ns()
        old = core.settings
        self._end_transfers()
        try:
            again, layout = self._clear_the_way(plan, wanted)
            self._change_memory(plan, layout, wanted)
        except Exception as error:  # whatever memory, files or threads raise
            duration_ns = core.log.clock.monotonic_ns() - begun_ns
            self._tell(old, wanted.num_blocks, "failed", duration_ns, reason, type(error).__name__)
            is_explained = isinstance(error, KVWatchError)
            logger.warning(
                "the cache could not be laid out anew", error=str(error), exc_info=not is_explained and error
            )
            remedy = str(error) if is_explained else "ask for less, or free memory"
            raise ChangeFailed(
                f"the cache could not be laid out anew ({type(error).__name__}); it is as it was: {remedy}"
            ) from error
        with core.vital():
            self._commit(layout, wanted, plan.layout)
        duration_ns = core.log.clock.monotonic_ns() - begun_ns
        self._tell(old, wanted.num_blocks, "rebuilt", duration_ns, reason)
        return again

    # ------------------------------------------------------------ before the commit

    def _end_transfers(self) -> None:
        """Wait until no block is on its way."""
        tiers, deadline = self._core.tiers, monotonic() + self._max_pause_seconds
        while tiers is not None and (tiers.num_in_flight or self._core.manager.num_holds):
            if monotonic() > deadline:
                raise ChangeRefused(
                    f"transfers have not ended within {self._max_pause_seconds:g} s; ask again", is_passing=False
                )
            tiers.wait(_WAIT_SECONDS)
            self._core.scheduler.note_transfers()
        self._core.scheduler.note_transfers()

    def _clear_the_way(self, plan: RebuildPlan, wanted: EngineSettings) -> tuple[list[Request], Layout]:
        """Have those computed again that cannot stay; return them, and the layout of the others."""
        core = self._core
        self._on_phase("swaps")
        swapped = [each for each in core.scheduler.lifecycle.requests() if each.state is RequestState.SWAPPED]
        for request in swapped:
            core.scheduler.lifecycle.abandon_swap(request, "rebuild")
        self._on_phase("victims")
        victims, layout = self._choose_victims(wanted)
        if not plan.is_copied:
            victims = list(core.scheduler.lifecycle.running)
        for request in victims:
            core.scheduler.drop(request, "rebuild")
        if not plan.is_copied:
            core.end_pins("rebuild", "", _PINS_END)
            core.manager.pool.clear_cache("resize")
            layout = plan_layout([], core.settings.block_size, wanted.block_size, wanted.num_blocks)
        assert layout.num_used < wanted.num_blocks, "each request alone fits, as was checked"
        return [*swapped, *victims], layout

    def _change_memory(self, plan: RebuildPlan, layout: Layout, wanted: EngineSettings) -> None:
        """Have tiers and memory of the new layout, or both of the old one."""
        core, old = self._core, self._layout(self._core.settings)
        self._on_phase("tiers")
        if core.tiers is not None:
            core.tiers.lay_out(plan.layout)
        try:
            self._on_phase("memory")
            if plan.is_copied:
                self._memory.relay(plan.layout, wanted.num_blocks, *layout.slots())
            else:
                self._memory.replace(plan.layout, wanted.num_blocks)
        except BaseException:
            if core.tiers is not None:
                core.tiers.lay_out(old)
            raise

    def _choose_victims(self, wanted: EngineSettings) -> tuple[list[Request], Layout]:
        """Return who must yield so that the others fit, and the layout of these."""
        order = self._core.scheduler.yielding_order()
        num_victims = 0
        while True:
            victims = order[:num_victims]
            layout = self._layout_without(victims, wanted)
            surplus = layout.num_used - (wanted.num_blocks - 1)
            if surplus <= 0 or num_victims == len(order):
                return victims, layout
            num_victims += 1

    def _layout_without(self, victims: list[Request], wanted: EngineSettings) -> Layout:
        manager, left_out = self._core.manager, {request.request_id for request in victims}
        sequences = [
            sequence
            for request in self._core.scheduler.lifecycle.requests()
            if request.request_id not in left_out
            for sequence in request.sequences
        ]
        held = [
            HeldTokens(
                each.owner,
                group.number,
                group.tables[each.owner],
                group.first_token(each.owner),
                each.num_computed,
                each.num_tokens,
            )
            for group in manager.groups
            for each in sequences
            if each.owner in group.tables
        ]
        return plan_layout(held, manager.block_size, wanted.block_size, wanted.num_blocks)

    # ------------------------------------------------------------ the commit and after

    def _commit(self, layout: Layout, wanted: EngineSettings, block: BlockLayout) -> None:
        core = self._core
        core.end_pins("rebuild", "", _PINS_END)
        core.manager.lay_out(layout, block.block_bytes)
        core.adopt_layout(wanted, block.block_bytes)
        for request in core.scheduler.lifecycle.requests():
            chain = core.chain_of(request)
            request.peak_blocks = 0  # it counted other blocks
            for sequence in request.sequences:
                sequence.chain = chain.fork(0)
            for sequence in request.live_sequences():
                self._store(sequence)
            if request.state is RequestState.RUNNING:
                core.scheduler.lifecycle.note_blocks(request)

    def _store(self, sequence: Sequence) -> None:
        """Let the full blocks of a running sequence be found again, unless a reset has taken them out of sight."""
        manager = self._core.manager
        if sequence.owner not in manager.owners():
            return
        if sequence.request.own_root is not None:  # it may share them with others, whose root is another one
            manager.leave_unstored(sequence.owner, sequence.num_computed)
        else:
            manager.store_full(sequence.owner, sequence.chain, sequence.num_computed, sequence.tokens)

    def _tell(
        self,
        old: EngineSettings,
        num_blocks: int,
        outcome: RebuildOutcome,
        duration_ns: int,
        reason: str,
        error: str = "",
    ) -> None:
        log, settings = self._core.log, self._core.settings
        if log.active:
            log.append(
                PoolRebuilt(
                    old.num_blocks,
                    num_blocks,
                    outcome,
                    duration_ns,
                    settings.watermark_blocks,
                    reason,
                    error,
                    max_model_len=max_unpinned_len(settings),
                )
            )

    def _layout(self, settings: EngineSettings) -> BlockLayout:
        try:
            return self._memory.layout(settings.block_size, settings.kv_dtype)
        except ValueError as error:
            raise ChangeRefused(str(error)) from error

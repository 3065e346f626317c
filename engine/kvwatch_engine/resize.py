"""Gives the pool of a serving engine another number of blocks, between two steps.

    check ──▶ plan ──▶ rebuild the memory ──▶ change pool and tables ──▶ PoolRebuilt
    refused   (pure)   failed: as before      cannot fail

All or nothing: whatever can go wrong does so before pool, tables or settings are touched. Engine thread only.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import structlog

from kvwatch.errors import ChangeFailed, ChangeRefused
from kvwatch.telemetry.events import PoolRebuilt
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.cache import BlockMemory
from kvwatch_engine.contracts.request import GenerationRequest
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.relocation import Relocation
from kvwatch_engine.scheduling.limits import max_unpinned_len
from kvwatch_engine.scheduling.policy import most_blocks
from kvwatch_engine.scheduling.request import Request

AcceptedRequest = GenerationRequest | Request
"""A request on its way into the engine, or in it."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedResize:
    """A change of size that was found possible; valid until a request or a block changes."""

    wanted: EngineSettings
    """Settings that hold afterwards."""
    plan: Relocation
    reason: str


class PoolResizer:
    """Resizes one pool and the memory behind it."""

    def __init__(self, manager: BlockManager, memory: BlockMemory, log: EventLog) -> None:
        self._manager = manager
        self._memory = memory
        self._log = log

    def prepare(
        self, num_blocks: int, reason: str, settings: EngineSettings, live: Iterable[AcceptedRequest]
    ) -> PreparedResize:
        """Find out whether the pool can have `num_blocks` blocks, and how. Changes nothing.

        Args:
            num_blocks: blocks from now on, the null block included.
            reason: why, in the words of whoever asked.
            settings: those in force.
            live: all requests that were accepted and have not ended. Each must be able to end in the new pool.

        Raises:
            ChangeRefused: something does not fit.
        """
        wanted = with_num_blocks(settings, num_blocks)
        try:
            self.check(wanted, live)
            return PreparedResize(wanted, self.plan(num_blocks), reason)
        except ChangeRefused as error:
            if not error.is_passing:  # else whoever asked asks again
                self.report_refusal(num_blocks, settings, reason, str(error))
            raise

    def check(self, wanted: EngineSettings, live: Iterable[AcceptedRequest]) -> None:
        """Find out whether requests could go on in a pool of another size, once those that hold too much have yielded.

        Raises:
            ChangeRefused: not all of them could end there.
        """
        num_holds = self._manager.num_holds
        if num_holds:
            raise ChangeRefused(f"blocks of {num_holds} sequences are on their way; ask again soon", is_passing=True)
        check_limits(wanted)
        check_worst_cases(wanted, live)
        self._check_memory(wanted)

    def report_refusal(self, num_blocks: int, settings: EngineSettings, reason: str, error: str) -> None:
        """Tell that a size was asked for and refused."""
        watermark = settings.watermark_blocks
        self._report(PoolRebuilt(settings.num_blocks, num_blocks, "refused", None, watermark, reason, error))

    def carry_out(self, prepared: PreparedResize, settings: EngineSettings) -> EngineSettings:
        """Resize the pool as prepared; return the settings that hold from now on.

        Raises:
            ChangeFailed: the memory cannot be had; nothing was changed.
        """
        started_ns = self._log.clock.monotonic_ns()
        wanted, num_blocks = prepared.wanted, prepared.wanted.num_blocks
        try:
            self._rebuild(prepared.plan)
        except Exception as error:  # whatever memory raises: the old one is still there
            duration_ns, name = self._log.clock.monotonic_ns() - started_ns, type(error).__name__
            watermark = settings.watermark_blocks
            self._report(
                PoolRebuilt(settings.num_blocks, num_blocks, "failed", duration_ns, watermark, prepared.reason, name)
            )
            logger.warning("the pool could not be resized", num_blocks=num_blocks, exc_info=error)
            raise ChangeFailed(
                f"a pool of {num_blocks} blocks could not be built ({name}); it still has {settings.num_blocks}: "
                "ask for fewer, or free memory"
            ) from error
        self._manager.resize(prepared.plan)
        duration_ns = self._log.clock.monotonic_ns() - started_ns
        self._report(
            PoolRebuilt(
                settings.num_blocks,
                num_blocks,
                "resized",
                duration_ns,
                wanted.watermark_blocks,
                prepared.reason,
                max_model_len=max_unpinned_len(wanted),
            )
        )
        return wanted

    def plan(self, num_blocks: int) -> Relocation:
        """Return how the pool becomes one of `num_blocks` blocks. Changes nothing.

        Raises:
            ChangeRefused: what running requests hold does not fit.
        """
        pool = self._manager.pool
        plan = pool.plan_resize(num_blocks)
        if plan is None:
            num_held = pool.num_used + pool.num_idle_pinned
            holders = "running requests and pinned prefixes" if pool.pinned else "running requests"
            raise ChangeRefused(
                f"{holders} hold {num_held} blocks, but a pool of {num_blocks} has {num_blocks - 1} beside the null "
                f"block; ask for at least {num_held + 1}, or wait until some have ended"
            )
        return plan

    def _check_memory(self, wanted: EngineSettings) -> None:
        """Refuse a larger pool than there is memory for: some is only taken when it is used, which is too late."""
        num_blocks, now = wanted.num_blocks, self._manager.pool.num_blocks
        block_bytes = self._memory.layout(wanted.block_size, wanted.kv_dtype).block_bytes
        room = self._memory.free_bytes() + now * block_bytes
        if num_blocks > now and num_blocks * block_bytes > room:
            raise ChangeRefused(
                f"a pool of {num_blocks} blocks of {block_bytes} bytes takes {num_blocks * block_bytes} bytes, but "
                f"{room} are there, that of the present pool included; ask for at most {max(now, room // block_bytes)}"
            )

    def _report(self, event: PoolRebuilt) -> None:
        if self._log.active:
            self._log.append(event)

    def _rebuild(self, plan: Relocation) -> None:
        sources = np.array(plan.kept, dtype=np.int64)
        destinations = np.array([plan.place_of(block) for block in plan.kept], dtype=np.int64)
        self._memory.rebuild(plan.num_blocks, sources, destinations)


def with_num_blocks(settings: EngineSettings, num_blocks: int) -> EngineSettings:
    """Return settings for another size of the pool; a watermark that was given as a ratio stays that ratio."""
    ratio = settings.watermark_ratio
    watermark = settings.watermark_blocks if ratio is None else round(ratio * (num_blocks - 1))
    return replace(settings, num_blocks=num_blocks, watermark_blocks=watermark)


def check_limits(wanted: EngineSettings) -> None:
    """Refuse a pool that holds nothing, or nothing but its watermark."""
    if wanted.num_blocks < 2:
        raise ChangeRefused(
            f"a pool of {wanted.num_blocks} blocks holds nothing, since block 0 is reserved; ask for at least 2"
        )
    if wanted.num_pinned_blocks > wanted.max_pinned_blocks:
        raise ChangeRefused(
            f"{wanted.num_pinned_blocks} blocks are pinned, but a pool of {wanted.num_blocks} may have at most "
            f"{wanted.max_pinned_blocks}; unpin some, or ask for more blocks"
        )
    if wanted.watermark_blocks >= wanted.num_usable_blocks:
        least = wanted.watermark_blocks + wanted.num_pinned_blocks + 2
        raise ChangeRefused(
            f"the watermark keeps {wanted.watermark_blocks} blocks free, but a pool of {wanted.num_blocks} has "
            f"{wanted.num_usable_blocks} beside the null block and pinned ones; ask for at least {least}"
        )


def check_worst_cases(wanted: EngineSettings, live: Iterable[AcceptedRequest]) -> None:
    """Refuse a pool in which a request that was accepted could not end: it would wait for ever."""
    capacity = wanted.num_usable_blocks
    for request in live:
        sampling = request.sampling
        num_prompt_tokens = len(request.prompt_token_ids)
        needed = most_blocks(wanted, num_prompt_tokens, sampling.max_tokens, sampling.num_sequences)
        if needed > capacity:
            raise ChangeRefused(
                f"request {request.request_id} may need {needed} blocks, but a pool of {wanted.num_blocks} has "
                f"{capacity} beside the null block and {wanted.num_pinned_blocks} pinned ones; ask for at least "
                f"{needed + wanted.num_pinned_blocks + 1}, or wait until it has ended"
            )

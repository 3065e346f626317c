"""One engine without threads: its state, and one step at a time.

`engine.py` runs this on a thread of its own; property tests drive it directly. Knows the model only as a
`StepExecutor`. One thread only.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import structlog

from kvwatch.errors import ChangeRefused
from kvwatch.telemetry.events import OutOfMemory, StepFailed
from kvwatch.telemetry.events.block import GROUPS, UnpinCause
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import EngineSnapshot, GroupState, RequestState
from kvwatch_engine.contracts.adapter import LoadId
from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.contracts.cache import BlockMemory
from kvwatch_engine.contracts.errors import is_out_of_memory
from kvwatch_engine.contracts.request import FinishReason, GenerationRequest, Refusal, SequenceOutput
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.contracts.step import StepExecutor, StepResult
from kvwatch_engine.contracts.tiers import Tiers
from kvwatch_engine.memory.block_hash import HashChain, MultimodalItem, root_hash, sequence_keys
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.block_pool import BlockPool
from kvwatch_engine.memory.pins import PrefixPins
from kvwatch_engine.resize import AcceptedRequest, PoolResizer, PreparedResize
from kvwatch_engine.scheduling.beam_search import search_of
from kvwatch_engine.scheduling.limits import numbers_in_force
from kvwatch_engine.scheduling.policy import deadline_of, rank_of
from kvwatch_engine.scheduling.request import Request
from kvwatch_engine.scheduling.results import StepDurations
from kvwatch_engine.scheduling.scheduler import Scheduler
from kvwatch_engine.scheduling.step_builder import ScheduledStep

_SEED_STRIDE = 0x9E3779B97F4A7C15  # golden ratio in 64 bits: seeds of a request's sequences lie far apart
_SEED_MASK = (1 << 64) - 1

logger = structlog.get_logger(__name__)


def sequence_seed(seed: int, index: int) -> int:
    """Return the 64-bit seed of one of a request's sequences; the first has the request's own."""
    return (seed + index * _SEED_STRIDE) & _SEED_MASK


class EngineCore:
    """Requests, blocks and the step.

    Between two calls the invariants of pool, tables and queues hold (`check_integrity`).
    """

    def __init__(
        self,
        settings: EngineSettings,
        executor: StepExecutor,
        log: EventLog,
        *,
        block_bytes: int = 0,
        memory: BlockMemory | None = None,
        make_tiers: Callable[[BlockManager], Tiers] | None = None,
    ) -> None:
        """Create an engine without requests.

        Args:
            settings: limits and policies.
            executor: computes the steps.
            log: where events go.
            block_bytes: size of one block over all layers, for telemetry.
            memory: the blocks' memory; without it the pool cannot be resized.
            make_tiers: makes the tiers behind the device, which know the block tables; none without it.
        """
        self.settings = settings
        self._executor = executor
        self._log = log
        self._block_bytes = block_bytes
        pool = BlockPool(settings.num_blocks, log, num_groups=len(settings.groups))
        self.manager = BlockManager(
            pool,
            settings.block_size,
            log,
            enable_prefix_cache=settings.enable_prefix_cache,
            emit_token_ids=settings.emit_token_ids,
            windows=settings.windows,
            max_chunk=settings.max_chunk,
            is_strict=settings.is_prefix_cache_strict,
        )
        self.pins = PrefixPins(pool, log)
        self.tiers = make_tiers(self.manager) if make_tiers is not None else None
        self.scheduler = Scheduler(settings, self.manager, log, self.tiers)
        self._resizer = PoolResizer(self.manager, memory, log) if memory is not None else None
        self._memory = memory
        self.defect: BaseException | None = None
        """What was left half done; the engine must not go on."""
        self.config_drift: dict[str, float] = {}
        """For each setting that can change live: 1 if its live value is not the declared one. Set by who knows both."""
        self._num_steps = 0
        self._num_arrivals = 0
        self._last_step_ns: int | None = None

    @property
    def has_work(self) -> bool:
        """Whether a request is live, or a transfer has not ended."""
        return self.scheduler.has_work

    @property
    def log(self) -> EventLog:
        """The log that the engine emits to."""
        return self._log

    @property
    def num_steps(self) -> int:
        """Steps done so far."""
        return self._num_steps

    @property
    def block_bytes(self) -> int:
        """Size of one block over all layers; 0 if that is not known."""
        return self._block_bytes

    # ------------------------------------------------------------------ requests

    def add(self, source: GenerationRequest, queued_ns: int) -> None:
        """Take in a request that was found valid. `queued_ns` is the monotonic time of its arrival."""
        sampling = source.sampling
        first_seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        settings, arrival = self.settings, self._num_arrivals
        request = Request(
            source,
            arrival=arrival,
            queued_ns=queued_ns,
            seeds=[sequence_seed(first_seed, index) for index in range(sampling.num_sequences)],
            chain=self.chain_of(source),
            search=search_of(source, settings),
            forks_late=sampling.beams is not None and not self.manager.has_windows,
            rank=rank_of(source.priority, queued_ns, arrival, settings.priority_aging_seconds),
            deadline_ns=deadline_of(queued_ns, source.deadline_seconds, settings.deadline_seconds),
        )
        self._num_arrivals += 1
        self.scheduler.add(request)

    def abort(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT, error: str = "", error_type: str = ""
    ) -> list[SequenceOutput]:
        """End a request whatever its state. Unknown ids are ignored.

        Its blocks are free on return, or, if they take part in a transfer, when that has ended.

        Args:
            request_id: the request.
            reason: what its caller and telemetry are told.
            error: what its caller is told about an error.
            error_type: what telemetry is told about an error: its class.
        """
        request = self.scheduler.lifecycle.find(request_id)
        return [] if request is None else self.scheduler.end(request, reason, error, error_type)

    def stop_sequence(self, request_id: str, sequence: int) -> None:
        """End one sequence with reason `stop`. Unknown ids are ignored, and so are beams: they end together."""
        request = self.scheduler.lifecycle.find(request_id)
        if request is not None and request.search is None and 0 <= sequence < len(request.sequences):
            self.scheduler.lifecycle.finish_sequence(request.sequences[sequence], FinishReason.STOP)

    def reject(self, refusal: Refusal) -> None:
        """Report a request that was refused before it was added."""
        if self._log.active:
            self._log.append(refusal.to_event())

    def keep_time(self) -> None:
        """End what is over although no step is done."""
        pause = self.scheduler.admission.pause
        if pause.is_active:
            self._log.begin(self._num_steps)
            pause.end_if_over()

    def root_of(self, cache_salt: str, tenant_salt: str, adapter: bytes = b"") -> BlockHash:
        """Return the parent of the first block of requests with these keys."""
        settings = self.settings
        return root_hash(
            sequence_keys(
                settings.block_size,
                settings.weights_fingerprint,
                cache_salt=cache_salt,
                tenant_salt=tenant_salt,
                adapter=adapter,
                groups=repr(settings.groups).encode() if len(settings.groups) > 1 else b"",
            )
        )

    def live_request_ids(self) -> list[str]:
        """Return the ids of all requests that have not ended."""
        return [request.request_id for request in self.scheduler.lifecycle.requests()]

    def load_ids(self) -> set[LoadId | None]:
        """Return the LoRA adapters of all requests that have not ended."""
        return {request.load_id for request in self.scheduler.lifecycle.requests()}

    def close(self) -> None:
        """Let go of what tiers hold outside this process's memory, at its end."""
        if self.tiers is not None:
            self.tiers.close()

    # ------------------------------------------------------------------ change

    def prepare_resize(
        self, num_blocks: int, reason: str = "", arriving: Iterable[GenerationRequest] = ()
    ) -> PreparedResize:
        """Find out whether the pool can have another number of blocks. Changes nothing.

        Args:
            num_blocks: blocks from now on, the null block included.
            reason: why, in the words of whoever asked.
            arriving: requests that were accepted and will be added.

        Raises:
            ChangeRefused: something does not fit.
        """
        return self.resizer.prepare(num_blocks, reason, self.settings, self.accepted(arriving))

    def resize(self, prepared: PreparedResize) -> None:
        """Give the pool the number of blocks that was prepared just now.

        Raises:
            ChangeFailed: the memory cannot be had; nothing was changed.
        """
        self.adopt(self.resizer.carry_out(prepared, self.settings))

    def report_refused_resize(self, num_blocks: int, reason: str, error: str) -> None:
        """Tell that a number of blocks was asked for and refused."""
        if self._resizer is not None:
            self._resizer.report_refusal(num_blocks, self.settings, reason, error)

    def adopt(self, settings: EngineSettings) -> None:
        """Follow these settings from the next step on. Those that the pool depends on have come into force before."""
        self.settings = settings
        self.manager.enable_prefix_cache = settings.enable_prefix_cache
        self.scheduler.adopt(settings)

    def adopt_layout(self, settings: EngineSettings, block_bytes: int) -> None:
        """Follow settings whose blocks pool and memory have already."""
        self._block_bytes = block_bytes
        self.adopt(settings)

    def end_pins(self, cause: UnpinCause, actor: str, reason: str) -> int:
        """End all pins of prefixes; return how many there were."""
        num_ended = self.pins.remove_all(cause, actor, reason)
        self.adopt(replace(self.settings, num_pinned_blocks=0))
        return num_ended

    @contextmanager
    def vital(self) -> Iterator[None]:
        """Note an exception of something that must not be left half done: the engine stops rather than go on."""
        try:
            yield
        except BaseException as error:
            self.defect = error
            raise

    @property
    def memory(self) -> BlockMemory:
        """What the pool's blocks lie in.

        Raises:
            ChangeRefused: it is not the engine's to change.
        """
        if self._memory is None:
            raise ChangeRefused("this engine's memory cannot be changed; restart it with other settings")
        return self._memory

    @property
    def resizer(self) -> PoolResizer:
        """What gives the pool another size.

        Raises:
            ChangeRefused: the pool's memory is not the engine's to change.
        """
        if self._resizer is None:
            raise ChangeRefused("this engine's memory cannot be resized; restart it with another --num-blocks")
        return self._resizer

    def accepted(self, arriving: Iterable[GenerationRequest] = ()) -> list[AcceptedRequest]:
        """Return all requests that were accepted and have not ended: live ones, and those that will be added."""
        return [*self.scheduler.lifecycle.requests(), *arriving]

    # ------------------------------------------------------------------ the step

    def step(self) -> list[SequenceOutput]:
        """Compose a step, run it, enter its results; return what it brought, [] when nothing could run."""
        log = self._log
        started = log.begin(self._num_steps)
        scheduled = self.scheduler.schedule(self._num_steps)
        ended = self.scheduler.take_ended()
        if scheduled is None:
            return ended
        self._num_steps += 1
        scheduled_at = log.clock.monotonic_ns()
        try:
            result = self._executor.execute(scheduled.input)
        except Exception as error:  # whatever the model raises ends this step's requests at most, not the engine
            return ended + self._fail(scheduled, error)
        return ended + self._apply(scheduled, result, scheduled_at - started)

    def _apply(self, scheduled: ScheduledStep, result: StepResult, schedule_ns: int) -> list[SequenceOutput]:
        log = self._log
        computed_at = self._last_step_ns = log.begin(scheduled.input.step)
        applied = self.scheduler.apply(scheduled, result)
        if log.active:
            durations = StepDurations(schedule_ns, log.clock.monotonic_ns() - computed_at)
            log.append(self.scheduler.completed_event(scheduled, result, applied, durations))
        return applied.outputs

    def _fail(self, scheduled: ScheduledStep, error: Exception) -> list[SequenceOutput]:
        logger.error("step failed", step=scheduled.input.step, error=type(error).__name__, exc_info=error)
        self._log.begin(scheduled.input.step)
        error_type = type(error).__name__
        taken_back = None
        if is_out_of_memory(error):
            if self._log.active:
                self._log.append(OutOfMemory(scheduled.input.num_tokens, len(scheduled.chunks)))
            taken_back = self.scheduler.retry_smaller(scheduled)
        if self._log.active:
            written = taken_back or {}
            self._log.append(StepFailed(error_type, list(written), list(written.values())))
        if taken_back is not None:
            return []
        outputs: list[SequenceOutput] = []
        for chunk in scheduled.chunks:
            request_id = chunk.sequence.request.request_id
            outputs += self.abort(
                request_id, FinishReason.ERROR, "the engine failed to compute this request", error_type
            )
        return outputs

    # ------------------------------------------------------------------ truth

    def snapshot(self) -> EngineSnapshot:
        """Return the whole KV state, and the number of the event that comes next."""
        settings, log = self.settings, self._log
        return EngineSnapshot(
            seq=log.head,
            step=log.step,
            time_ns=log.now_ns,
            block_size_tokens=settings.block_size,
            block_bytes=self._block_bytes,
            watermark_blocks=settings.watermark_blocks,
            max_queued_requests=settings.max_queued_requests,
            max_queued_tokens=settings.max_queued_tokens,
            tiers=[
                self.manager.pool.to_state(with_parents=settings.emit_token_ids),
                *(self.tiers.states() if self.tiers is not None else ()),
            ],
            sequences=[*self.manager.to_states(), *(self.tiers.sequences() if self.tiers is not None else ())],
            requests=[
                RequestState(
                    request=request.request_id,
                    state=request.state.value,
                    queued_ns=request.queued_ns,
                    wait_reason=request.wait_reason.value if request.wait_reason else "",
                )
                for request in self.scheduler.lifecycle.requests()
            ],
            config=numbers_in_force(settings),
            config_drift=dict(self.config_drift),
            transfers=self.tiers.transfers() if self.tiers is not None else [],
            last_step_ns=self._last_step_ns,
            pins=self.pins.to_states(),
            groups=_group_states(settings),
        )

    def check_integrity(self) -> None:
        """Verify all invariants of pools and tables.

        Raises:
            CacheCorruption: with the equation that does not hold.
        """
        self.manager.check_integrity()
        if self.tiers is not None:
            self.tiers.check_integrity()

    def chain_of(self, source: GenerationRequest | Request) -> HashChain:
        """Return the hash chain of a request's prompt, for blocks of the present size."""
        images = [MultimodalItem(each.position, each.num_tokens, each.image.content_hash) for each in source.images]
        return HashChain(self._root_of(source), self.settings.block_size, images)

    def _root_of(self, source: GenerationRequest | Request) -> BlockHash:
        if isinstance(source, Request) and source.own_root is not None:
            return source.own_root
        adapter = source.load_id.encode() if source.load_id is not None else b""
        return self.root_of(source.cache_salt, source.tenant_salt, adapter)


def _group_states(settings: EngineSettings) -> list[GroupState]:
    """Return the KV groups for a snapshot: none where there is one that sees all."""
    if settings.windows == (None,):
        return []
    return [GroupState(GROUPS[number], len(group.layers), group.window) for number, group in enumerate(settings.groups)]

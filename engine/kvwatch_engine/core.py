"""One engine without threads: its state, and one step at a time.

`engine.py` runs this on a thread of its own; property tests drive it directly. Knows the model only as a
`StepExecutor`. One thread only.
"""

import secrets

import structlog

from kvwatch.telemetry.events import OutOfMemory, RequestRejected, StepFailed
from kvwatch.telemetry.events.request import RejectionReason
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import EngineSnapshot, RequestState
from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.contracts.errors import is_out_of_memory
from kvwatch_engine.contracts.request import FinishReason, GenerationRequest, SequenceOutput
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.contracts.step import StepExecutor, StepResult
from kvwatch_engine.memory.block_hash import ExtraKey, HashChain, KeyTag, root_hash
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.block_pool import BlockPool
from kvwatch_engine.scheduling.request import Request
from kvwatch_engine.scheduling.scheduler import Scheduler, StepDurations
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
        self, settings: EngineSettings, executor: StepExecutor, log: EventLog, *, block_bytes: int = 0
    ) -> None:
        self.settings = settings
        self._executor = executor
        self._log = log
        self._block_bytes = block_bytes
        pool = BlockPool(settings.num_blocks, log)
        self.manager = BlockManager(
            pool,
            settings.block_size,
            log,
            enable_prefix_cache=settings.enable_prefix_cache,
            emit_token_ids=settings.emit_token_ids,
        )
        self.scheduler = Scheduler(settings, self.manager, log)
        self._num_steps = 0
        self._num_arrivals = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return self.scheduler.has_work

    @property
    def log(self) -> EventLog:
        """The log that the engine emits to."""
        return self._log

    @property
    def num_steps(self) -> int:
        """Steps done so far."""
        return self._num_steps

    # ------------------------------------------------------------------ requests

    def add(self, source: GenerationRequest, queued_ns: int) -> None:
        """Take in a request that was found valid. `queued_ns` is the monotonic time of its arrival."""
        seed = source.sampling.seed
        first_seed = secrets.randbits(63) if seed is None else seed
        request = Request(
            source,
            arrival=self._num_arrivals,
            queued_ns=queued_ns,
            seeds=[sequence_seed(first_seed, index) for index in range(source.sampling.n)],
            chain=HashChain(self._root(source.cache_salt), self.settings.block_size),
        )
        self._num_arrivals += 1
        self.scheduler.lifecycle.queue(request)

    def abort(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT, error: str = "", error_type: str = ""
    ) -> list[SequenceOutput]:
        """End a request whatever its state; its blocks are free on return. Unknown ids are ignored.

        Args:
            request_id: the request.
            reason: what its caller and telemetry are told.
            error: what its caller is told about an error.
            error_type: what telemetry is told about an error: its class.
        """
        request = self.scheduler.lifecycle.find(request_id)
        if request is None:
            return []
        outputs = [
            SequenceOutput(request_id=request_id, sequence=sequence.index, finish_reason=reason, error=error)
            for sequence in request.live_sequences()
        ]
        self.scheduler.lifecycle.finish_request(request, reason, error_type)
        return outputs

    def stop_sequence(self, request_id: str, sequence: int) -> None:
        """End one sequence with reason `stop`. Unknown ids are ignored."""
        request = self.scheduler.lifecycle.find(request_id)
        if request is not None and 0 <= sequence < len(request.sequences):
            self.scheduler.lifecycle.finish_sequence(request.sequences[sequence], FinishReason.STOP)

    def reject(self, request_id: str, reason: RejectionReason) -> None:
        """Report a request that was refused before it was added."""
        if self._log.active:
            self._log.append(RequestRejected(request_id, reason))

    def live_request_ids(self) -> list[str]:
        """Return the ids of all requests that have not ended."""
        return [request.request_id for request in self.scheduler.lifecycle.requests()]

    # ------------------------------------------------------------------ the step

    def step(self) -> list[SequenceOutput]:
        """Compose a step, run it, enter its results; return what it brought, [] when nothing could run."""
        log = self._log
        started = log.begin(self._num_steps)
        scheduled = self.scheduler.schedule(self._num_steps)
        if scheduled is None:
            return []
        self._num_steps += 1
        scheduled_at = log.clock.monotonic_ns()
        try:
            result = self._executor.execute(scheduled.input)
        except Exception as error:  # whatever the model raises ends this step's requests, not the engine
            return self._fail(scheduled, error)
        return self._apply(scheduled, result, scheduled_at - started)

    def _apply(self, scheduled: ScheduledStep, result: StepResult, schedule_ns: int) -> list[SequenceOutput]:
        log = self._log
        computed_at = log.begin(scheduled.input.step)
        applied = self.scheduler.apply(scheduled, result)
        if log.active:
            durations = StepDurations(
                schedule_ns, result.forward_ns, result.sample_ns, log.clock.monotonic_ns() - computed_at
            )
            log.append(self.scheduler.completed_event(scheduled, applied, durations))
        return applied.outputs

    def _fail(self, scheduled: ScheduledStep, error: Exception) -> list[SequenceOutput]:
        logger.error("step failed", step=scheduled.input.step, error=type(error).__name__, exc_info=error)
        self._log.begin(scheduled.input.step)
        error_type = type(error).__name__
        if self._log.active:
            if is_out_of_memory(error):
                self._log.append(OutOfMemory(scheduled.input.num_tokens, len(scheduled.chunks)))
            self._log.append(StepFailed(error_type))
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
            tiers=[self.manager.pool.to_state()],
            sequences=self.manager.to_states(),
            requests=[
                RequestState(
                    request=request.request_id,
                    state=request.state.value,
                    queued_ns=request.queued_ns,
                    wait_reason=request.wait_reason.value if request.wait_reason else "",
                )
                for request in self.scheduler.lifecycle.requests()
            ],
            config=settings.numbers(),
        )

    def check_integrity(self) -> None:
        """Verify all invariants of pool and tables.

        Raises:
            CacheCorruption: with the equation that does not hold.
        """
        self.manager.check_integrity()

    def _root(self, cache_salt: str) -> BlockHash:
        keys = [
            ExtraKey(KeyTag.BLOCK_SIZE, self.settings.block_size.to_bytes(8, "little")),
            ExtraKey(KeyTag.WEIGHTS, self.settings.weights_fingerprint.encode()),
        ]
        if cache_salt:
            keys.append(ExtraKey(KeyTag.SALT, cache_salt.encode("utf-8", "surrogatepass")))
        return root_hash(keys)

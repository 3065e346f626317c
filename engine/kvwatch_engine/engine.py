"""The engine: an `EngineCore` on a thread of its own, spoken to through an inbox.

    API thread ── submit, abort, stop_sequence ──▶ inbox ──▶ engine thread: commands, step, commands, step, ...
    observatory ── snapshot ──────────────────────▶   │           │
                                                      └───────────┴──▶ listener(outputs) once a step

Commands are carried out between two steps, in order. Everything the core owns is touched by the engine thread only;
what callers read directly (queue lengths, flags) are single integers.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

import msgspec
import structlog

from kvwatch.errors import ChangeRefused, ControlError
from kvwatch.telemetry.events import DrainStarted, EngineEnded
from kvwatch.telemetry.events.request import RejectionReason
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import EngineSnapshot
from kvwatch_engine.adapter_desk import AdapterDesk
from kvwatch_engine.contracts.adapter import LoadId
from kvwatch_engine.contracts.cache import BlockMemory
from kvwatch_engine.contracts.errors import EngineOverloaded, RequestInvalid, RequestRejected, rejection_reason
from kvwatch_engine.contracts.request import (
    FinishReason,
    GenerationRequest,
    OutputListener,
    Refusal,
    RequestOrigin,
    SequenceOutput,
)
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.contracts.step import StepExecutor
from kvwatch_engine.contracts.tiers import Tiers
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.scheduling import limits
from kvwatch_engine.stall_watch import LendingExecutor, LogLease, StallWatch

_IDLE_POLL_SECONDS = 0.5
_BLOCKED_POLL_SECONDS = 0.01
_BUSY_POLL_SECONDS = 0.02
"""Pause before a change that had to wait for transfers is asked for again."""

ENGINE_FAILED = "EngineFailed"
"""Class of the error that ends all requests when the engine itself is defective."""

T = TypeVar("T")
Command = Callable[[EngineCore], None]

logger = structlog.get_logger(__name__)


def _wake_up(_core: EngineCore) -> None:
    """Do nothing: the engine thread looks up from its inbox."""


class Engine:
    """Serves requests; implements `EngineClient` for the server and `EngineControl` for the observatory.

    Start once, stop once; `stop` is safe without `start` and twice. All other methods may be called from any thread.
    """

    def __init__(  # noqa: PLR0913 - by keyword
        self,
        settings: EngineSettings,
        executor: StepExecutor,
        log: EventLog,
        listener: OutputListener,
        *,
        block_bytes: int = 0,
        memory_bytes: Mapping[str, int] | None = None,
        memory: BlockMemory | None = None,
        make_tiers: Callable[[BlockManager], Tiers] | None = None,
    ) -> None:
        """Create an engine that does not run yet.

        Args:
            settings: limits and policies.
            executor: computes the steps.
            log: where events go.
            listener: is told what each step brought.
            block_bytes: size of one block over all layers, for telemetry.
            memory_bytes: memory of the device by what it is for (`weights`, `kv`, `workspace`), for telemetry.
            memory: the blocks' memory; without it the pool cannot be resized.
            make_tiers: makes the tiers behind the device; none without it.
        """
        self.settings = settings
        self._log = log
        self._listener = listener
        self._lease = LogLease()
        self._core = EngineCore(
            settings,
            LendingExecutor(executor, self._lease),
            log,
            block_bytes=block_bytes,
            memory=memory,
            make_tiers=make_tiers,
        )
        self._block_bytes = block_bytes
        self._memory_bytes = dict(memory_bytes or {})
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvwatch-engine", daemon=True)
        self._is_stopping = threading.Event()
        self._is_draining = False
        self._has_failed = False
        self._lock = threading.Lock()
        self._pending: dict[str, GenerationRequest] = {}  # submitted, not yet taken in; under the lock
        self.adapters = AdapterDesk(self._lock, lambda: self._inbox.put(_wake_up))
        self._progress_ns = log.clock.monotonic_ns()
        self._watch = StallWatch(log, self._lease, settings.stall_seconds, self._stuck_ns, self._queues)

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Start the step loop."""
        self._progress_ns = self._log.clock.monotonic_ns()
        self._thread.start()
        self._watch.start()

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """Stop the step loop after the current step; live requests end with reason `abort`."""
        self._is_stopping.set()
        self._watch.stop()
        self._inbox.put(_wake_up)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)

    def begin_drain(self, grace_seconds: float) -> None:
        """Refuse new requests from now on; those that were accepted go on. Safe to call twice."""
        with self._lock:
            is_first, self._is_draining = not self._is_draining, True
        if is_first:
            self._inbox.put(lambda _core: self._emit_drain(grace_seconds))

    def abort_all(self) -> None:
        """End every live request with reason `abort`; their callers are told."""
        self._inbox.put(self._abort_all)

    @property
    def num_live_requests(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._pending) + self._core.scheduler.lifecycle.num_live

    # ------------------------------------------------------------------ EngineClient

    @property
    def max_model_len(self) -> int:
        """Longest possible sequence in tokens: min(model, pool)."""
        return limits.max_model_len(self.settings)

    @property
    def max_queued_requests(self) -> int:
        """Most requests that can wait at once."""
        return self.settings.max_queued_requests

    def max_new_tokens(self, num_prompt_tokens: int, num_sequences: int) -> int:
        """Return the largest `max_tokens` with which such a request can run; below 1 when it cannot run at all."""
        return limits.max_new_tokens(num_prompt_tokens, num_sequences, self.settings)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; its outputs come through the listener.

        Raises:
            RequestInvalid: it can never run.
            EngineOverloaded: the queue is full, or the engine drains.
        """
        queued_ns = self._log.clock.monotonic_ns()
        try:
            limits.check_valid(request, self.settings)
            with self._lock:
                limits.check_length(request, self.settings)  # the pool is not resized meanwhile
                self.adapters.check(request.load_id)
                self._check_room(request)
                self._pending[request.request_id] = request
        except RequestRejected as error:
            self.note_rejection(request.request_id, rejection_reason(error), request.origin, queued_ns)
            raise
        self._inbox.put(lambda core: self._take_in(core, request, queued_ns))

    def note_rejection(
        self, request_id: str, reason: RejectionReason, origin: RequestOrigin, arrived_ns: int | None = None
    ) -> None:
        """Count a request that was refused before `submit`; `submit` counts its own refusals."""
        now = self._log.clock.monotonic_ns()
        refusal = Refusal(request_id, reason, origin, now if arrived_ns is None else arrived_ns, now)
        self._inbox.put(lambda core: core.reject(refusal))

    def abort(self, request_id: str) -> None:
        """End a request whatever its state and free its blocks. Unknown ids are ignored."""
        self._inbox.put(lambda core: self._abort(core, request_id))

    def stop_sequence(self, request_id: str, sequence: int) -> None:
        """End one sequence with reason `stop`; no further output comes for it."""
        self._inbox.put(lambda core: core.stop_sequence(request_id, sequence))

    # ------------------------------------------------------------------ EngineControl

    def snapshot(self, timeout_seconds: float = 5.0) -> EngineSnapshot:
        """Return the KV state between two steps.

        Raises:
            ControlError: the engine has stopped, or did not answer in time.
        """
        snapshot = self._ask(lambda core: core.snapshot(), timeout_seconds)
        state = "draining" if self._is_draining else "running"
        return msgspec.structs.replace(snapshot, engine_state=state, memory_bytes=self._memory_bytes)

    def resize(self, num_blocks: int, *, reason: str = "", timeout_seconds: float = 60.0) -> None:
        """Give the pool another number of blocks between two steps, while requests run; see `PoolControl`.

        Raises:
            ChangeRefused: live requests need more blocks than that, now or at worst; nothing was changed.
            ChangeFailed: there is not enough memory; nothing was changed.
            ControlError: the engine has stopped, or did not answer in time.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                return self._ask(lambda core: self._resize(core, num_blocks, reason), left)
            except ChangeRefused as error:
                if not error.is_passing or left == 0.0:
                    raise
                time.sleep(_BUSY_POLL_SECONDS)

    def check_integrity(self, timeout_seconds: float = 5.0) -> None:
        """Verify all invariants of pool and tables between two steps.

        Raises:
            CacheCorruption: with the equation that does not hold.
            ControlError: the engine has stopped, or did not answer in time.
        """
        self._ask(lambda core: core.check_integrity(), timeout_seconds)

    def is_alive(self) -> bool:
        """Whether the step loop makes progress, or has nothing to do."""
        if self._has_failed or not self._thread.is_alive():
            return False
        return self._stuck_ns() < self.settings.stall_seconds * 1e9

    def is_ready(self) -> bool:
        """Whether new requests are accepted."""
        return self.is_alive() and not self._is_draining and not self._is_stopping.is_set()

    # ------------------------------------------------------------------ engine thread

    def _run(self) -> None:
        self._lease.take()
        try:
            while not self._is_stopping.is_set():
                self._carry_out_commands(wait_seconds=0 if self._core.has_work else _IDLE_POLL_SECONDS)
                if self._core.has_work and not self._is_stopping.is_set():
                    self._step()
                if self.adapters.has_retired:
                    self.adapters.release(self._load_ids)
        except Exception:
            # A defect of the engine itself: serving wrong answers would be worse than stopping.
            self._has_failed = True
            logger.critical("the engine has failed and stopped", exc_info=True)
        finally:
            self._end_everything()
            self._watch.stop()
            self._lease.give()

    def _step(self) -> None:
        core = self._core
        steps_before, transfers_before = core.num_steps, core.scheduler.num_transfers
        outputs = core.step()
        is_blocked = core.num_steps == steps_before
        if not is_blocked or core.scheduler.num_transfers != transfers_before:
            self._progress_ns = self._log.clock.monotonic_ns()
        if outputs:
            self._listener(outputs)
        if is_blocked and core.has_work:
            self._await_change()

    def _await_change(self) -> None:
        """Nothing can be computed now: wait a little for a transfer to end or for a command."""
        tiers = self._core.tiers
        if tiers is None or tiers.num_in_flight == 0:
            self._carry_out_commands(wait_seconds=_BLOCKED_POLL_SECONDS)
            return
        self._lease.give()
        try:
            tiers.wait(_BLOCKED_POLL_SECONDS)
        finally:
            self._lease.take()

    def _carry_out_commands(self, wait_seconds: float) -> None:
        """Carry out all commands in the inbox, waiting for the first one so long."""
        if not self._core.has_work or self._core.scheduler.is_on_hold:
            self._progress_ns = self._log.clock.monotonic_ns()
        try:
            command = self._await_command(wait_seconds) if wait_seconds else self._inbox.get_nowait()
            self._log.begin(self._core.num_steps)
            while True:
                command(self._core)
                command = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _await_command(self, seconds: float) -> Command:
        self._lease.give()  # with requests that nothing can be done for, this is where an engine is stuck
        try:
            return self._inbox.get(timeout=seconds)
        finally:
            self._lease.take()

    def _take_in(self, core: EngineCore, request: GenerationRequest, queued_ns: int) -> None:
        core.add(request, queued_ns)
        with self._lock:
            self._pending.pop(request.request_id, None)

    def _load_ids(self) -> set[LoadId | None]:
        return {request.load_id for request in self._pending.values()} | self._core.load_ids()

    def _abort(self, core: EngineCore, request_id: str) -> None:
        outputs = core.abort(request_id)
        if outputs:
            self._listener(outputs)

    def _resize(self, core: EngineCore, num_blocks: int, reason: str) -> None:
        with self._lock:
            prepared = core.prepare_resize(num_blocks, reason, self._pending.values())
            # Meanwhile nobody is accepted who fits one of the two sizes only.
            self.settings = min(core.settings, prepared.wanted, key=lambda settings: settings.num_blocks)
        try:
            core.resize(prepared)
        finally:
            self.settings = core.settings
        if "kv" in self._memory_bytes:
            self._memory_bytes["kv"] = num_blocks * self._block_bytes

    def _emit_drain(self, grace_seconds: float) -> None:
        if self._log.active:
            self._log.append(DrainStarted(int(grace_seconds * 1e9)))

    def _abort_all(self, core: EngineCore) -> None:
        for request_id in core.live_request_ids():
            self._abort(core, request_id)

    def _end_everything(self) -> None:
        """Tell all callers that their requests are over, so that nobody waits for ever."""
        self._is_stopping.set()
        self._log.begin(self._core.num_steps)
        with self._lock:
            never_taken_in = list(self._pending.values())
            self._pending.clear()
        reason, error, error_type = FinishReason.ABORT, "", ""
        if self._has_failed:
            reason, error, error_type = FinishReason.ERROR, "the engine has failed", ENGINE_FAILED
        outputs = [
            SequenceOutput(request_id=request.request_id, sequence=index, finish_reason=reason, error=error)
            for request in never_taken_in
            for index in range(request.sampling.n)
        ]
        for request_id in self._core.live_request_ids():
            outputs += self._core.abort(request_id, reason, error, error_type)
        self._core.close()
        if self._log.active:
            self._log.append(EngineEnded("failed" if self._has_failed else "stopped"))
        if outputs:
            self._listener(outputs)

    # ------------------------------------------------------------------ parts

    def _stuck_ns(self) -> int:
        """Return the time since the step loop last made progress, or had nothing to do. Any thread."""
        progress_ns = self._progress_ns
        return 0 if self.num_live_requests == 0 else self._log.clock.monotonic_ns() - progress_ns

    def _queues(self) -> tuple[int, int]:
        """Return the numbers of running and of waiting requests. Any thread."""
        lifecycle = self._core.scheduler.lifecycle
        num_running = len(lifecycle.running)
        return num_running, lifecycle.num_live - num_running

    def _ask(self, question: Callable[[EngineCore], T], timeout_seconds: float) -> T:
        future: Future[T] = Future()

        def answer(core: EngineCore) -> None:
            try:
                future.set_result(question(core))
            except Exception as error:  # it belongs to whoever asked
                future.set_exception(error)

        if not self._thread.is_alive():
            raise ControlError("the engine has stopped and cannot answer; restart the server")
        self._inbox.put(answer)
        try:
            return future.result(timeout_seconds)
        except TimeoutError:
            raise ControlError(f"the engine did not answer within {timeout_seconds} s; a step takes longer") from None

    def _check_room(self, request: GenerationRequest) -> None:
        """Refuse what cannot be queued now. Under the lock."""
        if self._is_draining or self._is_stopping.is_set():
            raise EngineOverloaded(
                "the server is shutting down; send the request to another replica", reason="draining"
            )
        if request.request_id in self._pending or self._core.scheduler.lifecycle.find(request.request_id):
            raise RequestInvalid(f"request id {request.request_id!r} is in use; choose another one")
        waiting = self._core.scheduler.lifecycle.waiting
        num_requests = len(self._pending) + len(waiting)
        if num_requests >= self.settings.max_queued_requests:
            limit, unit = self.settings.max_queued_requests, "requests"
        elif self._num_queued_tokens() + len(request.prompt_token_ids) > self.settings.max_queued_tokens:
            limit, unit = self.settings.max_queued_tokens, "prompt tokens"
        else:
            return
        raise EngineOverloaded(f"the queue is full (limit {limit} {unit}); try again later", reason="queue_full")

    def _num_queued_tokens(self) -> int:
        pending = sum(len(request.prompt_token_ids) for request in self._pending.values())
        return pending + self._core.scheduler.lifecycle.waiting.num_tokens

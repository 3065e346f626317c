"""The engine: an `EngineCore` on a thread of its own, spoken to through an inbox.

    API thread ── submit, abort, stop_sequence ──▶ inbox ──▶ engine thread: commands, step, commands, step, ...
    observatory ── snapshot ──────────────────────▶   │           │
                                                      └───────────┴──▶ listener(outputs) once a step

Commands are carried out between two steps, in order. Everything the core owns is touched by the engine thread only;
what callers read directly (queue lengths, flags) are single integers.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
import structlog

from kvwatch.errors import ControlError
from kvwatch.telemetry.events import DrainStarted, EngineEnded
from kvwatch.telemetry.events.request import RejectionReason
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import EngineSnapshot
from kvwatch_engine.acceptance import Acceptance
from kvwatch_engine.adapter_gate import AdapterGate
from kvwatch_engine.contracts.adapter import LoadId
from kvwatch_engine.contracts.cache import BlockMemory
from kvwatch_engine.contracts.errors import RequestRejected, rejection_reason
from kvwatch_engine.contracts.request import (
    GenerationRequest,
    OutputListener,
    Refusal,
    RequestOrigin,
)
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.contracts.step import StepExecutor
from kvwatch_engine.contracts.tiers import Tiers
from kvwatch_engine.core import EngineCore
from kvwatch_engine.ending import end_requests
from kvwatch_engine.inbox import Command, Inbox, ask_patiently
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.scheduling import limits
from kvwatch_engine.stall_watch import LendingExecutor, LogLease, StallWatch

_IDLE_POLL_SECONDS = 0.5
_BLOCKED_POLL_SECONDS = 0.01

T = TypeVar("T")

logger = structlog.get_logger(__name__)


def _wake_up(_core: EngineCore) -> None:
    """Do nothing: the engine thread looks up from its inbox."""


class Engine:
    """Serves requests; implements `EngineClient` for the server and `EngineControl` for the observatory.

    `live.LiveEngine` changes it while it serves, through `change`.

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
        self._memory_bytes = dict(memory_bytes or {})
        self._inbox = Inbox()
        self._thread = threading.Thread(target=self._run, name="kvwatch-engine", daemon=True)
        self._is_stopping = threading.Event()
        self._is_draining = False
        self._has_failed = False
        lock = threading.Lock()
        self.adapters = AdapterGate(lock, log, lambda run: self._inbox.put(lambda _core: run()))
        self._acceptance = Acceptance(
            settings, self._core.scheduler.lifecycle, lock, lambda request: self.adapters.check(request.load_id)
        )
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
        self._acceptance.close()
        self._watch.stop()
        self._inbox.put(_wake_up)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)

    def before_start(self, make: Callable[[EngineCore], T]) -> T:
        """Give the core to whoever sets something up; only before the engine is started."""
        assert self._thread.ident is None, "the core belongs to the engine thread"
        return make(self._core)

    def begin_drain(self, grace_seconds: float) -> None:
        """Refuse new requests from now on; those that were accepted go on. Safe to call twice."""
        if self._acceptance.close():
            self._is_draining = True
            self._inbox.put(lambda _core: self._emit_drain(grace_seconds))

    def abort_all(self) -> None:
        """End every live request with reason `abort`; their callers are told."""
        self._inbox.put(self._abort_all)

    @property
    def num_live_requests(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._acceptance) + self._core.scheduler.lifecycle.num_live

    # ------------------------------------------------------------------ EngineClient

    @property
    def settings(self) -> EngineSettings:
        """Settings in force."""
        return self._acceptance.settings

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
            self._acceptance.accept(request)
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

    def abort_and_tell(self, request_id: str, timeout_seconds: float) -> bool:
        """End a request as `abort` does; return whether it was live.

        Raises:
            ControlError: the engine has stopped, or did not answer in time.
        """
        return self.ask(lambda core: self._abort(core, request_id), timeout_seconds)

    def pending_requests(self) -> list[GenerationRequest]:
        """Return the requests that were accepted and that the engine thread has not taken in yet."""
        return self._acceptance.pending()

    def stop_sequence(self, request_id: str, sequence: int) -> None:
        """End one sequence with reason `stop`; no further output comes for it."""
        self._inbox.put(lambda core: core.stop_sequence(request_id, sequence))

    # ------------------------------------------------------------------ EngineControl

    def snapshot(self, timeout_seconds: float = 5.0) -> EngineSnapshot:
        """Return the KV state between two steps.

        Raises:
            ControlError: the engine has stopped, or did not answer in time.
        """
        snapshot = self.ask(lambda core: core.snapshot(), timeout_seconds)
        memory = dict(self._memory_bytes)
        if "kv" in memory and snapshot.block_bytes:
            memory["kv"] = snapshot.tiers[0].num_blocks * snapshot.block_bytes
        if self.adapters.num_bytes is not None:
            memory["adapters"] = self.adapters.num_bytes
        state = "draining" if self._is_draining else "running"
        return msgspec.structs.replace(snapshot, engine_state=state, memory_bytes=memory)

    def check_integrity(self, timeout_seconds: float = 5.0) -> None:
        """Verify all invariants of pool and tables between two steps.

        Raises:
            CacheCorruption: with the equation that does not hold.
            ControlError: the engine has stopped, or did not answer in time.
        """
        self.ask(lambda core: core.check_integrity(), timeout_seconds)

    def is_alive(self) -> bool:
        """Whether the step loop makes progress, or has nothing to do."""
        if self._has_failed or not self._thread.is_alive():
            return False
        return self._stuck_ns() < self.settings.stall_seconds * 1e9

    def is_ready(self) -> bool:
        """Whether new requests are accepted."""
        return self.is_alive() and not self._is_draining and not self._is_stopping.is_set()

    def ask(self, question: Callable[[EngineCore], T], timeout_seconds: float) -> T:
        """Have something answered on the engine thread, between two steps; what it raises is raised here.

        Raises:
            ControlError: the engine has stopped, or did not answer in time.
        """
        if not self._thread.is_alive():
            raise ControlError("the engine has stopped and cannot answer; restart the server")
        return self._inbox.ask(question, timeout_seconds)

    def change(
        self,
        prepare: Callable[[EngineCore, Sequence[GenerationRequest]], tuple[EngineSettings, Callable[[], T]]],
        timeout_seconds: float,
    ) -> T:
        """Change the engine between two steps; whoever is accepted meanwhile fits it before and after.

        Args:
            prepare: finds out whether it is possible. Is given the core and the requests that it does not know yet;
                returns the settings that are wanted, and what changes the core and its settings.
            timeout_seconds: how long to wait for an answer, and for what stands against it to pass.

        Raises:
            ControlError: the engine has stopped, or did not answer in time; or whatever `prepare` says.
        """
        return ask_patiently(
            lambda seconds: self.ask(lambda core: self._change(core, prepare), seconds), timeout_seconds
        )

    # ------------------------------------------------------------------ engine thread

    def _run(self) -> None:
        self._lease.take()
        try:
            while not self._is_stopping.is_set():
                self._carry_out_commands(wait_seconds=0 if self._core.has_work else _IDLE_POLL_SECONDS)
                if not self._core.has_work:
                    self._core.keep_time()
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
        command = self._await_command(wait_seconds) if wait_seconds else self._inbox.next()
        if command is not None:
            self._log.begin(self._core.num_steps)
            self._inbox.carry_out(self._core, command)
        if self._core.defect is not None:
            raise self._core.defect

    def _await_command(self, seconds: float) -> Command | None:
        self._lease.give()  # with requests that nothing can be done for, this is where an engine is stuck
        try:
            return self._inbox.next(seconds)
        finally:
            self._lease.take()

    def _take_in(self, core: EngineCore, request: GenerationRequest, queued_ns: int) -> None:
        core.add(request, queued_ns)
        self._acceptance.take(request.request_id)

    def _load_ids(self) -> set[LoadId | None]:
        return self._acceptance.load_ids() | self._core.load_ids()

    def _abort(self, core: EngineCore, request_id: str) -> bool:
        outputs = core.abort(request_id)
        if outputs:
            self._listener(outputs)
        return bool(outputs)

    def _change(
        self,
        core: EngineCore,
        prepare: Callable[[EngineCore, Sequence[GenerationRequest]], tuple[EngineSettings, Callable[[], T]]],
    ) -> T:
        carry_out = self._acceptance.begin_change(lambda arriving: prepare(core, arriving))
        try:
            return carry_out()
        finally:
            self._acceptance.end_change(core.settings)

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
        self._acceptance.close()
        outputs = end_requests(self._core, self._acceptance.take_all(), has_failed=self._has_failed)
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

"""Which LoRA adapters new requests may use, and which retired ones are still in use. Knows no weights.

admit ──▶ usable ──retire──▶ retired: new requests are refused, those that were accepted go on
│ none of them is left
▼
on_unused()
"""

import threading
from collections.abc import Callable, Container
from typing import NamedTuple

from kvwatch.telemetry.events import AdapterFreed, AdapterLoaded
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.adapter import Adapter, LoadId
from kvwatch_engine.contracts.errors import RequestInvalid


class _Retired(NamedTuple):
    adapter: Adapter
    since_ns: int
    on_unused: Callable[[], None]


class AdapterGate:
    """Adapters of one engine; implements `AdapterAdmission`. Any thread, but for what says otherwise."""

    def __init__(
        self, lock: threading.Lock, log: EventLog, run_on_engine: Callable[[Callable[[], None]], None]
    ) -> None:
        """Create the gate of no adapters.

        Args:
            lock: under which the engine accepts requests, so that none slips in while its adapter is retired.
            log: where events go.
            run_on_engine: has something done by the engine thread between two steps; it then looks whether retired
                adapters are still in use.
        """
        self._lock = lock
        self._log = log
        self._run_on_engine = run_on_engine
        self._usable: dict[LoadId, Adapter] = {}
        self._retired: dict[LoadId, _Retired] = {}
        self.num_bytes: int | None = None
        """Memory of all adapters, as events have told it; none before there were any."""

    @property
    def has_retired(self) -> bool:
        """Whether an adapter waits for its last requests."""
        return bool(self._retired)

    def admit(self, adapter: Adapter) -> None:
        """Let requests use an adapter, whose weights are in memory."""
        with self._lock:
            self._usable[adapter.load_id] = adapter
        self._run_on_engine(lambda: self._note_loaded(adapter))

    def retire(self, load_id: LoadId, on_unused: Callable[[], None]) -> None:
        """Refuse new requests with an adapter; those that were accepted go on. Does not wait for them.

        Args:
            load_id: the adapter. One that requests may not use anyway is ignored.
            on_unused: called once, on the engine thread, when the last request with it has ended.
        """
        with self._lock:
            adapter = self._usable.pop(load_id, None)
            if adapter is not None:
                self._retired[load_id] = _Retired(adapter, self._log.clock.monotonic_ns(), on_unused)
        self._run_on_engine(lambda: None)

    def check(self, load_id: LoadId | None) -> None:
        """Refuse a request whose adapter may not be used. Under the lock.

        Raises:
            RequestInvalid: so.
        """
        if load_id is not None and load_id not in self._usable:
            raise RequestInvalid(
                "the LoRA adapter of this request is not loaded any more; see /v1/models for what is served",
                param="model",
                code="model_not_found",
            )

    def release(self, find_used: Callable[[], Container[LoadId | None]]) -> None:
        """Tell whoever waits for it that a retired adapter is in use no more. Engine thread only.

        Args:
            find_used: returns the adapters of all accepted requests that have not ended; called under the lock.
        """
        with self._lock:
            used = find_used()
            unused = [load_id for load_id in self._retired if load_id not in used]
            told = [self._retired.pop(load_id) for load_id in unused]
        for retired in told:
            retired.on_unused()
            self._note_freed(retired)

    def _note_loaded(self, adapter: Adapter) -> None:
        self.num_bytes = (self.num_bytes or 0) + adapter.num_bytes
        if self._log.active:
            self._log.append(
                AdapterLoaded(adapter.name, adapter.load_id, adapter.rank, adapter.num_bytes, self.num_bytes)
            )

    def _note_freed(self, retired: _Retired) -> None:
        adapter = retired.adapter
        self.num_bytes = (self.num_bytes or 0) - adapter.num_bytes
        if self._log.active:
            in_use_ns = self._log.clock.monotonic_ns() - retired.since_ns
            self._log.append(AdapterFreed(adapter.name, adapter.load_id, adapter.num_bytes, self.num_bytes, in_use_ns))

"""Which LoRA adapters new requests may use, and which retired ones are still in use. Knows no weights.

admit ──▶ usable ──retire──▶ retired: new requests are refused, those that were accepted go on
│ none of them is left
▼
on_unused()
"""

import threading
from collections.abc import Callable, Container

from kvwatch_engine.contracts.adapter import LoadId
from kvwatch_engine.contracts.errors import RequestInvalid


class AdapterDesk:
    """Adapters of one engine; implements `AdapterAdmission`. Any thread, but for what says otherwise."""

    def __init__(self, lock: threading.Lock, wake_engine: Callable[[], None]) -> None:
        """Create the desk of no adapters.

        Args:
            lock: under which the engine accepts requests, so that none slips in while its adapter is retired.
            wake_engine: has the engine thread look whether a retired adapter is still in use.
        """
        self._lock = lock
        self._wake_engine = wake_engine
        self._usable: set[LoadId] = set()
        self._retired: dict[LoadId, Callable[[], None]] = {}

    @property
    def has_retired(self) -> bool:
        """Whether an adapter waits for its last requests."""
        return bool(self._retired)

    def admit(self, load_id: LoadId) -> None:
        """Let requests use an adapter."""
        with self._lock:
            self._usable.add(load_id)

    def retire(self, load_id: LoadId, on_unused: Callable[[], None]) -> None:
        """Refuse new requests with an adapter; those that were accepted go on. Does not wait for them.

        Args:
            load_id: the adapter. One that requests may not use anyway is ignored.
            on_unused: called once, on the engine thread, when the last request with it has ended.
        """
        with self._lock:
            if load_id in self._usable:
                self._usable.remove(load_id)
                self._retired[load_id] = on_unused
        self._wake_engine()

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
        for on_unused in told:
            on_unused()

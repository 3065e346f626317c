"""Which requests are let into the engine. Runs on their callers' threads; the engine thread takes in what was let in.

While the engine changes, a request must fit it as it was and as it will be: the change may still fail.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvwatch_engine.contracts.adapter import LoadId
from kvwatch_engine.contracts.errors import EngineOverloaded, RequestInvalid
from kvwatch_engine.contracts.request import GenerationRequest
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.scheduling import limits
from kvwatch_engine.scheduling.lifecycle import Lifecycle

T = TypeVar("T")


class Acceptance:
    """Requests that were submitted and that the engine thread has not taken in yet. Any thread."""

    def __init__(
        self,
        settings: EngineSettings,
        lifecycle: Lifecycle,
        lock: threading.Lock,
        check: Callable[[GenerationRequest], None] = lambda _request: None,
    ) -> None:
        """Let in what fits `settings`.

        Args:
            settings: those in force.
            lifecycle: live requests.
            lock: held while a request is let in.
            check: raises RequestRejected for a request that may not come in; called under the lock.
        """
        self._lifecycle = lifecycle
        self._lock = lock
        self._check = check
        self._in_force: tuple[EngineSettings, ...] = (settings,)
        """During a change those before and after."""
        self._pending: dict[str, GenerationRequest] = {}
        self._is_closed = False

    def __len__(self) -> int:
        """Return the number of requests on their way to the engine thread."""
        return len(self._pending)

    @property
    def settings(self) -> EngineSettings:
        """Settings that callers go by."""
        return self._in_force[0]

    # ------------------------------------------------------------ callers

    def accept(self, request: GenerationRequest) -> None:
        """Let a request in.

        Raises:
            RequestInvalid: it can never run.
            EngineOverloaded: the queue is full, or nobody is let in any more.
        """
        checked = self._in_force
        for settings in checked:
            limits.check_valid(request, settings)
        with self._lock:
            for settings in self._in_force:
                if settings not in checked:  # they have changed meanwhile
                    limits.check_valid(request, settings)
                limits.check_length(request, settings)
            self._check(request)
            self._check_room(request)
            self._pending[request.request_id] = request

    def close(self) -> bool:
        """Let nobody in any more; return whether this is the first time."""
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
        return is_first

    @property
    def is_closed(self) -> bool:
        """Whether nobody is let in any more."""
        return self._is_closed

    def pending(self) -> list[GenerationRequest]:
        """Return the requests on their way."""
        with self._lock:
            return list(self._pending.values())

    # ------------------------------------------------------------ engine thread

    def load_ids(self) -> set[LoadId | None]:
        """Return the adapters of the requests on their way. Under the lock."""
        return {request.load_id for request in self._pending.values()}

    def take(self, request_id: str) -> None:
        """Note that the engine thread has taken a request in."""
        with self._lock:
            self._pending.pop(request_id, None)

    def take_all(self) -> list[GenerationRequest]:
        """Return the requests on their way, which nobody will take in any more."""
        with self._lock:
            never_taken_in = list(self._pending.values())
            self._pending.clear()
        return never_taken_in

    def begin_change(self, prepare: Callable[[Sequence[GenerationRequest]], tuple[EngineSettings, T]]) -> T:
        """Accept only what fits the settings that `prepare` wants as well, from now on until `end_change`.

        Args:
            prepare: is given the requests on their way; nobody is let in while it runs. Returns the settings that are
                wanted, and what this method returns. What it raises is raised here, and nothing has changed.
        """
        with self._lock:
            wanted, prepared = prepare(list(self._pending.values()))
            self._in_force = (self._in_force[0], wanted)
            return prepared

    def end_change(self, settings: EngineSettings) -> None:
        """Go by these settings alone."""
        with self._lock:
            self._in_force = (settings,)

    # ------------------------------------------------------------ parts

    def _check_room(self, request: GenerationRequest) -> None:
        """Refuse what cannot be queued now. Under the lock."""
        if self._is_closed:
            raise EngineOverloaded(
                "the server is shutting down; send the request to another replica", reason="draining"
            )
        if request.request_id in self._pending or self._lifecycle.find(request.request_id):
            raise RequestInvalid(f"request id {request.request_id!r} is in use; choose another one")
        settings, waiting = self.settings, self._lifecycle.waiting
        num_tokens = waiting.num_tokens + sum(len(each.prompt_token_ids) for each in self._pending.values())
        if len(self._pending) + len(waiting) >= settings.max_queued_requests:
            limit, unit = settings.max_queued_requests, "requests"
        elif num_tokens + len(request.prompt_token_ids) > settings.max_queued_tokens:
            limit, unit = settings.max_queued_tokens, "prompt tokens"
        else:
            return
        raise EngineOverloaded(f"the queue is full (limit {limit} {unit}); try again later", reason="queue_full")

"""`PrefixControl` of an engine in this process: pins and the reset of its prefix cache. Any thread."""

import time
from collections.abc import Callable, Sequence
from typing import Final

from kvwatch.control import PinnedPrefix, PrefixReset, PrefixScope
from kvwatch_engine.contracts.request import GenerationRequest
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.contracts.tenant import tenant_salt
from kvwatch_engine.core import EngineCore
from kvwatch_engine.engine import Engine
from kvwatch_engine.prefixes import CacheReset, PrefixDesk, PreparedPin

_ANSWER_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.02

PreparedReset = tuple[EngineSettings, Callable[[], CacheReset]]
_EVERYBODY: Final = PrefixScope()


class LivePrefixes:
    """The part of a live engine that has to do with its prefix cache; each call becomes a question to its thread."""

    def __init__(self, engine: Engine, salt_of: Callable[[str], str] = tenant_salt) -> None:
        """Serve an engine that is not started yet; `salt_of` gives the salt of a tenant's blocks."""
        self._engine = engine
        self._desk = engine.before_start(lambda core: PrefixDesk(core, salt_of))

    def pin_prefix(
        self,
        token_ids: Sequence[int],
        scope: PrefixScope = _EVERYBODY,
        *,
        actor: str,
        reason: str = "",
        timeout_seconds: float = _ANSWER_SECONDS,
    ) -> PinnedPrefix:
        """Keep the full blocks of a prefix until `unpin_prefix`; see `PrefixControl`."""

        def prepare(core: EngineCore, arriving: Sequence[GenerationRequest]) -> PreparedPin:
            accepted = core.accepted(arriving)
            return self._desk.prepare_pin(token_ids, scope, accepted, actor=actor, reason=reason)

        return self._engine.change(prepare, timeout_seconds)

    def pin_request(
        self,
        request_id: str,
        num_tokens: int | None = None,
        *,
        actor: str,
        reason: str = "",
        timeout_seconds: float = _ANSWER_SECONDS,
    ) -> PinnedPrefix:
        """Keep the full blocks of a live request's prompt, or of its beginning; see `PrefixControl`."""

        def prepare(core: EngineCore, arriving: Sequence[GenerationRequest]) -> PreparedPin:
            accepted = core.accepted(arriving)
            return self._desk.prepare_pin_of(request_id, num_tokens, accepted, actor=actor, reason=reason)

        return self._engine.change(prepare, timeout_seconds)

    def unpin_prefix(
        self, pin: str, *, actor: str, reason: str = "", timeout_seconds: float = _ANSWER_SECONDS
    ) -> PinnedPrefix:
        """End a pin; see `PrefixControl`."""
        return self._engine.change(
            lambda _core, _arriving: self._desk.prepare_unpin(pin, actor=actor, reason=reason), timeout_seconds
        )

    def pinned_prefixes(self, timeout_seconds: float = _ANSWER_SECONDS) -> list[PinnedPrefix]:
        """Return all pins, the oldest first."""
        return self._engine.ask(lambda _core: self._desk.pins(), timeout_seconds)

    def reset_prefix_cache(
        self,
        *,
        actor: str,
        reason: str = "",
        unpin: bool = False,
        wait_seconds: float = 0.0,
        timeout_seconds: float = _ANSWER_SECONDS,
    ) -> PrefixReset:
        """Forget all content of the prefix cache, in all tiers; see `PrefixControl`."""

        def prepare(core: EngineCore, _arriving: Sequence[GenerationRequest]) -> PreparedReset:
            return core.settings, lambda: self._desk.reset(unpin=unpin, actor=actor, reason=reason)

        reset = self._engine.change(prepare, timeout_seconds)
        deadline = time.monotonic() + wait_seconds
        while True:
            num_in_use, num_in_flight = self._engine.ask(
                lambda core: (self._desk.num_in_use(reset), core.tiers.num_in_flight if core.tiers is not None else 0),
                timeout_seconds,
            )
            is_complete = num_in_use == num_in_flight == 0
            if is_complete or time.monotonic() >= deadline:
                return PrefixReset(
                    num_cleared=reset.num_cleared,
                    num_unpinned=reset.num_unpinned,
                    num_in_use=num_in_use,
                    is_complete=is_complete,
                )
            time.sleep(_POLL_SECONDS)

"""`LiveControl` of an engine in this process: each call becomes a question to the engine thread. Any thread."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from kvwatch.control import (
    AdmissionState,
    BlockPage,
    BlockQuery,
    ChangeOutcome,
    ChangePreview,
    Changes,
    OutsideSetting,
    PrefixOrder,
    PrefixTop,
    RequestPage,
    RequestQuery,
    SettingKey,
    SettingsState,
)
from kvwatch.errors import ChangeRefused, ControlError
from kvwatch.telemetry.snapshot import EngineSnapshot
from kvwatch_engine.contracts.request import GenerationRequest
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.contracts.tenant import tenant_salt
from kvwatch_engine.core import EngineCore
from kvwatch_engine.engine import Engine
from kvwatch_engine.live.changer import Changer, RebuildLimits
from kvwatch_engine.live.inspection import inspect_blocks, inspect_prefixes, inspect_requests
from kvwatch_engine.live.journal import LiveJournal
from kvwatch_engine.live.prefixes import LivePrefixes

MAX_PAUSE_SECONDS: Final = 3600.0

_ANSWER_SECONDS: Final = 5.0

_Prepared = tuple[EngineSettings, Callable[[], ChangeOutcome]]


class LiveEngine(LivePrefixes):
    """Implements `LiveControl` and `PrefixControl`; wraps an engine that runs or will run."""

    def __init__(
        self,
        engine: Engine,
        rebuilds: RebuildLimits | None = None,
        on_phase: Callable[[str], None] = lambda _phase: None,
        salt_of: Callable[[str], str] = tenant_salt,
        journal: LiveJournal | None = None,
    ) -> None:
        """Take what the engine is set to now as declared. Before it is started.

        Args:
            engine: the engine.
            rebuilds: limits of rebuilds of the cache; none allows none.
            on_phase: is told each phase of a rebuild as it begins, on the engine thread; it may fail the rebuild.
            salt_of: gives the salt of a tenant's blocks; any thread.
            journal: notes what is live and not declared.
        """
        super().__init__(engine, salt_of)
        self._journal = journal
        self._changer = engine.before_start(lambda core: Changer(core, rebuilds, on_phase))

    def attach(self, key: SettingKey, setting: OutsideSetting) -> None:
        """Offer a setting of the process that is not the engine's own. Before the engine is started."""
        self._engine.before_start(lambda _core: self._changer.attach(key, setting))

    # ------------------------------------------------------------ EngineControl

    def snapshot(self, timeout_seconds: float = _ANSWER_SECONDS) -> EngineSnapshot:
        """Return the KV state between two steps."""
        return self._engine.snapshot(timeout_seconds)

    def is_alive(self) -> bool:
        """Whether the step loop makes progress, or has nothing to do."""
        return self._engine.is_alive()

    def is_ready(self) -> bool:
        """Whether new requests are accepted."""
        return self._engine.is_ready()

    # ------------------------------------------------------------ settings

    def settings(self, timeout_seconds: float = _ANSWER_SECONDS) -> SettingsState:
        """Return the live and the declared value of every setting that can change."""
        return self._engine.ask(lambda _core: self._changer.state(), timeout_seconds)

    def preview(self, changes: Changes, timeout_seconds: float = _ANSWER_SECONDS) -> ChangePreview:
        """Return what `apply` would do if it were called now."""
        pending = self._engine.pending_requests
        return self._engine.ask(lambda _core: self._changer.preview(changes, pending()), timeout_seconds)

    def apply(
        self,
        changes: Changes,
        *,
        actor: str,
        reason: str,
        expected_version: int | None = None,
        timeout_seconds: float = 60.0,
    ) -> ChangeOutcome:
        """Change settings between two steps, all or none of them; see `LiveControl`."""

        def prepare(_core: EngineCore, arriving: Sequence[GenerationRequest]) -> _Prepared:
            return self._changer.prepare(changes, arriving, actor=actor, reason=reason, version=expected_version)

        try:
            return self._engine.change(prepare, timeout_seconds)
        finally:
            self._note(timeout_seconds=_ANSWER_SECONDS)

    def declare(
        self, keys: Sequence[str], *, actor: str, reason: str, timeout_seconds: float = _ANSWER_SECONDS
    ) -> SettingsState:
        """Let the live values of these settings be the declared ones."""
        state = self._engine.ask(lambda _core: self._changer.declare(keys, actor, reason), timeout_seconds)
        self._note(timeout_seconds)
        return state

    def _note(self, timeout_seconds: float) -> None:
        """Write down what is live and not declared."""
        if self._journal is not None:
            with suppress(ControlError):  # an engine that has stopped has nothing live
                state = self.settings(timeout_seconds)
                self._journal.write({str(each.key): each.live for each in state.settings if each.has_drifted})

    # ------------------------------------------------------------ admission and requests

    def pause_admission(self, seconds: float, *, actor: str, reason: str) -> AdmissionState:
        """Admit no waiting request for so many seconds; who runs goes on."""
        if not 0 < seconds <= MAX_PAUSE_SECONDS:
            raise ChangeRefused(
                f"a pause of {seconds:g} s is not possible; ask for more than 0 and at most {MAX_PAUSE_SECONDS:g} s"
            )

        def pause(core: EngineCore) -> AdmissionState:
            core.scheduler.admission.pause.begin(seconds, actor, reason)
            return _admission(core)

        return self._engine.ask(pause, _ANSWER_SECONDS)

    def resume_admission(self, *, actor: str, reason: str) -> AdmissionState:
        """Admit waiting requests again."""

        def resume(core: EngineCore) -> AdmissionState:
            core.scheduler.admission.pause.end(actor, reason)
            return _admission(core)

        return self._engine.ask(resume, _ANSWER_SECONDS)

    def admission(self, timeout_seconds: float = _ANSWER_SECONDS) -> AdmissionState:
        """Return whether admission is paused."""
        return self._engine.ask(_admission, timeout_seconds)

    def begin_drain(self, grace_seconds: float) -> None:
        """Refuse new requests from now on; those that were accepted go on."""
        self._engine.begin_drain(grace_seconds)

    def abort_request(self, request_id: str, timeout_seconds: float = _ANSWER_SECONDS) -> bool:
        """End a request whatever its state; return False when no such request is live."""
        return self._engine.abort_and_tell(request_id, timeout_seconds)

    # ------------------------------------------------------------ inspection

    def inspect_blocks(self, query: BlockQuery, timeout_seconds: float = _ANSWER_SECONDS) -> BlockPage:
        """Return blocks of the device pool with their owners."""
        return self._engine.ask(lambda core: inspect_blocks(core, query), timeout_seconds)

    def inspect_requests(self, query: RequestQuery, timeout_seconds: float = _ANSWER_SECONDS) -> RequestPage:
        """Return live requests."""
        return self._engine.ask(lambda core: inspect_requests(core, query), timeout_seconds)

    def inspect_prefixes(self, order: PrefixOrder, limit: int, timeout_seconds: float = _ANSWER_SECONDS) -> PrefixTop:
        """Return the largest branches of the tree of known prefixes."""
        return self._engine.ask(lambda core: inspect_prefixes(core, order, limit), timeout_seconds)


def _admission(core: EngineCore) -> AdmissionState:
    pause = core.scheduler.admission.pause
    pause.end_if_over()
    return AdmissionState(pause.is_active, pause.seconds_left)

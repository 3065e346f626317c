"""What may be asked of an engine. The engine implements it; exporters and the admin API only see this.

Every call is answered by the engine between two steps, may be made from any thread, and raises `ControlError` when the
engine has stopped or does not answer in time.
"""

from collections.abc import Sequence
from typing import Protocol

from kvwatch.control.changes import AdmissionState, ChangeOutcome, ChangePreview, Changes, SettingsState
from kvwatch.control.inspection import BlockPage, BlockQuery, PrefixOrder, PrefixTop, RequestPage, RequestQuery
from kvwatch.control.prefixes import PinnedPrefix, PrefixReset, PrefixScope
from kvwatch.control.settings import SettingValue
from kvwatch.telemetry.snapshot import EngineSnapshot


class EngineControl(Protocol):
    """Watching one engine."""

    def snapshot(self, timeout_seconds: float = 5.0) -> EngineSnapshot:
        """Return the engine's KV state between two steps, with the event number from which to go on."""
        ...

    def is_alive(self) -> bool:
        """Whether the step loop makes progress (or has nothing to do). False means stuck or dead."""
        ...

    def is_ready(self) -> bool:
        """Whether new requests are accepted: loaded, warmed up and not draining."""
        ...


class OutsideSetting(Protocol):
    """A live setting that is not the engine's own, such as the log level. Any thread."""

    def get(self) -> SettingValue:
        """Return its value."""
        ...

    def set(self, value: SettingValue) -> None:
        """Give it a value that `LIVE_SETTINGS` allows; does not raise."""
        ...


class LiveControl(EngineControl, Protocol):
    """Looking into an engine and changing it while it serves; a foreign engine cannot be changed."""

    # ------------------------------------------------------------ settings

    def settings(self, timeout_seconds: float = 5.0) -> SettingsState:
        """Return the live and the declared value of every setting that can change."""
        ...

    def preview(self, changes: Changes, timeout_seconds: float = 5.0) -> ChangePreview:
        """Return what `apply` would do if it were called now. Changes nothing, refuses nothing: see `is_possible`."""
        ...

    def apply(
        self,
        changes: Changes,
        *,
        actor: str,
        reason: str,
        expected_version: int | None = None,
        timeout_seconds: float = 60.0,
    ) -> ChangeOutcome:
        """Change settings between two steps, all or none of them.

        Values that are in force already change nothing and are left out of the outcome.

        Args:
            changes: what is to change.
            actor: who asks, for whoever reads the events.
            reason: why, likewise.
            expected_version: version that the settings must still have; none does not ask.
            timeout_seconds: how long to wait for an answer, and for what stands against it to pass.

        Raises:
            ChangeConflict: the settings have another version; nothing was changed.
            ChangeRefused: unknown, out of bounds, not allowed, or it does not fit live requests; nothing was changed.
            ChangeFailed: it was tried and did not work, for instance for want of memory; all is as it was.
        """
        ...

    def declare(self, keys: Sequence[str], *, actor: str, reason: str, timeout_seconds: float = 5.0) -> SettingsState:
        """Let the live values of these settings be the declared ones: whoever wrote them to the file says so.

        Raises:
            ChangeRefused: a key is unknown.
        """
        ...

    # ------------------------------------------------------------ admission and requests

    def pause_admission(self, seconds: float, *, actor: str, reason: str) -> AdmissionState:
        """Admit no waiting request for so many seconds; who runs goes on. Called again it sets a new limit.

        Raises:
            ChangeRefused: the time is not above 0, or above an hour.
        """
        ...

    def resume_admission(self, *, actor: str, reason: str) -> AdmissionState:
        """Admit waiting requests again; nothing happens when admission is not paused."""
        ...

    def admission(self, timeout_seconds: float = 5.0) -> AdmissionState:
        """Return whether admission is paused."""
        ...

    def begin_drain(self, grace_seconds: float) -> None:
        """Refuse new requests from now on; those that were accepted go on. It cannot be undone."""
        ...

    def abort_request(self, request_id: str, timeout_seconds: float = 5.0) -> bool:
        """End a request whatever its state and free its blocks; return False when no such request is live."""
        ...

    # ------------------------------------------------------------ inspection

    def inspect_blocks(self, query: BlockQuery, timeout_seconds: float = 5.0) -> BlockPage:
        """Return blocks of the device pool with their owners.

        Raises:
            ChangeRefused: the limit is out of bounds.
        """
        ...

    def inspect_requests(self, query: RequestQuery, timeout_seconds: float = 5.0) -> RequestPage:
        """Return live requests.

        Raises:
            ChangeRefused: the limit is out of bounds.
        """
        ...

    def inspect_prefixes(self, order: PrefixOrder, limit: int, timeout_seconds: float = 5.0) -> PrefixTop:
        """Return the largest branches of the tree of known prefixes.

        Raises:
            ChangeRefused: the limit is out of bounds.
        """
        ...


class PrefixControl(EngineControl, Protocol):
    """Pins and the reset of an engine's prefix cache; a foreign engine has neither."""

    def pin_prefix(
        self,
        token_ids: Sequence[int],
        scope: PrefixScope = PrefixScope(),  # noqa: B008 - immutable
        *,
        actor: str,
        reason: str = "",
        timeout_seconds: float = 5.0,
    ) -> PinnedPrefix:
        """Keep the full blocks of a prefix, all of which must be cached or in use now, until `unpin_prefix`.

        The same prefix may be pinned several times; its blocks stay until the last of these pins ends, and count once.

        Raises:
            ChangeRefused: less than a block, not all of it is cached, or too much would be pinned; nothing was changed.
        """
        ...

    def pin_request(
        self,
        request_id: str,
        num_tokens: int | None = None,
        *,
        actor: str,
        reason: str = "",
        timeout_seconds: float = 5.0,
    ) -> PinnedPrefix:
        """Keep the full blocks of a live request's prompt, or of its first `num_tokens` tokens; else as `pin_prefix`.

        Raises:
            ChangeRefused: no such request is live, or as `pin_prefix`.
        """
        ...

    def unpin_prefix(self, pin: str, *, actor: str, reason: str = "", timeout_seconds: float = 5.0) -> PinnedPrefix:
        """End a pin; blocks that nobody else pins may be evicted again, last of all.

        Raises:
            ChangeRefused: there is no such pin.
        """
        ...

    def pinned_prefixes(self, timeout_seconds: float = 5.0) -> list[PinnedPrefix]:
        """Return all pins, the oldest first."""
        ...

    def reset_prefix_cache(
        self,
        *,
        actor: str,
        reason: str = "",
        unpin: bool = False,
        wait_seconds: float = 0.0,
        timeout_seconds: float = 5.0,
    ) -> PrefixReset:
        """Forget all content of the prefix cache, in all tiers: no request finds anything of it from now on.

        Args:
            actor: who asks, for whoever reads the events.
            reason: why, likewise.
            unpin: end all pins first.
            wait_seconds: how long to wait until what is in use was released; the answer says whether it was.
            timeout_seconds: how long to wait for the engine's answer besides.

        Raises:
            ChangeRefused: prefixes are pinned and `unpin` is not set; nothing was changed.
        """
        ...

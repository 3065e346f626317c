"""What the observatory may ask of an engine. The engine implements it; exporters and the admin API only see this.

Every call is answered by the engine between two steps, may be made from any thread, and raises `ControlError` when the
engine has stopped or does not answer in time.
"""

from typing import Protocol

from kvwatch.telemetry.snapshot import EngineSnapshot


class EngineControl(Protocol):
    """Control of one engine."""

    def snapshot(self, timeout_seconds: float = 5.0) -> EngineSnapshot:
        """Return the engine's KV state between two steps, with the event number from which to go on."""
        ...

    def is_alive(self) -> bool:
        """Whether the step loop makes progress (or has nothing to do). False means stuck or dead."""
        ...

    def is_ready(self) -> bool:
        """Whether new requests are accepted: loaded, warmed up and not draining."""
        ...


class PoolControl(EngineControl, Protocol):
    """Control of an engine whose pool can change while it serves; that of a foreign engine cannot."""

    def resize(self, num_blocks: int, *, reason: str = "", timeout_seconds: float = 60.0) -> None:
        """Give the device pool another number of blocks between two steps, while requests run.

        Used and cached blocks keep what they hold, as far as they fit: cached ones are evicted first, least recently
        used before others.

        Args:
            num_blocks: blocks from now on, the null block included.
            reason: why, for whoever reads the events.
            timeout_seconds: how long to wait for an answer, and for transfers to end.

        Raises:
            ChangeRefused: live requests need more blocks than that, now or at worst; nothing was changed.
            ChangeFailed: there is not enough memory; nothing was changed.
        """
        ...

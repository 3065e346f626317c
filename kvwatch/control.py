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

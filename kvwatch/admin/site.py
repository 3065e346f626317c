"""What all handlers work with."""

from dataclasses import dataclass

from kvwatch.admin.engines import AdminEngines
from kvwatch.admin.event_stream import EventStreams
from kvwatch.telemetry.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Engines, and what is kept about them beside their own state."""

    engines: AdminEngines
    streams: EventStreams
    clock: Clock
    document: bytes
    """The OpenAPI document."""

"""What all handlers work with."""

from dataclasses import dataclass

from kvwatch.admin.access import Caller
from kvwatch.admin.audit import AuditEntry, AuditTrail
from kvwatch.admin.change_desk import ChangeDesk
from kvwatch.admin.engines import AdminEngine, AdminEngines
from kvwatch.admin.event_stream import EventStreams
from kvwatch.admin.looking import Looks


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Engines, and what is kept about them beside their own state."""

    engines: AdminEngines
    streams: EventStreams
    trail: AuditTrail
    desk: ChangeDesk
    looks: Looks
    document: bytes
    """The OpenAPI document."""

    @staticmethod
    def entry(caller: Caller, engine: AdminEngine, action: str, reason: str, subject: str = "") -> AuditEntry:
        """Return the entry of what somebody is about to do; the trail numbers it."""
        return AuditEntry(
            id=0,
            time="",
            actor=caller.name,
            address=caller.address,
            engine=engine.name,
            dp_rank=engine.dp_rank,
            action=action,
            reason=reason,
            subject=subject,
        )

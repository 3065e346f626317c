"""Events of the people who run the server. Numbers 80 to 99."""

from typing import Annotated

from kvwatch.telemetry.schema import Event, event, value


@event(80, "control.drain_started", "The engine takes no new requests and finishes those it has.")
class DrainStarted(Event):
    """Sent on SIGTERM; after the grace time what still runs is aborted."""

    grace_ns: Annotated[int, value(1, "Grace time.", "ns")]

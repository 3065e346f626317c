"""Messages and service of the stream, declared as events are. Knows neither gRPC nor protobuf.

A subscription is told where it begins (`started`), then events in order. When the log no longer holds what comes next,
the subscriber hears how many events it missed (`gap`) and gets a snapshot that contains them, in parts; then events go
on from the snapshot's number. Resuming, late joining and healing are the same thing.
"""

from typing import Annotated

import msgspec

import kvwatch.telemetry.events  # noqa: F401 - fills the registry
from kvwatch.derive.proto import AnyEvent, ProtoMethod, ProtoService, proto_file
from kvwatch.telemetry.schema import REGISTRY, identity, value
from kvwatch.telemetry.snapshot import EngineSnapshot


class SubscribeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Where to begin, and with what. With neither `seq` nor `from_snapshot`: now, or `num_back` events before now."""

    events: Annotated[list[str], identity(1, "Names of the events that are wanted; empty for all.")] = []
    epoch: Annotated[
        str, identity(2, "Epoch that `seq` belongs to; empty takes the present one. After a restart it is another.")
    ] = ""
    seq: Annotated[
        int | None, identity(3, "First event wanted; if it is no longer there, a gap and a snapshot come first.")
    ] = None
    from_snapshot: Annotated[bool, identity(4, "Begin with a snapshot of the engine.")] = False
    num_back: Annotated[int, value(5, "How far before now to begin, as far as the log goes back.", "events")] = 0
    with_token_ids: Annotated[
        bool, identity(6, "Send token ids, if the engine tells them at all: they are what users wrote.")
    ] = False
    engine: Annotated[
        str, identity(7, "Name of the engine, its label in metrics; needed where a sidecar offers several.")
    ] = ""
    dp_rank: Annotated[
        int | None, identity(8, "Its data-parallel rank; needed where several of the engine are offered.")
    ] = None


class SnapshotRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for the engine's state between two steps."""

    engine: Annotated[str, identity(1, "Name of the engine; needed where a sidecar offers several.")] = ""
    dp_rank: Annotated[
        int | None, identity(2, "Its data-parallel rank; needed where several of the engine are offered.")
    ] = None


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """Where a subscription begins; its first message."""

    epoch: Annotated[str, identity(1, "Names this run of the engine; numbers of events are comparable within it.")]
    seq: Annotated[int, identity(2, "First event to come, unless a gap or a snapshot says otherwise.")]
    head: Annotated[int, identity(3, "Number that the engine's next event will get.")]
    oldest: Annotated[int, identity(4, "Oldest event that can be had.")]
    wall_offset_ns: Annotated[int, value(5, "Unix time minus the monotonic time of events.", "ns")]
    labels: Annotated[dict[str, str], identity(6, "Labels of the engine in all metrics.")]


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Events that the subscriber did not get; a snapshot that contains them follows."""

    seq: Annotated[int, identity(1, "First of them.")]
    num_missed: Annotated[int, value(2, "How many, wanted or not.", "events")]


class SnapshotPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a snapshot. Lists, and columns of tiers of the same name, are to be joined in order."""

    snapshot: Annotated[EngineSnapshot, identity(1, "The part.")]
    is_last: Annotated[bool, identity(2, "Whether the snapshot is complete with this part.")]
    epoch: Annotated[str, identity(3, "The engine's epoch.")]


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a subscription."""

    started: Annotated[Started | None, identity(1, "The subscription begins.")] = None
    gap: Annotated[Gap | None, identity(2, "Events were missed.")] = None
    snapshot: Annotated[SnapshotPart | None, identity(3, "The state to go on from.")] = None
    events: Annotated[list[AnyEvent], identity(4, "Events, in order.")] = []
    next_seq: Annotated[
        int | None, identity(5, "Everything before it was sent or not wanted: what to resume with.")
    ] = None


SUBSCRIBE = ProtoMethod(
    "Subscribe", "Events as they happen, from a place of the caller's choice.", "SubscribeRequest", "Update"
)
SNAPSHOT = ProtoMethod("Snapshot", "The engine's state between two steps, in parts.", "SnapshotRequest", "SnapshotPart")
SERVICE = ProtoService("Telemetry", "Everything that happens in one engine.", (SUBSCRIBE, SNAPSHOT))

STRUCTS: tuple[type[msgspec.Struct], ...] = (SubscribeRequest, SnapshotRequest, Update)
SCHEMA = proto_file(REGISTRY, STRUCTS, SERVICE)


def method_path(method: ProtoMethod) -> str:
    """Return the path under which a method is called."""
    return f"/{SERVICE.full_name}/{method.name}"

"""Every event, by family. Importing this package fills the registry.

An event is one fact that happened in the engine. Block events are columnar: one event per call with arrays, never one
for each block or token.
"""

from kvwatch.telemetry.events.block import (
    AllocationFailed,
    BlocksAllocated,
    BlocksCopied,
    BlocksEvicted,
    BlocksReleased,
    BlocksReused,
    BlocksStored,
    CacheCleared,
)
from kvwatch.telemetry.events.control import DrainStarted
from kvwatch.telemetry.events.request import (
    FirstToken,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    RequestQueued,
    RequestRecovered,
    RequestRejected,
    RequestResumed,
    SequenceForked,
)
from kvwatch.telemetry.events.step import (
    EngineEnded,
    EngineStalled,
    OutOfMemory,
    StepCompleted,
    StepFailed,
    StepScheduled,
)

__all__ = [
    "AllocationFailed",
    "BlocksAllocated",
    "BlocksCopied",
    "BlocksEvicted",
    "BlocksReleased",
    "BlocksReused",
    "BlocksStored",
    "CacheCleared",
    "DrainStarted",
    "EngineEnded",
    "EngineStalled",
    "FirstToken",
    "OutOfMemory",
    "RequestAdmitted",
    "RequestFinished",
    "RequestPreempted",
    "RequestQueued",
    "RequestRecovered",
    "RequestRejected",
    "RequestResumed",
    "SequenceForked",
    "StepCompleted",
    "StepFailed",
    "StepScheduled",
]

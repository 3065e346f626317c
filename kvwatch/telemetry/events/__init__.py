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
    BlocksRelocated,
    BlocksReused,
    BlocksShared,
    BlocksStored,
    CacheCleared,
)
from kvwatch.telemetry.events.control import (
    AdapterFreed,
    AdapterLoaded,
    AdmissionPaused,
    AdmissionResumed,
    ConfigChanged,
    DrainStarted,
    PoolRebuilt,
)
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
    SwapAbandoned,
    WaitReasonsChanged,
)
from kvwatch.telemetry.events.source import SourceCompleteness, SourceGap, SourceReset
from kvwatch.telemetry.events.step import (
    EngineEnded,
    EngineStalled,
    OutOfMemory,
    StepCompleted,
    StepFailed,
    StepScheduled,
)
from kvwatch.telemetry.events.transfer import (
    Offloaded,
    Restored,
    SwappedIn,
    SwappedOut,
    TransferFailed,
    TransferStarted,
)

__all__ = [
    "AdapterFreed",
    "AdapterLoaded",
    "AdmissionPaused",
    "AdmissionResumed",
    "AllocationFailed",
    "BlocksAllocated",
    "BlocksCopied",
    "BlocksEvicted",
    "BlocksReleased",
    "BlocksRelocated",
    "BlocksReused",
    "BlocksShared",
    "BlocksStored",
    "CacheCleared",
    "ConfigChanged",
    "DrainStarted",
    "EngineEnded",
    "EngineStalled",
    "FirstToken",
    "Offloaded",
    "OutOfMemory",
    "PoolRebuilt",
    "RequestAdmitted",
    "RequestFinished",
    "RequestPreempted",
    "RequestQueued",
    "RequestRecovered",
    "RequestRejected",
    "RequestResumed",
    "Restored",
    "SequenceForked",
    "SourceCompleteness",
    "SourceGap",
    "SourceReset",
    "StepCompleted",
    "StepFailed",
    "StepScheduled",
    "SwapAbandoned",
    "SwappedIn",
    "SwappedOut",
    "TransferFailed",
    "TransferStarted",
    "WaitReasonsChanged",
]

"""What the scheduler may ask of the memory behind the device: swap space for requests, further tiers for prefixes.

Engine thread only. Nothing here waits for a transfer: what was begun is reported by `poll` when it has ended. Blocks
that take part in a transfer stay with their owner until then, so that none is reused while it is read or written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvwatch.telemetry.snapshot import SequenceState, TierState, TransferState
from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.contracts.cache import BlockLayout


class TransferKind(StrEnum):
    """What moves, and which way."""

    SWAP_OUT = "swap_out"
    """All blocks of a preempted request, device to host."""
    SWAP_IN = "swap_in"
    """All blocks of a request that resumes, host to device."""
    RESTORE = "restore"
    """Blocks of a prefix hit, host or disk to device."""


@dataclass(frozen=True, slots=True)
class TransferOutcome:
    """The end of a transfer that belongs to a request."""

    request_id: str
    kind: TransferKind
    num_blocks: int
    """Blocks whose content arrived: all, or, after a failed restore, the leading ones that are good."""
    error: str = ""
    """Why it failed, a value of the metric's label `reason`; empty when it did not. The request recomputes then."""
    is_given_up: bool = False
    """A restore that took too long. The sequence's block table was released: what may still be written to its blocks
    must not meet what the request computes, so it starts anew in others."""


@dataclass(frozen=True, slots=True)
class TierHit:
    """Part of a prefix that a tier behind the device holds: consecutive blocks after the hits of the device."""

    tier: str
    hashes: tuple[BlockHash, ...]


class SwapSpace(Protocol):
    """Keeps the blocks of preempted requests."""

    def can_take(self, request_id: str) -> bool:
        """Whether the host has room for all distinct blocks that the request's sequences hold."""
        ...

    def num_blocks_to_restore(self, request_id: str) -> int:
        """Return how many device blocks `begin_in` will take."""
        ...

    def estimate_seconds(self, num_blocks: int) -> float | None:
        """Return the time that moving so many blocks out and in again takes, as measured; None before any was."""
        ...

    def begin_out(self, request_id: str) -> None:
        """Begin to copy a request's blocks. They stay its own until `poll` tells the end, and are released then."""
        ...

    def begin_in(self, request_id: str) -> bool:
        """Take device blocks, rebuild the block tables (sharing included) and begin to fill them.

        All or nothing: False, with nothing changed, when too few blocks are free.
        """
        ...

    def drop(self, request_id: str) -> None:
        """Forget a request, whatever its transfers are doing: it ended, or is to be recomputed. Unknown ids too."""
        ...


class PrefixTiers(Protocol):
    """Prefix blocks that were evicted from the device and may still be had."""

    def find(self, hashes: Sequence[BlockHash]) -> list[TierHit]:
        """Return which leading part of `hashes` the tiers hold, nearest first; it is evicted last now."""
        ...

    def claim(self, request_id: str, sequence: int, hits: Sequence[TierHit]) -> None:
        """Keep what `find` found while room is made for the sequence, which may push other blocks into these tiers.

        Ended by `begin_restore` or `end_claim`.
        """
        ...

    def end_claim(self, request_id: str, sequence: int) -> None:
        """Let go of what a sequence has claimed, since there is no room for it."""
        ...

    def begin_restore(self, request_id: str, sequence: int, first_index: int, hits: Sequence[TierHit]) -> None:
        """Begin to fill the blocks of a sequence's table from `first_index` on with what `find` found.

        What was not claimed may be gone meanwhile; then the outcome tells a shorter hit.
        """
        ...


class Tiers(SwapSpace, PrefixTiers, Protocol):
    """Both, and the end of what was begun."""

    def poll(self) -> list[TransferOutcome]:
        """Return what has ended since the last call, after its blocks were released or entered."""
        ...

    def wait(self, seconds: float) -> bool:
        """Sleep until a transfer has ended, at most so long; return whether one has. For when nothing else is to do."""
        ...

    def clear(self) -> dict[str, int]:
        """Forget all prefixes, as the device's prefix cache does; swapped requests stay.

        Returns:
            For each tier the blocks that became empty.
        """
        ...

    def lay_out(self, layout: BlockLayout) -> None:
        """Go on, empty, with blocks laid out as the device's will be; files of the old layout are removed.

        Nothing may be in flight, and no request swapped out. An exception leaves empty tiers of the old layout.
        """
        ...

    def close(self) -> None:
        """Give up what is in flight and let go of threads and files; safe to call twice. Returns within seconds."""
        ...

    def states(self) -> list[TierState]:
        """Return the pools behind the device as plain columns, for a snapshot."""
        ...

    def sequences(self) -> list[SequenceState]:
        """Return which requests hold blocks in these pools, for a snapshot."""
        ...

    def transfers(self) -> list[TransferState]:
        """Return what is on its way, for a snapshot."""
        ...

    def check_integrity(self) -> None:
        """Verify the invariants of the pools behind the device.

        Raises:
            CacheCorruption: with the equation that does not hold.
        """
        ...

    @property
    def num_in_flight(self) -> int:
        """Transfers that have not ended: an engine with some has work even when nothing can be scheduled."""
        ...

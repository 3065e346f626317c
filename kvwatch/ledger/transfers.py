"""Blocks that are on their way between tiers, rebuilt from events."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvwatch.ledger.pool import TierPool
from kvwatch.telemetry.events import Offloaded, Restored, SwappedIn, SwappedOut, TransferFailed, TransferStarted
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import TransferState

Arrived = SwappedOut | SwappedIn | Offloaded | Restored
"""Events of blocks that arrived."""


class OpenTransfers:
    """Transfers that have begun and not ended. Observatory thread only."""

    def __init__(self, states: Iterable[TransferState], pools: Mapping[str, TierPool]) -> None:
        self._pools = pools
        self._open = {state.transfer: state for state in states}

    @property
    def handlers(self) -> dict[type[Event], Callable[[Any], None]]:
        """What follows which event."""
        return {
            TransferStarted: self._start,
            SwappedOut: self._arrive,
            SwappedIn: self._arrive,
            Offloaded: self._arrive,
            Restored: self._arrive,
            TransferFailed: self._fail,
        }

    @property
    def requests(self) -> set[str]:
        """Requests, live or not, whose blocks are on their way; empty text for those of offloads."""
        return {state.request for state in self._open.values()}

    def num_blocks(self, tier: str) -> int:
        """Return how many blocks of a tier are being read or written. O(transfers)."""
        return sum(state.num_blocks for state in self._open.values() if tier in (state.from_tier, state.to_tier))

    def num_arriving(self, tier: str) -> int:
        """Return how many blocks of a tier are being written: used, and without content yet. O(transfers)."""
        return sum(state.num_blocks for state in self._open.values() if tier == state.to_tier)

    def to_states(self) -> list[TransferState]:
        """Return them in the form of a snapshot."""
        return list(self._open.values())

    def _start(self, event: TransferStarted) -> None:
        self._open[event.transfer] = TransferState(
            event.transfer, event.request, event.num_blocks, event.from_tier, event.to_tier
        )

    def _arrive(self, event: Arrived) -> None:
        """The blocks hold something now; their owners still have them."""
        self._open.pop(event.transfer, None)
        self._pools[event.to_tier].write(event.destinations, event.filled_slots)

    def _fail(self, event: TransferFailed) -> None:
        self._open.pop(event.transfer, None)

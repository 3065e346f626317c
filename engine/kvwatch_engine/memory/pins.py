"""Pinned prefixes: content of the prefix cache that stays until somebody says otherwise.

Owns who pinned what; which blocks may therefore not be evicted is up to the pool. A pin names content, not blocks: it
does not matter where blocks move.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvwatch.telemetry.events import PrefixPinned, PrefixUnpinned
from kvwatch.telemetry.events.block import UnpinCause
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import PinState
from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.memory.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class Pin:
    """One pinned prefix."""

    name: str
    hashes: tuple[BlockHash, ...]
    """Of its blocks in all KV groups, the first of the sequence first."""
    num_tokens: int
    actor: str
    reason: str
    pinned_unix_ns: int


class PrefixPins:
    """Engine thread only."""

    def __init__(self, pool: BlockPool, log: EventLog) -> None:
        self._pool = pool
        self._log = log
        self._pins: dict[str, Pin] = {}

    def __len__(self) -> int:
        """Return the number of pins."""
        return len(self._pins)

    def all(self) -> list[Pin]:
        """Return all pins, the oldest first."""
        return list(self._pins.values())

    def find(self, name: str) -> Pin | None:
        """Return a pin."""
        return self._pins.get(name)

    def num_pinned_with(self, hashes: Iterable[BlockHash]) -> int:
        """Return how many blocks would be pinned if these were, too."""
        pinned = self._pool.pinned
        return len(pinned) + len({content for content in hashes if content not in pinned})

    def add(self, hashes: Sequence[BlockHash], num_tokens: int, actor: str, reason: str) -> Pin:
        """Pin content, all of which is here."""
        name = f"pin-{secrets.token_hex(6)}"
        pin = Pin(name, tuple(hashes), num_tokens, actor, reason, self._log.clock.wall_ns())
        self._pool.pin(pin.hashes)
        self._pins[name] = pin
        if self._log.active:
            self._log.append(PrefixPinned(name, list(pin.hashes), num_tokens, actor, reason))
        return pin

    def remove(self, pin: Pin, cause: UnpinCause, actor: str, reason: str) -> None:
        """End a pin; what nobody else pins is evicted last of all now."""
        del self._pins[pin.name]
        self._pool.unpin(pin.hashes)
        if self._log.active:
            self._log.append(PrefixUnpinned(pin.name, list(pin.hashes), cause, actor, reason))

    def remove_all(self, cause: UnpinCause, actor: str, reason: str) -> int:
        """End all pins; return how many there were."""
        pins = self.all()
        for pin in pins:
            self.remove(pin, cause, actor, reason)
        return len(pins)

    def to_states(self) -> list[PinState]:
        """Return all pins for a snapshot."""
        return [PinState(pin.name, list(pin.hashes)) for pin in self._pins.values()]

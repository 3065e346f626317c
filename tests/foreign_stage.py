"""A foreign engine that does as it is told, as a source of a sidecar: for tests of what lies behind sources."""

import asyncio
import threading
from collections.abc import Callable, Iterable

from kvwatch.ledger.view import Sample
from kvwatch.sources.source import FOREIGN_FEEDS, Rank
from kvwatch.telemetry import events as ev
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.events.block import Tier
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot, IndexState


class ForeignEngine:
    """Keeps what is resident as sets, and tells what changes as a source of a vLLM would. Any thread."""

    def __init__(self, name: str, dp_rank: int = 0) -> None:
        self.name = name
        self.model_name = "foreign-model"
        self.dp_rank = dp_rank
        self.is_up = True
        self.log = EventLog(1024)
        self.resident: dict[tuple[str, str], dict[bytes, int]] = {}
        self.is_complete = True
        self.lock = threading.Lock()

    # ------------------------------------------------------------ Source

    async def run(self, stop: asyncio.Event, on_rank: Callable[[Rank], None]) -> None:
        on_rank(Rank(self.dp_rank, self.log, self, self.samples, lambda: self.is_up, FOREIGN_FEEDS))
        await stop.wait()

    def samples(self) -> Iterable[Sample]:
        yield Sample(m.SOURCE_UP, (), self.is_up)

    # ------------------------------------------------------------ EngineControl

    def snapshot(self, timeout_seconds: float = 5.0) -> EngineSnapshot:  # noqa: ARG002 - part of the protocol
        with self.lock:
            return EngineSnapshot(
                seq=self.log.head, step=self.log.step, time_ns=self.log.now_ns, block_size_tokens=16, block_bytes=0,
                watermark_blocks=0, max_queued_requests=0, max_queued_tokens=0, tiers=[], sequences=[], requests=[],
                indexed=[
                    IndexState(tier, group, list(hashes), list(hashes.values()))
                    for (tier, group), hashes in self.resident.items()
                ],
                is_foreign=True, is_complete=self.is_complete,
            )  # fmt: skip

    def is_alive(self) -> bool:
        return True

    def is_ready(self) -> bool:
        return True

    # ------------------------------------------------------------ what happens

    def store(self, *hashes: bytes, tier: Tier = "device", parent: bytes | None = None) -> None:
        with self.lock:
            self.resident.setdefault((tier, "0"), {}).update(dict.fromkeys(hashes, 1))
            self._tell(ev.BlocksStored(list(hashes), [], parent, tier=tier))

    def remove(self, *hashes: bytes, tier: Tier = "device", ages_ns: tuple[int, ...] = ()) -> None:
        with self.lock:
            for each in hashes:
                del self.resident[tier, "0"][each]
            self._tell(ev.BlocksEvicted(list(hashes), [], list(ages_ns), [], [], "removed", "", tier=tier))

    def clear(self, tier: Tier = "device") -> None:
        with self.lock:
            self.resident.pop((tier, "0"), None)
            self._tell(ev.CacheCleared([], tier=tier))

    def restart(self) -> None:
        with self.lock:
            self.resident.clear()
            self.is_complete = True
            self._tell(ev.SourceReset(reason="restart", is_complete=True))

    def lose(self, num_batches: int) -> None:
        with self.lock:
            self.is_complete = False
            self._tell(ev.SourceGap(num_batches=num_batches))

    def complete(self) -> None:
        with self.lock:
            self.is_complete = True
            self._tell(ev.SourceCompleteness(is_complete=True))

    def _tell(self, event: Event) -> None:
        self.log.begin(self.log.step + 1)
        self.log.append(event)


def block(number: int) -> bytes:
    """Return the hash of a block, as of an engine whose hashes are integers of 64 bits."""
    return number.to_bytes(8, "big")

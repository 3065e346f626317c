"""A random load with everything attached that leaves the process: recorder, gRPC stream, KV events. For fidelity tests.

Each of them is given only what it sends, and must then know what the engine's own structures hold, exactly. The oracle
is the engine itself, read between two steps.
"""

import random
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import zmq
from kv_event_reader import TOPIC, KVEventReader, Place, read_live, wait_for
from pool_oracle import around
from random_load import Behind, RandomLoad
from recording_stage import check_states, make_headers, record_files, recorder_settings
from stream_stage import LOOPBACK, LedgerMirror

from kvwatch.exporters.identity import EngineIdentity
from kvwatch.exporters.kv_events.part import KVEvents, KVEventsSettings
from kvwatch.ledger.collector import Collector
from kvwatch.observatory import Observatory
from kvwatch.recorder.part import RecorderPart
from kvwatch.recorder.reader import Recording
from kvwatch.recorder.replay import ledger_at
from kvwatch.stream.client import TelemetryClient
from kvwatch.stream.contract import SubscribeRequest
from kvwatch.stream.server import StreamServer
from kvwatch.telemetry.metrics import TELEMETRY_LAG
from kvwatch.telemetry.snapshot import EngineSnapshot
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.tiers.tiers import MemoryTiers

MEDIA = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}
NAMES = count()
LONG_NAME = "x" * 2000


def resident(core: EngineCore) -> dict[Place, set[int | bytes]]:
    """Return what each tier and KV group has of the prefix cache, used or not, as integers of the wire."""
    pools = [core.manager.pool]
    if isinstance(core.tiers, MemoryTiers):
        pools += [level.pool for level in core.tiers._levels]
    found: dict[Place, set[int | bytes]] = {}
    for pool in pools:
        for block, digest in enumerate(pool.hashes):
            if digest is not None:
                place = (MEDIA[pool.tier], pool.groups[block] if pool.groups else 0)
                found.setdefault(place, set()).add(_wire(digest))
    return found


def _wire(digest: bytes) -> int:
    return int.from_bytes(digest[24:], "big")


class KVEventsOut:
    """The publisher, and a router that reads it live."""

    def __init__(self, load: RandomLoad) -> None:
        self._core = load.core
        self.parents: dict[int | bytes, int | None] = {}
        """What each hash that the device ever held comes after, as the pool was told."""
        around(load.core.manager.pool, "store", self._store)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        settings = KVEventsSettings(live=f"inproc://fidelity-{next(NAMES)}", topic=TOPIC.decode())
        self._part = KVEvents(settings, load.clock, self._context)
        self._part.open()
        self.collector = Collector(load.log, lambda _: self._core.snapshot(), self._part, "kv_events")
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.subscribe(TOPIC)
        self._socket.connect(self._part.publisher.live_address)
        self.reader = KVEventReader()
        self._is_joined = False

    def check(self) -> None:
        """Publish what happened, read it, and compare with the pools."""
        bring_up_to_date(self.collector)
        self._read()
        if not self._is_joined:  # the first batch may have been published before the reader had joined
            wait_for(self._has_joined)
        told = {place: set(blocks) for place, blocks in self.reader.blocks.items() if blocks}
        assert told == resident(self._core)
        for (medium, _), blocks in self.reader.blocks.items():
            for each, known in blocks.items():
                is_found_on_disk = medium == MEDIA["disk"] and known.parent is None  # by whoever opened the folder
                assert is_found_on_disk or known.parent == self.parents[each]
        assert not self.reader.has_gap

    def _has_joined(self) -> bool:
        self._part.load(self._core.snapshot())
        self._read()
        return self._is_joined

    def _read(self) -> None:
        for seq, payload in read_live(self._socket):
            if not self._is_joined:
                self.reader.skip_to(seq)
                self._is_joined = True
            self.reader.take(seq, payload)

    def _store(self, call: Any, blocks: Any, hashes: Any, parent: Any, source: Any) -> None:
        names = [_wire(each) for each in hashes]
        self.parents |= dict(zip(names, [None if parent is None else _wire(parent), *names], strict=False))
        call(blocks, hashes, parent, source)

    def close(self) -> None:
        self._socket.close(0)
        self._part.close()
        self._context.term()


class Recorded:
    """The recorder's files and the flight recorder's ring, and what the engine said after each step."""

    def __init__(self, load: RandomLoad, folder: Path) -> None:
        self._load = load
        self._folder = folder
        settings = recorder_settings(
            folder, record_bytes=1 << 28, file_bytes=1 << 16, flight_dir=folder / "flight", flight_bytes=1 << 20
        )
        self._part = RecorderPart(settings, make_headers(load.log), lambda: load.mirror)
        self._part.open()
        follower = self._part.follower
        self.collector = Collector(load.log, lambda _: load.core.snapshot(), follower, self._part.name)
        self._snapshots: dict[int, EngineSnapshot] = {}
        self._head = -1

    def note(self) -> None:
        """Record what happened; the mirror has followed it already."""
        bring_up_to_date(self.collector)
        assert self._part.flush(60), "the disk is not that slow"
        if self._load.log.head != self._head:
            self._head = self._load.log.head
            self._snapshots[self._load.log.step] = self._load.core.snapshot()

    def check(self, num_states: int) -> None:
        """End the recording; rebuild states from its files at so many places, and compare with what the engine said."""
        self.collector.finish()
        ring = self._part.ring_path
        assert ring is not None
        with Recording(ring) as recording:
            assert ledger_at(recording).differences(self._load.core.snapshot()) == []
        self._part.close()
        paths, chooser, num_checked = record_files(self._folder), random.Random(1), 0
        for path in paths:
            with Recording(path) as recording:
                assert recording.is_complete
                num_checked += check_states(recording, self._snapshots, chooser, -(-num_states // len(paths)))
        assert num_checked >= min(num_states, len(self._snapshots)) // 2
        with Recording(paths[-1]) as recording:
            assert ledger_at(recording).differences(self._load.core.snapshot()) == []
        assert [sample.value for sample in self._part.samples()] == [0, 0, 0, 0], "nothing was lost on the way"


class Subscribed:
    """The gRPC stream over a socket: joined in the middle, not read for a while now and then."""

    def __init__(self, load: RandomLoad) -> None:
        self._load = load
        self._lock = threading.RLock()
        self._server = StreamServer(load.log, self, LOOPBACK, {"engine": "test"})
        self._observatory = Observatory(load.log, self, EngineIdentity("test"), parts=[self._server])
        self.mirror = LedgerMirror()
        self.num_checks = 0
        self._client: TelemetryClient | None = None
        self._items: Iterator[Any] = iter(())
        self._observatory.start()
        assert self._server.is_serving.wait(60)

    @contextmanager
    def between_snapshots(self) -> Iterator[None]:
        """Let the engine change, and nobody look meanwhile."""
        with self._lock:
            yield

    def join(self) -> None:
        """Subscribe now; what was before comes as a snapshot."""
        assert self._server.address is not None
        self._client = TelemetryClient("{}:{}".format(*self._server.address))
        self._items = self._client.subscribe(SubscribeRequest(from_snapshot=True))
        self.mirror.catch_up(self._items, lambda: self.mirror.num_snapshots == 1)

    @property
    def is_joined(self) -> bool:
        return self._client is not None

    @property
    def is_overtaken(self) -> bool:
        """Whether the engine is so far ahead of what the subscriber was sent that the log no longer holds the rest."""
        lag = next(sample.value for sample in self._server.samples() if sample.metric is TELEMETRY_LAG)
        return lag > self._load.log.capacity

    def check(self) -> None:
        """Read all that there is; then the state must be the engine's."""
        head = self._load.log.head
        if self.mirror.ledger.next_seq < head:
            self.mirror.catch_up(self._items, lambda: self.mirror.ledger.next_seq == head, 120)
        assert self.mirror.ledger.differences(self._load.core.snapshot()) == []
        self.num_checks += 1

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._observatory.stop()

    # ------------------------------------------------------------ what the server asks of an engine

    def snapshot(self, timeout_seconds: float = 5.0) -> EngineSnapshot:  # noqa: ARG002 - steps are short
        with self._lock:
            return self._load.core.snapshot()

    def is_alive(self) -> bool:
        return True

    def is_ready(self) -> bool:
        return True


def bring_up_to_date(collector: Collector) -> None:
    """Apply everything there is, as the observatory's loop does."""
    while collector.needs_snapshot or collector.drain():
        if collector.needs_snapshot:
            assert collector.heal()


class FidelityStage:
    """A load, and all that tell of it."""

    def __init__(self, load: RandomLoad, folder: Path) -> None:
        self.load = load
        self.recorded = Recorded(load, folder)
        self.kv_events = KVEventsOut(load)
        self.subscribed = Subscribed(load)

    def turn(self) -> None:
        """Let something happen; then metrics, the log's ledger and the KV events must say what the engine holds."""
        load = self.load
        with self.subscribed.between_snapshots():
            load.turn()
        assert load.differences() == []
        assert load.mirror.num_violations == 0
        assert load.mirror.ledger.differences(load.core.snapshot()) == []
        self.recorded.note()
        self.kv_events.check()

    def run(self, num_steps: int) -> None:
        """Take so many steps. The subscriber joins after a tenth, and starves for a while in the middle."""
        while self.load.core.num_steps < num_steps // 10:
            self.turn()
        self.subscribed.join()
        for share in (0.3, 0.5, 0.7, 0.9):
            while self.load.core.num_steps < num_steps * share:
                self.turn()
            if share == 0.5:
                self._starve()
            self.subscribed.check()
        while self.load.core.num_steps < num_steps:
            self.turn()
        self.subscribed.check()
        self.recorded.check(60)

    def _starve(self) -> None:
        """Go on until the subscriber, who reads nothing, was overtaken: what lies in sockets is some megabytes."""
        for _ in range(1000):
            if self.subscribed.is_overtaken:
                break
            with self.subscribed.between_snapshots():
                self.load.refuse(LONG_NAME, 400)
            self.turn()
        self.subscribed.check()
        assert self.subscribed.mirror.gaps, "it was not starved"
        assert self.subscribed.mirror.num_snapshots == 1 + len(self.subscribed.mirror.gaps)

    def close(self) -> None:
        self.kv_events.close()
        self.subscribed.close()


@contextmanager
def fidelity_stage(seed: int, windows: tuple[int | None, ...] = (None,), behind: str = "") -> Iterator[FidelityStage]:
    """Make a stage. `behind` says what is behind the device: nothing, `host`, `disk`, or both."""
    chooser = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiers = None
        if behind:
            (folder / "tier").mkdir()
            tiers = Behind(
                host_blocks=chooser.choice([8, 20, 60]) if "host" in behind else 0,
                disk=folder / "tier" if "disk" in behind else None,
                copy_failures=chooser.choice([0.0, 0.1, 0.3]),
                seconds=chooser.choice([3.0, 30.0]),
            )
        load = RandomLoad(seed, windows, behind=tiers, emit_token_ids=True, log_capacity=1024)
        stage = FidelityStage(load, folder)
        try:
            yield stage
        finally:
            stage.close()

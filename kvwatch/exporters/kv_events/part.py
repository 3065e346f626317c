"""KV events out as a part of the observatory: follows the log and publishes what each step changed in the cache."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog
import zmq

from kvwatch.exporters.kv_events.endpoints import Mode, resolve_endpoints
from kvwatch.exporters.kv_events.foreign import ForeignTranslator
from kvwatch.exporters.kv_events.history import History
from kvwatch.exporters.kv_events.publisher import Publisher
from kvwatch.exporters.kv_events.translator import HashKind, Translator, foreign_translator
from kvwatch.ledger.collector import Follower
from kvwatch.ledger.view import Sample
from kvwatch.telemetry.clock import Clock
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot
from kvwatch.wire.kv_events import AllBlocksCleared, BlockRemoved, WireEvent

MAX_BLOCKS_PER_BATCH = 1_024
"""Blocks in one batch when everything resident is told."""

logger = structlog.get_logger(__name__)


PUBLISH_SECONDS = 0.1
"""Routers send a request to where its prefix is: they must hear of it sooner than a person who looks at a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsSettings:
    """How KV events are published."""

    live: str
    """Endpoint of rank 0 for live events, such as `tcp://*:5557`."""
    replay: str | None = None
    """The same for replays; none for no replays."""
    topic: str = ""
    hash_kind: HashKind = "int"
    mode: Mode = "auto"
    """Whether the live endpoint is bound or connected to."""
    dp_rank: int = 0
    buffer_batches: int = 10_000
    """Batches that can be replayed one by one; older ones are replayed as a sum."""
    buffer_bytes: int = 64 << 20


class KVEvents:
    """Publishes what becomes resident and what is gone. Everything but `open` on the observatory's thread.

    A batch is what one step changed. The first batch of a publisher's life, and the first after events were lost, says
    that everything is cleared and then what is resident.

    Raises:
        ConfigError: an endpoint is malformed, out of range, or collides with another.
    """

    name = "kv_events"
    period_seconds = PUBLISH_SECONDS

    def __init__(
        self,
        settings: KVEventsSettings,
        clock: Clock,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        *,
        block_size: Callable[[], int] = lambda: 0,
    ) -> None:
        endpoints = resolve_endpoints(settings.live, settings.replay, settings.dp_rank, settings.mode)
        history = History(settings.buffer_batches, settings.buffer_bytes, settings.dp_rank)
        self._clock = clock
        self._hash_kind = settings.hash_kind
        self._block_size = block_size
        self._translator: Translator | ForeignTranslator = Translator(settings.hash_kind)
        self._pending: list[WireEvent] = []
        self._pending_ns = 0
        self._step = -1
        self.publisher = Publisher(endpoints, settings.topic, history, settings.dp_rank, context)
        """The sockets."""

    @property
    def follower(self) -> Follower:
        """It follows the log itself."""
        return self

    def check(self) -> None:
        """Find out now what `open` would be refused; nothing stays open.

        Raises:
            ExporterError: an endpoint is taken or cannot be used.
        """
        self.publisher.open()
        self.publisher.close()

    def open(self) -> None:
        """Bind or connect.

        Raises:
            ExporterError: an endpoint is taken or cannot be used.
        """
        self.publisher.open()
        logger.info(
            "publishing KV events, with token ids, to whoever can reach these endpoints",
            live=self.publisher.live_address,
            replay=self.publisher.replay_address or "off",
        )

    def samples(self) -> Iterable[Sample]:
        """Return nothing: what concerns this subscriber is counted by its collector."""
        return ()

    async def run(self, stop: asyncio.Event) -> None:
        """Answer requests for replays until `stop` is set."""
        await self.publisher.serve_replays(stop)

    def close(self) -> None:
        """Close the sockets."""
        self.publisher.close()

    # ------------------------------------------------------------ follower

    def load(self, snapshot: EngineSnapshot) -> None:
        """Tell readers to forget everything, then what is resident."""
        self._pending.clear()
        self._pending_ns = snapshot.time_ns
        if snapshot.is_foreign and not isinstance(self._translator, ForeignTranslator):
            self._translator = foreign_translator(self._hash_kind, self._block_size)
        num_blocks = 0
        for event in self._translator.load(snapshot):
            if num_blocks >= MAX_BLOCKS_PER_BATCH:
                self._flush()
                num_blocks = 0
            self._pending.append(event)
            num_blocks += 0 if isinstance(event, AllBlocksCleared | BlockRemoved) else len(event.block_hashes)
        self._flush()

    def apply(self, events: Sequence[Event]) -> None:
        """Follow events; publish the batch of each step that they end."""
        translate, pending = self._translator.apply, self._pending
        for event in events:
            if event.step != self._step:
                self._flush()
                self._step = event.step
            told = translate(event)
            if told:
                pending += told
                self._pending_ns = event.time_ns

    def settle(self) -> None:
        """Publish what is pending: an idle engine has no next step that would end this one."""
        self._flush()

    def publish(self) -> None:
        """Publish what is pending."""
        self._flush()

    def _flush(self) -> None:
        if self._pending:
            wall_minus_monotonic_ns = self._clock.wall_ns() - self._clock.monotonic_ns()
            events = list(self._pending)
            self._pending.clear()
            self.publisher.publish((self._pending_ns + wall_minus_monotonic_ns) / 1e9, events)

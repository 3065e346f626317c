"""One subscriber's way through the log, without a network: beginnings, filters, gaps, marks."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_engine import NaiveEngine

from kvwatch.ledger.ledger import Ledger
from kvwatch.ledger.pace import next_tick
from kvwatch.stream.codec import EventCodec, StreamError, StructCodec, join_parts, parse
from kvwatch.stream.contract import Gap, Started, SubscribeRequest, Update
from kvwatch.stream.descriptors import message_class
from kvwatch.stream.snapshots import Snapshots
from kvwatch.stream.subscription import BATCH, EncodedEvents, News, Source, Subscription
from kvwatch.telemetry.events import BlocksStored, RequestFinished, RequestQueued, StepCompleted
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot

MESSAGE, UPDATES, EVENTS = message_class("Update"), StructCodec(Update), EventCodec()


class Peer:
    """A subscriber that takes messages while its gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_asked = asyncio.Event()
        self.items: list[Started | Gap | EngineSnapshot | Event] = []
        self.next_seq: int | None = None
        self.num_messages = 0
        self._parts: list[EngineSnapshot] = []

    async def write(self, content: bytes) -> None:
        self.is_asked.set()
        await self.gate.wait()
        self.num_messages += 1
        message = parse(MESSAGE, content)
        update = UPDATES.unpack(message)
        self.items += [item for item in (update.started, update.gap) if item is not None]
        if update.snapshot is not None:
            self._parts.append(update.snapshot.snapshot)
            if update.snapshot.is_last:
                self.items.append(join_parts(self._parts))
                self._parts = []
        self.items += [event for each in message.events if (event := EVENTS.decode(each))]
        self.next_seq = self.next_seq if update.next_seq is None else update.next_seq

    @property
    def events(self) -> list[Event]:
        return [item for item in self.items if isinstance(item, Event)]

    def of(self, kind: type[object]) -> list[object]:
        return [item for item in self.items if isinstance(item, kind)]


async def look_at(news: News, stop: asyncio.Event) -> None:
    while not stop.is_set():
        await next_tick(0.05)
        news.look()
    news.end()


class Bench:
    """A naive engine and what its subscribers share, on the running loop."""

    def __init__(self, capacity: int = 1024) -> None:
        self.log = EventLog(capacity)
        self.keeper = self.log.subscribe("ledger")  # in life the ledger is always there
        self.engine = NaiveEngine(self.log)
        self.random = random.Random(3)
        self.stop = asyncio.Event()
        self.news = News(self.log)
        self.source = Source(
            log=self.log,
            epoch="now",
            labels={},
            snapshots=Snapshots(self.engine.snapshot),
            news=self.news,
            encoded=EncodedEvents(size=64),
            encoded_with_token_ids=EncodedEvents(size=64, with_token_ids=True),
            updates=UPDATES,
        )

    def step(self, number: int = 1) -> None:
        for _ in range(number):
            self.engine.step([(self.random.randrange(12), self.random.randrange(30)) for _ in range(5)])


Act = Callable[[Bench, Peer], Awaitable[None]]


def subscribed(request: SubscribeRequest, act: Act, capacity: int = 1024, before: int = 0) -> tuple[Bench, Peer]:
    """Run a subscription while `act` happens; then let it take the rest and end."""

    async def main() -> tuple[Bench, Peer]:
        bench, peer = Bench(capacity), Peer()
        bench.step(before)
        pump = asyncio.create_task(look_at(bench.news, bench.stop))
        subscription = Subscription(bench.source, request, peer.write)
        running = asyncio.create_task(subscription.run())
        await asyncio.wait_for(peer.is_asked.wait(), 60)
        await act(bench, peer)
        bench.stop.set()
        await asyncio.wait_for(asyncio.gather(pump, running), 60)
        subscription.close()
        return bench, peer

    return asyncio.run(main())


def rebuilt(peer: Peer) -> Ledger:
    ledger = Ledger()
    for item in peer.items:
        if isinstance(item, EngineSnapshot):
            ledger.load(item)
        elif isinstance(item, Event):
            assert item.seq == ledger.next_seq
            ledger.apply(item)
    return ledger


async def ten_steps(bench: Bench, _: Peer) -> None:
    bench.step(10)


def test_a_live_subscriber_gets_what_happens_from_now_on() -> None:
    bench, peer = subscribed(SubscribeRequest(), ten_steps, before=10)

    (started,) = peer.of(Started)
    assert isinstance(started, Started)
    assert started.seq > 0
    assert started.epoch == "now"
    assert [event.seq for event in peer.events] == list(range(started.seq, bench.log.head))
    assert peer.next_seq == bench.log.head


def test_a_subscriber_may_begin_some_events_back() -> None:
    _, peer = subscribed(SubscribeRequest(num_back=7), ten_steps, before=20)

    (started,) = peer.of(Started)
    assert isinstance(started, Started)
    assert [event.seq for event in peer.events[:7]] == list(range(started.head - 7, started.head))


def test_beginning_further_back_than_the_log_goes_begins_near_its_oldest_event_without_a_gap() -> None:
    _, peer = subscribed(SubscribeRequest(num_back=10_000), ten_steps, capacity=256, before=100)

    (started,) = peer.of(Started)
    assert isinstance(started, Started)
    assert started.oldest <= started.seq <= started.oldest + 16
    assert peer.of(Gap) == []


def test_a_snapshot_and_the_events_after_it_give_the_engine_exactly() -> None:
    bench, peer = subscribed(SubscribeRequest(from_snapshot=True), ten_steps, before=30)

    assert len(peer.of(EngineSnapshot)) == 1
    assert peer.of(Gap) == []
    assert rebuilt(peer).differences(bench.engine.snapshot()) == []


def test_resuming_within_the_window_needs_no_snapshot() -> None:
    bench, peer = subscribed(SubscribeRequest(epoch="now", seq=11), ten_steps, before=20)

    assert [event.seq for event in peer.events] == list(range(11, bench.log.head))
    assert peer.of(EngineSnapshot) == []


def test_resuming_at_what_the_log_no_longer_holds_tells_how_much_and_heals() -> None:
    bench, peer = subscribed(SubscribeRequest(seq=3), ten_steps, capacity=64, before=50)

    (gap,), (snapshot,) = peer.of(Gap), peer.of(EngineSnapshot)
    assert isinstance(gap, Gap)
    assert isinstance(snapshot, EngineSnapshot)
    assert (gap.seq, gap.seq + gap.num_missed) == (3, snapshot.seq)
    assert rebuilt(peer).differences(bench.engine.snapshot()) == []


def test_another_epoch_begins_with_a_snapshot_even_if_the_number_exists() -> None:
    bench, peer = subscribed(SubscribeRequest(epoch="before the restart", seq=5), ten_steps, before=20)

    assert [type(item) for item in peer.items[:2]] == [Started, EngineSnapshot]
    assert peer.of(Gap) == []
    assert rebuilt(peer).differences(bench.engine.snapshot()) == []


@settings(max_examples=15, deadline=None)
@given(bursts=st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_whenever_a_subscriber_pauses_it_ends_with_the_engines_state(bursts: list[tuple[int, bool]], seed: int) -> None:
    async def act(bench: Bench, peer: Peer) -> None:
        bench.random.seed(seed)
        for number, is_reading in bursts:
            (peer.gate.set if is_reading else peer.gate.clear)()
            bench.step(number)
            await asyncio.sleep(0.06)
        peer.gate.set()

    bench, peer = subscribed(SubscribeRequest(from_snapshot=True), act, capacity=64)

    ledger = rebuilt(peer)
    assert ledger.differences(bench.engine.snapshot()) == []
    missed = sum(gap.num_missed for gap in peer.of(Gap) if isinstance(gap, Gap))
    assert missed == 0 or len(peer.of(EngineSnapshot)) > 1


def test_a_filter_passes_only_what_was_asked_for_and_still_tells_how_far_the_log_has_gone() -> None:
    async def act(bench: Bench, peer: Peer) -> None:
        bench.step(40)
        async with asyncio.timeout(60):
            while peer.next_seq is None:
                await asyncio.sleep(0.01)

    bench, peer = subscribed(SubscribeRequest(events=["request.queued", "request.finished"]), act)

    assert {type(event) for event in peer.events} == {RequestQueued, RequestFinished}
    assert peer.next_seq is not None
    assert peer.next_seq <= bench.log.head


def test_when_nothing_is_wanted_a_subscriber_hears_at_most_once_a_second_how_far_the_log_has_gone() -> None:
    async def act(bench: Bench, peer: Peer) -> None:
        for _ in range(6):
            bench.step()
            await asyncio.sleep(0.07)
        assert peer.num_messages <= 2
        deadline = asyncio.get_running_loop().time() + 5
        while peer.next_seq != bench.log.head:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.02)

    bench, peer = subscribed(SubscribeRequest(events=["control.drain_started"]), act)

    assert peer.events == []
    assert peer.next_seq == bench.log.head


def test_events_are_encoded_once_for_all_who_are_near_the_head() -> None:
    log = EventLog(8)
    encoded = EncodedEvents(size=4)
    events: list[Event] = [
        RequestQueued(request=str(n), prompt_tokens=1, num_sequences=1, queued_ns=0) for n in range(6)
    ]
    for event in events:
        log.append(event)

    assert encoded.of(events[0]) is encoded.of(events[0])
    assert encoded.of(events[4]) != encoded.of(events[0])  # they share a place
    assert encoded.of(events[0]) == EVENTS.encode(events[0])


def test_a_run_of_events_is_encoded_once_for_all_who_read_it_and_is_what_its_events_are() -> None:
    log, encoded = EventLog(64), EncodedEvents()
    cursors = [log.subscribe("a"), log.subscribe("b")]
    engine = NaiveEngine(log)
    for number in range(12):
        engine.step([(number, 9), (number + 1, 5)])
    first, second = (cursor.read() for cursor in cursors)
    assert len(first) > 2

    assert encoded.of_run(first) is encoded.of_run(second)
    assert encoded.of_run(first) == b"".join(map(EVENTS.encode, first))
    assert encoded.of_run(first[1:]) == b"".join(map(EVENTS.encode, first[1:]))
    assert encoded.of_run(first[:-1]) == b"".join(map(EVENTS.encode, first[:-1]))


def test_what_a_second_brings_comes_in_one_message() -> None:
    async def act(bench: Bench, _: Peer) -> None:
        bench.step(200)

    bench, peer = subscribed(SubscribeRequest(), act)

    assert len(peer.events) > 2 * BATCH
    assert peer.num_messages == 2  # the first says where it begins
    assert peer.next_seq == bench.log.head


@pytest.mark.parametrize("is_asked", [True, False])
def test_only_who_asks_gets_token_ids(is_asked: bool) -> None:
    async def act(bench: Bench, _: Peer) -> None:
        bench.log.append(BlocksStored(hashes=[b"h"], block_ids=[1], parent=None, token_ids=[[1, 2, 3, 4]]))

    _, peer = subscribed(SubscribeRequest(with_token_ids=is_asked), act)

    (event,) = peer.events
    assert isinstance(event, BlocksStored)
    assert event.token_ids == ([[1, 2, 3, 4]] if is_asked else None)


def test_a_large_event_is_not_kept() -> None:
    encoded = EncodedEvents(max_bytes_each=10)
    event = RequestQueued(request="x" * 20, prompt_tokens=1, num_sequences=1, queued_ns=0, seq=0)

    assert encoded.of(event) is not encoded.of(event)


def test_a_long_batch_is_sent_in_messages_of_bounded_size() -> None:
    async def act(bench: Bench, _: Peer) -> None:
        bench.log.begin(1)
        for number in range(100):
            name = str(number) + "x" * 40_000
            bench.log.append(RequestQueued(request=name, prompt_tokens=1, num_sequences=1, queued_ns=0))

    _, peer = subscribed(SubscribeRequest(), act)

    assert len(peer.events) == 100
    assert peer.num_messages >= 1 + 4


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (SubscribeRequest(events=["request.finish"]), "did you mean request.finished"),
        (SubscribeRequest(seq=1, from_snapshot=True), "send one of them"),
        (SubscribeRequest(seq=-1), "at least 0"),
        (SubscribeRequest(num_back=-2), "at least 0"),
        (SubscribeRequest(seq=10_000), "in the future: the next event is"),
        (SubscribeRequest(seq=10_000, epoch="now"), "in the future"),
    ],
)
def test_a_wrong_request_is_refused_with_a_reason_and_takes_no_place(request_: SubscribeRequest, message: str) -> None:
    async def main() -> bool:
        bench = Bench()
        bench.keeper.close()
        with pytest.raises(StreamError, match=message):
            Subscription(bench.source, request_, Peer().write)
        return bench.log.active

    assert asyncio.run(main()) is False


def test_snapshots_are_shared_by_all_who_ask_at_once_and_are_taken_after_they_asked() -> None:
    async def main() -> None:
        bench = Bench()
        first = await asyncio.gather(*(bench.source.snapshots.take() for _ in range(5)))
        assert len({id(each) for each in first}) == 1
        bench.step()

        began = asyncio.get_running_loop().time()
        again = await asyncio.gather(*(bench.source.snapshots.take() for _ in range(5)))

        assert {each.seq for each in again} == {bench.log.head}
        assert asyncio.get_running_loop().time() - began > 0.1  # they are spaced

    asyncio.run(main())


def test_an_engine_that_does_not_answer_at_first_is_asked_again() -> None:
    async def act(bench: Bench, peer: Peer) -> None:
        await asyncio.sleep(0.3)
        assert peer.of(EngineSnapshot) == []
        bench.engine.is_answering = True
        bench.step()
        deadline = asyncio.get_running_loop().time() + 5
        while not peer.of(EngineSnapshot):
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.02)

    async def main() -> None:
        bench, peer = Bench(), Peer()
        bench.engine.is_answering = False
        pump = asyncio.create_task(look_at(bench.news, bench.stop))
        running = asyncio.create_task(
            Subscription(bench.source, SubscribeRequest(from_snapshot=True), peer.write).run()
        )
        await act(bench, peer)
        bench.stop.set()
        await asyncio.wait_for(asyncio.gather(pump, running), 60)
        assert rebuilt(peer).differences(bench.engine.snapshot()) == []

    asyncio.run(main())


def test_the_end_of_a_step_is_not_held_back() -> None:
    async def act(bench: Bench, peer: Peer) -> None:
        bench.step()
        async with asyncio.timeout(60):
            while not (peer.events and isinstance(peer.events[-1], StepCompleted)):
                await asyncio.sleep(0.01)

    subscribed(SubscribeRequest(), act)

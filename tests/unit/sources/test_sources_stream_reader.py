"""The order of batches under everything that a network and a publisher can do, against the publisher's own truth."""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from rogue_publisher import CLEARED, batch, removed, stored
from subscription_stage import keys

from kvwatch.sources.batch_order import REMEMBERED, BatchOrder, Verdict
from kvwatch.sources.complaints import Complaints
from kvwatch.sources.healer import MAX_FAILURES, MAX_REQUESTS, Healer
from kvwatch.sources.held_batches import HeldBatches
from kvwatch.sources.mirror import LOG_CAPACITY, Mirror
from kvwatch.sources.stream_reader import StreamReader
from kvwatch.telemetry.clock import SystemClock
from kvwatch.telemetry.log import EventLog
from kvwatch.wire.decoder import Decoder


class Life:
    """One life of a publisher: its batches, and what is resident at its end."""

    def __init__(self, name: int, choices: list[tuple[int, int]]) -> None:
        self.payloads: list[bytes] = []
        self.resident: set[int] = set()
        for index, (kind, number) in enumerate(choices):
            events: list[Any] = []
            if kind == 0 and index:
                events.append(CLEARED)
                self.resident.clear()
            if kind == 1 and self.resident:
                gone = sorted(self.resident)[number % len(self.resident)]
                self.resident.remove(gone)
                events.append(removed(gone))
            new = 1_000_000 * name + 1000 * index + number
            self.resident.add(new)
            events.append(stored(new))
            self.payloads.append(batch(*events, ts=1000.0 * name + index))


class Answer:
    """Replies as a publisher's buffer gives them, some of which get lost on their way."""

    def __init__(self, life: Life, end: int, start: int, lost: set[int], *, has_end: bool = True) -> None:
        self._rows = [(seq, life.payloads[seq]) for seq in range(start, end) if seq not in lost]
        self._has_end = has_end
        self.num_replies = 0
        self.has_ended = False

    async def batches(self) -> AsyncGenerator[tuple[int, bytes], None]:
        for row in self._rows:
            self.num_replies += 1
            yield row
        self.has_ended = self._has_end


class Publisher:
    """A publisher and the way to it. `lost_replies` gives for each request the numbers that do not arrive."""

    def __init__(self, lost_replies: list[set[int]]) -> None:
        self.life: Life | None = None
        self.num_published = 0
        self.num_requests = 0
        self._lost_replies = lost_replies

    def ask(self, start: int) -> Answer:
        assert self.life is not None
        lost = self._lost_replies[self.num_requests] if self.num_requests < len(self._lost_replies) else set()
        self.num_requests += 1
        return Answer(self.life, self.num_published, start, lost)


def make_reader(*, can_replay: bool) -> StreamReader:
    clock = SystemClock()
    log = EventLog(LOG_CAPACITY, clock)
    complaints = Complaints(engine="test")
    return StreamReader(Mirror(log, clock), Decoder(), complaints, clock, can_replay=can_replay)


def arrive(reader: StreamReader, batches: list[tuple[int, bytes]]) -> None:
    """Live batches come in this order."""
    for seq, payload in batches:
        reader.take_live(seq, payload)


def resident(reader: StreamReader) -> set[bytes]:
    return {each for state in reader.mirror.snapshot().indexed for each in state.hashes}


choices = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 999)), min_size=1, max_size=40)
fates = st.lists(st.sampled_from(["ok", "ok", "ok", "lost", "twice", "late"]), min_size=80, max_size=80)
holes = st.lists(st.sets(st.integers(0, 40), max_size=10), max_size=3)


@settings(max_examples=150, deadline=None)
@given(lives=st.lists(choices, min_size=1, max_size=3), fates=fates, lost_replies=holes, sees_cuts=st.booleans())
def test_with_a_replay_every_stream_is_mended_in_the_end(
    lives: list[list[tuple[int, int]]], fates: list[str], lost_replies: list[set[int]], sees_cuts: bool
) -> None:
    """Losses, doubles, late ones, restarts seen or unseen, holes in replies: then one healthy replay, and all is true.

    Of a restart that nobody saw (it breaks no connection of ours only behind a proxy) the first batch must come.
    """
    publisher, reader = Publisher(lost_replies), make_reader(can_replay=True)
    healer = Healer(reader, publisher.ask, Complaints(engine="test"))

    async def publish(life: Life, name: int) -> None:
        late: list[tuple[int, bytes]] = []
        for seq, payload in enumerate(life.payloads):
            publisher.num_published = seq + 1
            fate = fates[(seq + 7 * name) % len(fates)] if seq or sees_cuts else "ok"
            if fate == "late":
                late.append((seq, payload))
            elif fate != "lost":
                copies = [(seq, payload)] * (2 if fate == "twice" else 1)
                arrive(reader, [*copies, *reversed(late)])
                late.clear()
            if reader.wants_healing:
                await healer.heal()

    async def play() -> Life:
        for name, rows in enumerate(lives, 1):
            life = publisher.life = Life(name, rows)
            publisher.num_published = 0
            if sees_cuts or name == 1:
                reader.note_connected()
                await healer.heal()
            await publish(life, name)
        reader.note_connected()
        publisher._lost_replies = []
        await healer.heal()
        return life

    life = asyncio.run(play())

    assert resident(reader) == keys(*life.resident)
    assert reader.order.next_seq == len(life.payloads)
    assert len(reader.held) == reader.held.num_bytes == 0
    assert publisher.num_requests <= MAX_REQUESTS * (80 * len(lives) + 2)


@settings(max_examples=150, deadline=None)
@given(rows=choices, fates=fates)
def test_without_a_replay_what_arrives_in_order_is_what_counts(rows: list[tuple[int, int]], fates: list[str]) -> None:
    life, reader = Life(1, rows), make_reader(can_replay=False)
    arrived: list[int] = []
    for seq, payload in enumerate(life.payloads):
        if fates[seq] in {"ok", "twice"}:
            arrived.append(seq)
            for _ in range(1 + (fates[seq] == "twice")):
                reader.take_live(seq, payload)

    truth, gaps, is_whole = Mirror(EventLog(8, SystemClock()), SystemClock()), 0, False
    decoder = Decoder()
    for index, seq in enumerate(arrived):
        has_gap = index > 0 and seq != arrived[index - 1] + 1
        is_whole = seq == 0 or (is_whole and not has_gap) or rows[seq][0] == 0
        gaps += has_gap
        truth.apply(decoder.decode(life.payloads[seq]))

    assert resident(reader) == {each for state in truth.snapshot().indexed for each in state.hashes}
    assert (reader.counts.gaps, reader.counts.resets) == (gaps, 0)
    assert reader.mirror.is_whole == is_whole
    assert reader.counts.duplicates == sum(fates[seq] == "twice" for seq in arrived)


@given(first=choices, second=choices)
@settings(max_examples=80, deadline=None)
def test_a_restart_that_nobody_saw_is_recognised_by_the_first_number_that_goes_back(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    before, after, reader = Life(1, first), Life(2, second), make_reader(can_replay=False)
    for seq, payload in enumerate(before.payloads):
        reader.take_live(seq, payload)
    for seq, payload in enumerate(after.payloads):
        reader.take_live(seq, payload)

    assert resident(reader) == keys(*after.resident)
    assert (reader.counts.resets, reader.mirror.is_whole) == (1, True)


def test_a_restart_whose_clock_went_back_is_recognised_by_two_batches() -> None:
    reader = make_reader(can_replay=False)
    for seq in range(REMEMBERED + 50):
        reader.take_live(seq, batch(stored(seq), ts=5000.0 + seq))
    reader.order._digests.pop(0)  # joined in the middle: the first batch was never seen
    for seq in range(3):
        reader.take_live(seq, batch(stored(100_000 + seq), ts=1.0 + seq))

    assert reader.counts.resets == 1
    assert keys(100_001, 100_002) <= resident(reader)


def test_old_batches_that_come_again_are_no_restart() -> None:
    reader = make_reader(can_replay=False)
    payloads = [batch(stored(seq), ts=100.0 + seq) for seq in range(3 * REMEMBERED)]
    for seq, payload in enumerate(payloads):
        reader.take_live(seq, payload)
    for seq in (0, 5, 6, 7, REMEMBERED, 3 * REMEMBERED - 1):
        reader.take_live(seq, payloads[seq])

    assert (reader.counts.resets, reader.counts.duplicates) == (0, 6)
    assert reader.mirror.num_blocks == 3 * REMEMBERED


def test_the_digests_that_are_remembered_are_bounded() -> None:
    order = BatchOrder()
    for seq in range(10 * REMEMBERED):
        order.accept(seq, b"%d" % seq, float(seq))

    assert len(order._digests) == REMEMBERED + 1
    assert order.judge(10 * REMEMBERED - 1, b"%d" % (10 * REMEMBERED - 1), 0.0) is Verdict.DUPLICATE
    assert order.judge(0, b"0", 0.0) is Verdict.DUPLICATE
    assert order.judge(0, b"another", 0.0) is Verdict.RESTARTED


def test_batches_that_are_held_are_bounded_in_number_and_bytes() -> None:
    held = HeldBatches(max_batches=10, max_bytes=100)
    for seq in range(8):
        held.hold_live(seq, b"x" * 15)
    assert (len(held), held.num_bytes, held.num_refused) == (6, 90, 2)
    held = HeldBatches(max_batches=10, max_bytes=100)
    for seq in range(20):
        (held.hold_live if seq % 2 else held.hold_numbered)(seq, b"x")
    assert (len(held), held.num_refused) == (10, 10)


def test_what_did_not_fit_while_a_replay_ran_is_asked_for_afterwards() -> None:
    life, reader, publisher = Life(1, [(6, n) for n in range(40)]), make_reader(can_replay=True), Publisher([])
    publisher.life = life
    reader.held = HeldBatches(max_batches=5)
    reader.note_connected()
    reader.wants_healing = True
    for seq in range(30):
        reader.take_live(seq, life.payloads[seq])
    healer = Healer(reader, publisher.ask, Complaints(engine="test"))

    publisher.num_published = 2
    asyncio.run(healer.heal())
    reader.take_live(30, life.payloads[30])
    publisher.num_published = 31
    asyncio.run(healer.heal())

    assert reader.order.next_seq == 31
    assert reader.mirror.is_whole


def test_a_publisher_that_never_answers_is_not_asked_all_the_time() -> None:
    reader, publisher = make_reader(can_replay=True), Publisher([])
    publisher.life = Life(1, [(6, n) for n in range(40)])
    asked: list[int] = []

    def ask(start: int) -> Answer:
        asked.append(start)
        return Answer(publisher.life, 0, 0, set(), has_end=False)  # type: ignore[arg-type]

    healer = Healer(reader, ask, Complaints(engine="test"))
    reader.note_connected()
    for seq in range(0, 40, 2):
        reader.take_live(seq, publisher.life.payloads[seq])
        asyncio.run(healer.heal())

    assert len(asked) == MAX_FAILURES
    assert reader.order.next_seq == 39
    assert reader.mirror.history == "broken"


def test_the_base_of_a_publisher_that_keeps_sums_makes_the_history_whole() -> None:
    """A replay that begins with a clear says everything, whatever number it begins with."""
    reader = make_reader(can_replay=True)
    life = Life(1, [(6, 1), (6, 2), (6, 3)])
    life.payloads[1] = batch(CLEARED, stored(77), ts=1001.0)

    healer = Healer(reader, lambda start: Answer(life, 3, max(start, 1), set()), Complaints(engine="test"))
    asyncio.run(healer.heal())

    assert reader.mirror.is_whole
    assert resident(reader) == keys(77, 1_000_000 + 2003)


HOLDS = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), st.integers(0, 30)),
        st.tuples(st.just("live"), st.integers(0, 30)),
        st.tuples(st.sampled_from(["aside", "drop"]), st.just(0)),
        st.tuples(st.sampled_from(["take", "forget", "lowest"]), st.integers(0, 31)),
        st.tuples(st.just("forget all"), st.just(0)),
    ),
    max_size=60,
)


@given(HOLDS)
def test_held_batches_are_those_of_a_list_and_a_dictionary(steps: list[tuple[str, int]]) -> None:
    held = HeldBatches(max_batches=20)
    live: list[int] = []
    numbered: set[int] = set()
    for act, seq in steps:
        has_room = len(live) + len(numbered) < 20
        if act == "hold":
            held.hold_numbered(seq, b"12")
            numbered |= {seq} if has_room else set()
        elif act == "live":
            held.hold_live(seq, b"12")
            live += [seq] if has_room else []
        elif act == "aside" and live:
            held.put_aside_first_live()
            numbered.add(live.pop(0))
        elif act == "drop" and live:
            held.drop_first_live()
            live.pop(0)
        elif act == "take":
            assert (held.take_numbered(seq) is not None) == (seq in numbered)
            numbered.discard(seq)
        elif act in ("forget", "lowest"):
            numbered = {each for each in numbered if each >= seq}
            if act == "forget":
                held.forget_below(seq)
            else:
                assert held.lowest(seq) == min([*numbered, *(each for each in live if each >= seq)], default=None)
        elif act == "forget all":
            held.forget_numbered()
            numbered.clear()
        assert len(held) == len(live) + len(numbered)
        assert held.num_bytes == 2 * len(held)
        assert held.first_live() == ((live[0], b"12") if live else None)


def test_many_holes_do_not_hold_up_the_loop() -> None:
    """Each hole that is given up costs the same, however many batches wait behind it."""

    def seconds(num_holes: int) -> float:
        reader = make_reader(can_replay=True)
        reader.wants_healing = True
        reader.begin_at_zero()
        for number in range(num_holes):
            reader.take_live(2 * number + 1, batch(stored(number), ts=float(number + 1)))
        began = time.process_time()
        reader.end_healing()
        assert reader.mirror.num_blocks == num_holes
        return time.process_time() - began

    seconds(500)
    assert seconds(16_000) < 10 * seconds(4_000), "twice as many holes take four times as long"

"""Subscriptions to publishers that misbehave, over real sockets."""

import random
import socket

import pytest
from rogue_publisher import CLEARED, Line, RoguePublisher, batch, removed, stored
from subscription_stage import SubscriptionStage, keys, wait_until

from kvwatch.sources import replay as replay_module
from kvwatch.sources import subscription as subscription_module
from kvwatch.sources.endpoints import Target
from kvwatch.telemetry.events import SourceGap, SourceReset


def target_of(publisher: RoguePublisher, *, has_replay: bool = True) -> Target:
    return Target(0, publisher.live, publisher.replay if has_replay else None)


def publish_chain(publisher: RoguePublisher, first: int, stop: int, *, but: tuple[int, ...] = ()) -> None:
    """Batches `first` to `stop - 1`; batch i stores hash 1000 + i. Those in `but` get lost on their way."""
    for seq in range(first, stop):
        publisher.publish(seq, batch(stored(1000 + seq), ts=100.0 + seq), is_sent=seq not in but)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "FIRST_REPLY_SECONDS", 0.5)
    monkeypatch.setattr(replay_module, "NEXT_REPLY_SECONDS", 0.3)


@pytest.fixture
def _quiet_comes_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription_module, "QUIET_SECONDS", 0.3)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("has_topic", [True, False])
def test_who_joins_in_the_middle_gets_what_came_before_and_then_what_comes(has_topic: bool) -> None:
    with RoguePublisher(has_topic=has_topic) as publisher:
        publish_chain(publisher, 0, 50)
        with SubscriptionStage(target_of(publisher)) as stage:
            wait_until(stage.is_connected)
            assert stage.mirror.is_whole
            publish_chain(publisher, 50, 60)
            wait_until(lambda: stage.hashes() == keys(*range(1000, 1060)))
            assert stage.reader.counts.gaps == 0
            assert stage.reader.counts.replays == {"complete": 1, "incomplete": 0, "failed": 0}


def test_without_a_replay_the_history_of_who_joins_late_is_not_whole_until_a_clear() -> None:
    with RoguePublisher(replay=None) as publisher:
        publish_chain(publisher, 0, 5)
        with SubscriptionStage(target_of(publisher)) as stage:
            wait_until(stage.is_connected)
            wait_until(lambda: not publish_and_see(publisher, stage, 5))
            assert stage.mirror.history == "unknown"
            assert stage.mirror.drift_blocks is None
            seq = stage.reader.order.next_seq
            assert seq is not None
            publisher.publish(seq, batch(CLEARED, stored(7), ts=200.0))
            wait_until(lambda: stage.mirror.is_whole)
            assert stage.hashes() == keys(7)


def publish_and_see(publisher: RoguePublisher, stage: SubscriptionStage, first: int) -> bool:
    """Publish the next batch; return whether nothing has arrived yet (a subscription takes a moment)."""
    seq = max([first - 1, *publisher.kept]) + 1
    publish_chain(publisher, seq, seq + 1)
    return stage.reader.order.next_seq is None


def test_a_publisher_that_connects_loses_its_first_message_and_replay_brings_it() -> None:
    live = f"tcp://127.0.0.1:{free_port()}"
    target = Target(0, live, f"tcp://127.0.0.1:{free_port()}", is_bound=True)
    with SubscriptionStage(target) as stage, RoguePublisher(live, target.replay, connects=True) as publisher:
        publisher.publish(0, batch(stored(1), ts=1.0), is_sent=False)
        wait_until(stage.is_connected)
        publisher.publish(1, batch(stored(2), ts=2.0))
        wait_until(lambda: stage.hashes() == keys(1, 2))
        assert stage.mirror.is_whole


def test_a_publisher_that_connects_and_cannot_replay_leaves_the_history_open() -> None:
    live = f"tcp://127.0.0.1:{free_port()}"
    with (
        SubscriptionStage(Target(0, live, is_bound=True)) as stage,
        RoguePublisher(live, None, connects=True) as publisher,
    ):
        wait_until(stage.is_connected)
        wait_until(lambda: not publish_and_see(publisher, stage, 1))
        assert stage.mirror.history == "unknown"


def test_holes_are_filled_by_a_replay() -> None:
    with RoguePublisher() as publisher, SubscriptionStage(target_of(publisher)) as stage:
        wait_until(stage.is_connected)
        publish_chain(publisher, 0, 40, but=(3, 4, 5, 20))
        wait_until(lambda: stage.hashes() == keys(*range(1000, 1040)))
        assert stage.mirror.is_whole
        assert stage.reader.counts.gaps >= 1
        assert not [event for event in stage.events if isinstance(event, SourceGap)]


def test_without_a_replay_holes_are_counted_and_break_the_history() -> None:
    with RoguePublisher(replay=None) as publisher, SubscriptionStage(target_of(publisher)) as stage:
        wait_until(stage.is_connected)
        wait_until(lambda: subscribed(publisher, stage))
        publish_chain(publisher, 0, 40, but=(3, 4, 5, 20))
        publisher.publish(40, batch(removed(1003, 1000), ts=200.0))
        wait_until(lambda: stage.reader.order.next_seq == 41)
        assert stage.hashes() == keys(*(1000 + i for i in range(1, 40) if i not in {3, 4, 5, 20}))
        assert (stage.mirror.history, stage.mirror.drift_blocks, stage.reader.counts.gaps) == ("broken", 1, 2)
        assert [event.num_batches for event in stage.events if isinstance(event, SourceGap)] == [3, 1]


def subscribed(publisher: RoguePublisher, stage: SubscriptionStage) -> bool:
    """Send something that is no batch until it arrives."""
    publisher.send([b"kv", b"probe"])
    return stage.complaints.counts["frames"] > 0


def test_a_number_that_a_failed_encoding_used_up_is_given_up_and_not_asked_for_for_ever() -> None:
    with RoguePublisher() as publisher, SubscriptionStage(target_of(publisher)) as stage:
        wait_until(stage.is_connected)
        publish_chain(publisher, 0, 10)
        publish_chain(publisher, 11, 20)
        wait_until(lambda: stage.reader.order.next_seq == 20)
        assert stage.mirror.history == "broken"
        num_requests = len(publisher.requests)
        assert num_requests <= 4
        publish_chain(publisher, 20, 60)
        wait_until(lambda: stage.reader.order.next_seq == 60)
        assert len(publisher.requests) == num_requests
        assert [event.num_batches for event in stage.events if isinstance(event, SourceGap)] == [1]


def test_a_replay_with_holes_and_an_end_marker_is_not_believed_but_asked_for_again() -> None:
    """sglang#38945: a slow reader's replay has holes in the middle, and the marker comes all the same."""
    rnd = random.Random(5)
    dropped: list[int] = []

    def with_holes(kept: dict[int, bytes], start: int) -> list[tuple[int, bytes]]:
        wanted = sorted(seq for seq in kept if seq >= start)
        if not dropped:
            dropped.extend(rnd.sample(wanted[1:-1], 30))
            wanted = [seq for seq in wanted if seq not in dropped]
        return [(seq, kept[seq]) for seq in wanted]

    with RoguePublisher(answers=with_holes) as publisher:
        publish_chain(publisher, 0, 400)
        with SubscriptionStage(target_of(publisher)) as stage:
            wait_until(lambda: stage.hashes() == keys(*range(1000, 1400)))
            wait_until(stage.is_connected)
            assert stage.mirror.is_whole
            assert stage.reader.counts.replays == {"complete": 1, "incomplete": 1, "failed": 0}


def test_a_replay_without_an_end_marker_ends_all_the_same() -> None:
    with RoguePublisher(has_end=False) as publisher:
        publish_chain(publisher, 0, 100)
        with SubscriptionStage(target_of(publisher)) as stage:
            wait_until(stage.is_connected)
            assert stage.hashes() == keys(*range(1000, 1100))
            assert stage.reader.counts.replays["incomplete"] == 1
            publish_chain(publisher, 100, 110)
            wait_until(lambda: stage.hashes() == keys(*range(1000, 1110)))


def test_a_replay_that_nobody_answers_does_not_hold_up_what_is_live() -> None:
    with RoguePublisher(replay=None) as publisher:
        target = Target(0, publisher.live, f"tcp://127.0.0.1:{free_port()}")
        with SubscriptionStage(target) as stage:
            wait_until(lambda: not publish_and_see(publisher, stage, 0))
            assert stage.reader.counts.replays["failed"] >= 1
            publish_chain(publisher, 5000, 5010)
            wait_until(lambda: stage.reader.order.next_seq == 5010)
            assert keys(*range(6000, 6010)) <= stage.hashes()


def test_live_batches_wait_for_the_replay_so_that_nothing_that_was_removed_comes_back() -> None:
    """Mooncake#4159: a removal that is applied before the replayed store is lost, and the block stays for ever."""

    def slow(kept: dict[int, bytes], start: int) -> list[tuple[int, bytes]]:
        publisher.publish(10, batch(removed(*range(1000, 1010)), ts=150.0))  # while the replay is on its way
        return [(seq, kept[seq]) for seq in sorted(kept) if start <= seq < 10]

    with RoguePublisher(answers=slow) as publisher:
        publish_chain(publisher, 0, 10)
        with SubscriptionStage(target_of(publisher)) as stage:
            wait_until(lambda: stage.reader.order.next_seq == 11)
            assert stage.hashes() == set()
            assert stage.mirror.drift_blocks == 0


@pytest.mark.parametrize("has_replay", [True, False])
def test_a_restart_is_recognised_and_what_was_resident_forgotten(has_replay: bool) -> None:
    with RoguePublisher() as first, SubscriptionStage(target_of(first, has_replay=has_replay)) as stage:
        wait_until(stage.is_connected)
        wait_until(lambda: subscribed(first, stage))
        publish_chain(first, 0, 100)
        wait_until(lambda: stage.mirror.num_blocks == 100)
        first.close()
        wait_until(lambda: not stage.is_connected())
        with RoguePublisher(first.live, first.replay) as second:
            second.publish(0, batch(stored(1), ts=300.0), is_sent=False)
            wait_until(stage.is_connected)
            stage.complaints.counts.clear()
            wait_until(lambda: subscribed(second, stage))
            second.publish(1, batch(stored(2, parent=1), ts=301.0))
            expected = keys(1, 2) if has_replay else keys(2)
            wait_until(lambda: stage.hashes() == expected)
            assert stage.mirror.is_whole == has_replay
            assert stage.reader.counts.resets == 1
            (reset,) = [event for event in stage.events if isinstance(event, SourceReset)]
            assert reset.reason == "restart"


def test_a_restarted_engine_that_has_published_nothing_is_known_to_be_empty() -> None:
    """An idle engine says nothing, least of all that it was restarted."""
    with RoguePublisher() as first, SubscriptionStage(target_of(first)) as stage:
        wait_until(stage.is_connected)
        publish_chain(first, 0, 100)
        wait_until(lambda: stage.mirror.num_blocks == 100)
        first.close()
        wait_until(lambda: not stage.is_connected())
        with RoguePublisher(first.live, first.replay):
            wait_until(stage.is_connected)
            assert stage.hashes() == set()
            assert stage.mirror.is_whole


def test_a_cut_connection_to_an_engine_that_lives_on_loses_nothing() -> None:
    with (
        RoguePublisher() as publisher,
        Line(publisher.live) as line,
        SubscriptionStage(Target(0, line.address, publisher.replay)) as stage,
    ):
        wait_until(stage.is_connected)
        publish_chain(publisher, 0, 30)
        wait_until(lambda: stage.mirror.num_blocks == 30)
        line.cut()
        publish_chain(publisher, 30, 40)
        wait_until(lambda: stage.hashes() == keys(*range(1000, 1040)))
        assert (stage.mirror.is_whole, stage.reader.counts.resets) == (True, 0)


@pytest.mark.parametrize("is_contiguous", [True, False])
def test_a_cut_connection_without_a_replay_leaves_doubt_until_the_next_number_comes(is_contiguous: bool) -> None:
    with (
        RoguePublisher(replay=None) as publisher,
        Line(publisher.live) as line,
        SubscriptionStage(Target(0, line.address)) as stage,
    ):
        wait_until(stage.is_connected)
        wait_until(lambda: subscribed(publisher, stage))
        publish_chain(publisher, 0, 30)
        wait_until(lambda: stage.mirror.num_blocks == 30)
        assert stage.mirror.is_whole
        line.cut()
        wait_until(lambda: not stage.mirror.is_whole)
        stage.complaints.counts.clear()
        wait_until(lambda: subscribed(publisher, stage))
        next_seq = 30 if is_contiguous else 31
        publish_chain(publisher, next_seq, next_seq + 1)
        wait_until(lambda: stage.reader.order.next_seq == next_seq + 1)
        assert stage.mirror.is_whole == is_contiguous
        assert stage.reader.counts.gaps == (not is_contiguous)


@pytest.mark.usefixtures("_quiet_comes_soon")
def test_the_last_batch_before_a_silence_is_not_missed_for_ever() -> None:
    with RoguePublisher() as publisher, SubscriptionStage(target_of(publisher)) as stage:
        wait_until(stage.is_connected)
        publish_chain(publisher, 0, 5, but=(4,))
        wait_until(lambda: stage.hashes() == keys(*range(1000, 1005)))
        assert stage.mirror.is_whole


def test_frames_that_are_no_message_are_counted_and_left_out() -> None:
    with RoguePublisher() as publisher, SubscriptionStage(target_of(publisher)) as stage:
        wait_until(stage.is_connected)
        wait_until(lambda: subscribed(publisher, stage))
        publish_chain(publisher, 0, 1)  # after the last of the probes
        wait_until(lambda: stage.mirror.num_blocks == 1)
        stage.complaints.counts.clear()
        payload = batch(stored(1), ts=1.0)
        for frames in ([b"kv"], [b"kv", b"\0" * 8], [b"kv", b"\0" * 7, payload], [b"kv", b"\0" * 8, payload, b""]):
            publisher.send(frames)
        publisher.send([b"kv", b"\xff" * 8, payload])
        publish_chain(publisher, 1, 3)
        wait_until(lambda: stage.hashes() == keys(1000, 1001, 1002))
        assert stage.complaints.counts == {"frames": 5}
        assert stage.mirror.is_whole


def test_batches_that_cannot_be_decoded_cost_themselves_and_the_claim_to_be_whole() -> None:
    with RoguePublisher() as publisher, SubscriptionStage(target_of(publisher)) as stage:
        wait_until(stage.is_connected)
        publish_chain(publisher, 0, 5)
        publisher.publish(5, b"garbage")
        publisher.publish(6, batch({"type": "BlockStored"}, stored(6), ts=107.0))
        publisher.publish(7, b"\0" * (50 << 20))
        publish_chain(publisher, 8, 10)
        wait_until(lambda: stage.reader.order.next_seq == 10)
        assert stage.hashes() == keys(1000, 1001, 1002, 1003, 1004, 6, 1008, 1009)
        assert +stage.complaints.counts == {"msgpack": 1, "hashes": 1, "size": 1}
        assert stage.mirror.history == "broken"


def test_doubled_and_late_batches_are_left_out() -> None:
    with RoguePublisher() as publisher, SubscriptionStage(target_of(publisher, has_replay=False)) as stage:
        wait_until(stage.is_connected)
        wait_until(lambda: subscribed(publisher, stage))
        for seq in (0, 1, 1, 0, 2, 4, 3, 5, 5):
            publisher.publish(seq, batch(stored(1000 + seq), ts=100.0 + seq))
        wait_until(lambda: stage.reader.counts.duplicates == 4)
        assert stage.hashes() == keys(1000, 1001, 1002, 1004, 1005)
        assert (stage.reader.counts.resets, stage.reader.counts.gaps) == (0, 1)


def test_a_storm_of_clears_is_survived_and_costs_no_events() -> None:
    with RoguePublisher() as publisher, SubscriptionStage(target_of(publisher)) as stage:
        wait_until(stage.is_connected)
        for seq in range(3000):
            publisher.publish(seq, batch(CLEARED, ts=100.0 + seq))
        publisher.publish(3000, batch(stored(1), ts=9000.0))
        wait_until(lambda: stage.hashes() == keys(1))
        assert stage.mirror.num_clears == 3000
        assert len(stage.events) < 10


def test_the_engines_connection_is_seen_and_its_loss_too() -> None:
    with RoguePublisher() as publisher, SubscriptionStage(target_of(publisher)) as stage:
        assert stage.subscription is not None
        wait_until(lambda: bool(stage.subscription and stage.subscription.is_connected))
        publisher.close()
        wait_until(lambda: not (stage.subscription and stage.subscription.is_connected))

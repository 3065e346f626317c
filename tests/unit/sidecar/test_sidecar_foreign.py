"""A sidecar beside foreign engines: what is shown, recorded, streamed and published of resident hashes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import zmq
from foreign_stage import ForeignEngine, block
from kv_event_reader import TOPIC, KVEventReader, fetch_replay
from otlp_receiver import attributes, grpc_collector
from sidecar_stage import Series, SidecarStage, of_engine, sidecar_stage, wait_until

from kvwatch.errors import ConfigError
from kvwatch.exporters.kv_events.part import KVEvents
from kvwatch.recorder.reader import Recording
from kvwatch.recorder.replay import Target, ledger_at
from kvwatch.sidecar import SidecarSettings
from kvwatch.sidecar_run import Sidecar
from kvwatch.stream.client import EventBatch, TelemetryClient
from kvwatch.stream.codec import StreamError
from kvwatch.stream.contract import Started, SubscribeRequest
from kvwatch.telemetry.events import BlocksStored

RANK = ("dp_rank", "0")


@contextmanager
def beside(*engines: ForeignEngine, **more: object) -> Iterator[SidecarStage]:
    by_name = {engine.name: engine for engine in engines}
    urls = [f"{engine.name}=vllm+http://127.0.0.1:1" for engine in engines]
    with sidecar_stage(*urls, make=lambda spec: by_name[spec.name], **more) as stage:
        stage.wait_until_watched(len(engines))
        yield stage


def value(page: Series, engine: str, name: str, **labels: str) -> float | None:
    return of_engine(page, engine).get((name, tuple(sorted((*labels.items(), RANK)))))


def indexed(number: float | None, engine: str = "a", tier: str = "device") -> Callable[[Series], bool]:
    return lambda page: value(page, engine, "kvwatch_kv_indexed_blocks", tier=tier, group="0") == number


def test_resident_hashes_are_counted_by_tier_and_nothing_else_is_claimed() -> None:
    engine = ForeignEngine("a")
    engine.store(*map(block, range(7)))
    with beside(engine) as stage:
        engine.store(block(7), block(8), parent=block(6))
        engine.store(block(1), block(2), tier="host")
        engine.remove(block(0), block(3), block(4), ages_ns=(2_000_000, 3_000_000))
        page = wait_until(stage.page, indexed(6))

        assert value(page, "a", "kvwatch_kv_indexed_blocks", tier="host", group="0") == 2
        assert value(page, "a", "kvwatch_kv_block_stores_total", tier="device") == 2
        assert value(page, "a", "kvwatch_kv_block_stores_total", tier="host") == 2
        assert value(page, "a", "kvwatch_kv_block_evictions_total", tier="device", reason="removed") == 3
        assert value(page, "a", "kvwatch_kv_block_lifetime_seconds_count") == 2
        shown = {name for (name, _) in of_engine(page, "a")}
        assert not {
            name for name in shown if name.startswith(("kvwatch_kv_blocks", "kvwatch_requests", "kvwatch_step"))
        }
        assert "kvwatch_kv_block_idle_before_eviction_seconds_count" not in shown
        assert "kvwatch_ledger_violations_total" not in shown
        evictions = [labels for (name, labels) in of_engine(page, "a") if name == "kvwatch_kv_block_evictions_total"]
        assert {dict(labels)["reason"] for labels in evictions} == {"removed"}


def test_counts_are_absent_while_history_has_a_hole_and_true_again_after_a_reset() -> None:
    engine = ForeignEngine("a")
    with beside(engine) as stage:
        engine.store(block(1), block(2))
        wait_until(stage.page, indexed(2))
        engine.lose(1)
        page = wait_until(stage.page, indexed(None))
        assert value(page, "a", "kvwatch_kv_block_stores_total", tier="device") == 2

        engine.complete()
        wait_until(stage.page, indexed(2))
        engine.restart()
        wait_until(stage.page, indexed(0))
        engine.store(block(9))
        wait_until(stage.page, indexed(1))
        engine.clear()
        wait_until(stage.page, indexed(0))


def test_an_engine_that_is_gone_has_no_gauges_and_keeps_its_counters() -> None:
    """Dynamo#14606 (O35): series of workers that were gone came back with the next message about them."""
    engine = ForeignEngine("a")
    with beside(engine) as stage:
        engine.store(block(1))
        wait_until(stage.page, indexed(1))
        engine.is_up = False
        page = wait_until(stage.page, indexed(None))
        assert value(page, "a", "kvwatch_source_up") == 0
        assert value(page, "a", "kvwatch_kv_block_stores_total", tier="device") == 1

        engine.store(block(2))  # was under way
        stored = "kvwatch_kv_block_stores_total"
        page = wait_until(stage.page, lambda page: value(page, "a", stored, tier="device") == 2)
        assert indexed(None)(page)
        engine.is_up = True
        wait_until(stage.page, indexed(2))


def test_two_engines_and_two_ranks_share_a_page_and_are_told_apart() -> None:
    engines = [ForeignEngine("a"), ForeignEngine("b")]
    with beside(*engines) as stage:
        engines[0].store(block(1))
        engines[1].store(block(1), block(2))
        page = wait_until(stage.page, indexed(2, "b"))
        assert indexed(1, "a")(page)
        assert ("kvwatch_build_info", tuple(sorted({("version", _version())}))) in page
        text = httpx.get(f"{stage.url}/metrics").text
        assert text.count("# HELP kvwatch_kv_indexed_blocks ") == 1


def _version() -> str:
    from kvwatch import __version__

    return __version__


def test_one_engines_defect_does_not_hide_the_other() -> None:
    class Broken(ForeignEngine):
        def samples(self) -> Iterator[object]:  # type: ignore[override]
            raise RuntimeError("no")

    engines = [Broken("bad"), ForeignEngine("good")]
    with beside(*engines) as stage:
        engines[1].store(block(1))
        page = wait_until(stage.page, indexed(1, "good"))
        assert of_engine(page, "bad") == {}


def test_the_stream_of_a_sidecar_asks_which_engine_is_meant() -> None:
    engines = [ForeignEngine("a"), ForeignEngine("b")]
    with beside(*engines) as stage, TelemetryClient(stage.grpc) as client:
        assert stage.sidecar.stream is not None
        assert stage.sidecar.stream.is_serving.wait(10)
        with pytest.raises(StreamError, match=r"several engines.*a \(dp_rank 0\), b \(dp_rank 0\)"):
            next(client.subscribe())
        with pytest.raises(StreamError, match="engine c is not offered here"):
            next(client.subscribe(SubscribeRequest(engine="c")))
        stream = client.subscribe(SubscribeRequest(engine="b"))
        started = next(stream)
        assert isinstance(started, Started)
        assert started.labels["engine"] == "b"
        engines[1].store(block(5))
        (event,) = next(item.events for item in stream if isinstance(item, EventBatch) and item.events)
        assert isinstance(event, BlocksStored)
        assert event.hashes == [block(5)]
        stream.cancel()


def test_a_foreign_snapshot_comes_whole_over_the_stream() -> None:
    engine = ForeignEngine("a")
    engine.store(*map(block, range(20_000)))
    engine.store(block(1), tier="host")
    with beside(engine) as stage, TelemetryClient(stage.grpc) as client:
        assert stage.sidecar.stream is not None
        assert stage.sidecar.stream.is_serving.wait(10)
        assert client.snapshot() == engine.snapshot()


def test_a_recording_of_a_foreign_engine_replays_to_what_was_resident(tmp_path: Path) -> None:
    engines = [ForeignEngine("a"), ForeignEngine("b")]
    with beside(*engines, record_dir=str(tmp_path)) as stage:
        for number in range(20):
            engines[0].store(block(number))
        engines[0].remove(block(3))
        engines[1].store(block(1))
        wait_until(stage.page, lambda page: indexed(19)(page) and indexed(1, "b")(page))
    assert {path.name for path in tmp_path.iterdir()} == {"a.0", "b.0"}
    (path,) = (tmp_path / "a.0").glob("*.kvrec")
    with Recording(path) as recording:
        ledger = ledger_at(recording)
        assert ledger.index is not None
        assert ledger.index.counts == {("device", "0"): 19}
        middle = ledger_at(recording, Target(seq=9)).index
        assert middle is not None
        assert sum(middle.counts.values()) == 10


def test_published_kv_events_tell_what_is_resident() -> None:
    engine = ForeignEngine("a")
    engine.store(block(1), block(2))
    live = {"kv_events": "tcp://127.0.0.1:0", "kv_events_socket": "bind", "kv_events_topic": TOPIC.decode()}
    with beside(engine, kv_events_replay="tcp://127.0.0.1:0", **live) as stage, zmq.Context() as context:
        part = next(part for part in stage.sidecar.fleet.watches[0]._options.parts if part.name == "kv_events")
        assert isinstance(part, KVEvents)
        assert part.publisher.replay_address is not None
        reader = KVEventReader()
        engine.store(block(3), parent=block(2))
        engine.remove(block(1))
        deadline = time.monotonic() + 60
        while reader.hashes != {2, 3}:
            assert time.monotonic() < deadline, reader
            for seq, payload in fetch_replay(context, part.publisher.replay_address, reader.next_seq):
                reader.take(seq, payload)
            time.sleep(0.05)


def test_otlp_metrics_of_all_engines_go_out_each_as_a_resource_of_its_own() -> None:
    engines = [ForeignEngine("a"), ForeignEngine("b")]
    with grpc_collector() as collected:
        with beside(*engines, otlp_endpoint=collected.endpoint) as stage:
            engines[0].store(block(1))
            engines[1].store(block(1), block(2))
            wait_until(stage.page, indexed(2, "b"))
        found = {
            (attributes(resource.resource.attributes)["service.instance.id"], point.as_int or point.as_double)
            for request in collected.metrics_requests
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == "kvwatch.kv_indexed_blocks"
            for point in metric.gauge.data_points or metric.sum.data_points
        }
        assert {("a-0", 1), ("b-0", 2)} <= found


def test_a_sidecar_does_not_watch_a_foreign_engine_through_another_sidecar() -> None:
    with beside(ForeignEngine("a")) as far, sidecar_stage(f"through=grpc://{far.grpc}") as near:
        page = wait_until(near.page, lambda page: value(page, "through", "kvwatch_source_up") is not None)
        assert value(page, "through", "kvwatch_source_up") == 0
        assert near.sidecar.fleet.watches == ()


def test_settings_that_cannot_be_meant_are_refused() -> None:
    two = ("a=vllm+http://h:1", "b=vllm+http://h:2")
    with pytest.raises(ConfigError, match="--kv-events publishes one engine, but 2 are watched"):
        Sidecar(SidecarSettings(engine=two, kv_events="tcp://*:0"))
    with pytest.raises(ConfigError, match="give both or neither"):
        Sidecar(SidecarSettings(engine=two[:1], kv_events_replay="tcp://*:0"))
    with pytest.raises(ConfigError, match="no engine to watch"):
        Sidecar(SidecarSettings())

"""The source of a foreign engine as a whole: HTTP and ZeroMQ on loopback, the engine played by hand."""

import asyncio
import json
import socket
import threading
import time
from types import TracebackType

import pytest
from engine_page_server import EnginePages
from rogue_publisher import RoguePublisher, batch, removed, stored
from subscription_stage import keys, wait_until

from kvwatch.errors import ConfigError
from kvwatch.sources import foreign
from kvwatch.sources.engines import EngineSpec, make_source, parse_engine
from kvwatch.sources.source import Rank, Source
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.events import BlocksEvicted, BlocksStored
from kvwatch.telemetry.schema import Metric


class Watched:
    """A source that runs on a loop of its own. A context manager."""

    def __init__(self, spec: EngineSpec) -> None:
        self.source: Source = make_source(spec)
        self.ranks: dict[int, Rank] = {}
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watched":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(15)
        assert not self._thread.is_alive()
        if self._error is not None and kind is None:
            raise self._error

    def hashes(self, dp_rank: int = 0) -> set[bytes]:
        """Return what is resident on a rank."""
        rank = self.ranks.get(dp_rank)
        return set() if rank is None else {h for s in rank.control.snapshot().indexed for h in s.hashes}

    def value(self, metric: Metric, *labels: str, dp_rank: int = 0) -> float | None:
        """Return one of a rank's samples."""
        rank = self.ranks.get(dp_rank)
        samples = [] if rank is None else list(rank.samples())
        found = [getattr(s, "value", None) for s in samples if s.metric is metric and s.labels == labels]
        assert len(found) <= 1, "told twice"
        return found[0] if found else None

    def is_settled(self, dp_rank: int = 0) -> bool:
        """Whether a rank is connected and whole."""
        return self.value(m.SOURCE_UP, dp_rank=dp_rank) == 1 and self.value(m.SOURCE_COMPLETE, dp_rank=dp_rank) == 1

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self.source.run(self._stop, self._on_rank))
        except BaseException as error:
            self._error = error
        finally:
            self._loop.close()

    def _on_rank(self, rank: Rank) -> None:
        assert rank.dp_rank not in self.ranks, "told twice"
        self.ranks[rank.dp_rank] = rank


def vllm_pages(*publishers: RoguePublisher) -> dict[str, bytes | int]:
    rows = {
        str(rank): {
            "endpoint": each.live.replace("127.0.0.1", "0.0.0.0"), "publisher": "zmq", "topic": "kv",
            "replay_endpoint": each.replay and each.replay.replace("127.0.0.1", "*"),
        }
        for rank, each in enumerate(publishers)
    }  # fmt: skip
    return {"/kv_event_sources": json.dumps(rows).encode(), "/v1/models": b'{"data": [{"id": "tiny"}]}'}


def test_a_vllm_is_found_and_each_of_its_ranks_followed_to_a_log_of_its_own() -> None:
    with RoguePublisher() as first, RoguePublisher() as second, EnginePages(vllm_pages(first, second)) as pages:
        first.publish(0, batch(stored(1, 2), ts=1.0))
        second.publish(0, batch(stored(3), ts=1.0, rank=1))
        with Watched(parse_engine(f"chat=vllm+{pages.url}")) as watched:
            wait_until(lambda: watched.is_settled(0) and watched.is_settled(1))
            wait_until(lambda: (watched.hashes(0), watched.hashes(1)) == (keys(1, 2), keys(3)))
            assert (watched.source.name, watched.source.model_name, watched.source.is_up) == ("chat", "tiny", True)
            cursor = watched.ranks[0].log.subscribe("test")
            first.publish(1, batch(removed(1), stored(4), ts=2.0))
            wait_until(lambda: watched.hashes() == keys(2, 4))
            assert [type(event) for event in cursor.read()] == [BlocksEvicted, BlocksStored]
            assert watched.value(m.KV_BLOCK_SIZE_TOKENS) == 16
            assert watched.value(m.SOURCE_DRIFT) == 0
            assert watched.value(m.SOURCE_LAST_EVENT_TIMESTAMP) is not None


def test_an_sglang_is_found_with_its_api_key(tmp_path: object) -> None:
    key = f"{tmp_path}/key"
    with open(key, "w", encoding="utf-8") as file:
        file.write("s3cret\n")
    with RoguePublisher(has_topic=False) as publisher:
        port = int(publisher.live.rsplit(":", 1)[1])
        assert publisher.replay is not None
        described = {
            "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": port, "topic": "", "dp_size": 1,
            "replay_endpoint_port_base": int(publisher.replay.rsplit(":", 1)[1]),
        }  # fmt: skip
        info = json.dumps({"served_model_name": "big", "kv_events": described}).encode()
        with EnginePages({"/server_info": info}) as pages:
            publisher.publish(0, batch(stored(-1), ts=1.0))
            with Watched(parse_engine(f"a=sglang+{pages.url}?token_file={key}")) as watched:
                wait_until(lambda: watched.hashes() == keys(2**64 - 1))
                assert watched.source.model_name == "big"
            assert {authorization for _, authorization in pages.requests} == {"Bearer s3cret"}


def test_an_engine_that_starts_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "MAX_RETRY_SECONDS", 0.3)
    with RoguePublisher() as publisher:
        with EnginePages({}) as probe:
            port = probe.port
        with Watched(parse_engine(f"a=vllm+http://127.0.0.1:{port}")) as watched:
            assert not watched.source.is_up
            with EnginePages({"/kv_event_sources": 503}, port) as pages:
                wait_until(lambda: len(pages.requests) > 2)
                assert watched.ranks == {}
                pages.pages.update(vllm_pages(publisher))
                publisher.publish(0, batch(stored(1), ts=1.0))
                wait_until(lambda: watched.hashes() == keys(1))
            publisher.publish(1, batch(stored(2), ts=2.0))
            wait_until(lambda: watched.hashes() == keys(1, 2))


def test_an_engine_that_publishes_elsewhere_after_a_restart_is_followed_there() -> None:
    """A publisher at port 0 gets another port in each life."""
    with EnginePages({}) as pages, RoguePublisher() as first:
        pages.pages.update(vllm_pages(first))
        first.publish(0, batch(stored(1), ts=1.0))
        watched = Watched(parse_engine(f"a=vllm+{pages.url}"))
        watched.__enter__()
        try:
            wait_until(lambda: watched.hashes() == keys(1))
            wait_until(lambda: len(pages.requests) >= 4)  # it has found everything as it should be ...
            time.sleep(1.5)
            num_requests = len([path for path, _ in pages.requests if path != "/metrics"])
            time.sleep(1.5)
            assert len([path for path, _ in pages.requests if path != "/metrics"]) == num_requests  # ... and rests
            first.close()
            wait_until(lambda: watched.value(m.SOURCE_UP) == 0)
            with RoguePublisher() as second:
                second.publish(0, batch(stored(2), ts=9.0))
                pages.pages.update(vllm_pages(second))
                wait_until(lambda: watched.hashes() == keys(2))
                assert watched.is_settled()
                assert watched.value(m.SOURCE_RESETS) == 1
        finally:
            watched.__exit__(None, None, None)


def test_an_engine_whose_events_cannot_be_had_is_not_asked_all_the_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, EnginePages({}) as pages:
        ranks = {"0": {"publisher": "zmq", "endpoint": f"tcp://*:{silent.getsockname()[1]}", "topic": "kv"}}
        pages.pages.update({"/kv_event_sources": json.dumps(ranks).encode(), "/v1/models": b"{}"})
        with Watched(parse_engine(f"a=vllm+{pages.url}")) as watched:
            wait_until(lambda: 0 in watched.ranks)
            time.sleep(8)
            assert watched.value(m.SOURCE_UP) == 0
            assert 3 <= [path for path, _ in pages.requests].count("/kv_event_sources") <= 6


def test_a_name_of_megabytes_is_cut() -> None:
    with RoguePublisher() as publisher, EnginePages(vllm_pages(publisher)) as pages:
        pages.pages["/v1/models"] = json.dumps({"data": [{"id": "x" * (1 << 20)}]}).encode()
        with Watched(parse_engine(f"a=vllm+{pages.url}")) as watched:
            wait_until(lambda: watched.source.model_name != "")
            assert watched.source.model_name == "x" * foreign.MAX_NAME_LETTERS


def test_a_list_of_models_that_nests_without_end_is_a_list_without_a_name() -> None:
    with RoguePublisher() as publisher, EnginePages(vllm_pages(publisher)) as pages:
        pages.pages["/v1/models"] = b'{"x": ' + b"[" * 100_000
        publisher.publish(0, batch(stored(1), ts=1.0))
        with Watched(parse_engine(f"a=vllm+{pages.url}")) as watched:
            wait_until(lambda: watched.hashes() == keys(1))
            assert watched.source.model_name == ""


def test_given_addresses_need_no_answer_from_the_engine() -> None:
    with RoguePublisher() as publisher:
        publisher.publish(0, batch(stored(1), ts=1.0))
        options = f"kv_events={publisher.live}&replay={publisher.replay}"
        with Watched(parse_engine(f"a=vllm+http://127.0.0.1:9?{options}")) as watched:
            wait_until(lambda: watched.hashes() == keys(1))
            assert watched.is_settled()
            assert watched.source.is_up


def test_an_engine_without_kv_events_has_a_rank_for_its_metrics() -> None:
    with EnginePages({"/kv_event_sources": b"{}"}) as pages, Watched(parse_engine(f"a=vllm+{pages.url}")) as watched:
        wait_until(lambda: 0 in watched.ranks)
        assert (watched.value(m.SOURCE_UP), watched.value(m.SOURCE_COMPLETE)) == (1, 0)
        assert watched.value(m.SOURCE_DRIFT) is None


def test_replays_can_be_switched_off() -> None:
    with RoguePublisher() as publisher, EnginePages(vllm_pages(publisher)) as pages:
        publisher.publish(0, batch(stored(1), ts=1.0))
        with Watched(parse_engine(f"a=vllm+{pages.url}?replay=off")) as watched:
            wait_until(lambda: watched.value(m.SOURCE_UP) == 1)
            assert publisher.requests == []


@pytest.mark.parametrize("url", ["vllm+http://127.0.0.1:1?kv_events=nonsense", "sglang+http://h?kv_events=tcp://x:0"])
def test_an_address_that_cannot_be_is_refused_before_anything_is_opened(url: str) -> None:
    with pytest.raises(ConfigError):
        make_source(parse_engine(f"a={url}"))

"""Engines that change their mind all the time: what a sidecar holds for them is bounded, and the others' is true."""

import gc
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from engine_page_server import EnginePages
from rogue_engine import indexed, pages, value
from rogue_publisher import RoguePublisher, batch, stored
from sidecar_stage import Series, sidecar_stage, wait_until

from kvwatch.sources import foreign


class OtherRanksEachTime(EnginePages):
    """An SGLang that names other ranks in each answer."""

    def __init__(self) -> None:
        super().__init__({})
        self.num_answers = 0
        self.pages = _Answers(self)


class _Answers(dict[str, bytes | int]):
    def __init__(self, engine: OtherRanksEachTime) -> None:
        super().__init__()
        self._engine = engine

    def get(self, path: str, default: Any = None) -> Any:
        if path != "/server_info":
            return default
        self._engine.num_answers += 1
        first = 100 * self._engine.num_answers
        rows = [{"dp_rank": rank, "endpoint": f"tcp://127.0.0.1:{20_000 + rank}"} for rank in range(first, first + 5)]
        return json.dumps({"kv_event_sources": rows}).encode()


def has_blocks(number: int) -> Callable[[Series], bool]:
    return lambda page: indexed(page) == number


def num_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_an_engine_that_names_other_ranks_each_time_is_followed_to_a_limit_and_harms_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(foreign, "MAX_RANKS", 8)
    with RoguePublisher() as good, EnginePages(pages(good)) as http, OtherRanksEachTime() as hostile:
        good.publish(0, batch(stored(1), ts=time.time()))
        with sidecar_stage(f"a=vllm+{http.url}", f"b=sglang+{hostile.url}") as stage:
            wait_until(stage.page, lambda page: indexed(page) == 1 and hostile.num_answers > 3)
            assert len(stage.sidecar.fleet.watches) == 1 + 8
            good.publish(1, batch(stored(2), ts=time.time()))
            wait_until(stage.page, lambda page: indexed(page) == 2)
    assert caplog.text.count("more than 8 ranks") == 1


def test_an_engine_that_flips_between_healthy_and_dead_costs_nothing_that_stays() -> None:
    with RoguePublisher() as first, EnginePages(pages(first)) as http:
        healthy, dead = dict(http.pages), dict.fromkeys(http.pages, 503)
        live, replay = first.live, first.replay
        with sidecar_stage(f"a=vllm+{http.url}") as stage:
            stage.wait_until_watched(1)
            wait_until(stage.page, lambda page: value(page, "source_up") == 1)
            engine, files, threads = first, [], []
            for life in range(12):
                http.pages.update(dead)
                engine.close()
                time.sleep(0.2)
                engine = RoguePublisher(live, replay)
                http.pages.update(healthy)
                engine.publish(0, batch(stored(*range(life + 1)), ts=time.time()))
                wait_until(stage.page, has_blocks(life + 1))
                files.append(num_files())
                threads.append(threading.active_count())
            page = stage.page()
            engine.close()
        assert max(files[6:]) <= max(files[:6]) + 3, files
        assert max(threads[6:]) <= max(threads[:6]) + 1, threads
        assert value(page, "source_resets_total") == 11
        assert value(page, "source_complete") == 1
        assert value(page, "source_drift_blocks") == 0
        assert value(page, "kv_block_stores_total", tier="device") == sum(range(1, 13))

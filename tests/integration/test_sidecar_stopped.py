"""A sidecar process that the system stops for a while, as a machine that swaps or a debugger does."""

import os
import signal
import time

import httpx
import pytest
from rogue_publisher import RoguePublisher, batch, removed, stored
from sidecar_process import sidecar_process
from sidecar_stage import Series, of_engine, parse_page

NUM_BATCHES = 40_000
"""More than the queues at both ends hold, so that batches are lost."""

KEPT = 100


def value(page: Series, name: str, **labels: str) -> float | None:
    return page.get((f"kvwatch_{name}", tuple(sorted((*labels.items(), ("dp_rank", "0"))))))


@pytest.mark.timeout(180)
def test_what_was_lost_while_it_was_stopped_is_replayed_and_every_store_is_counted_once() -> None:
    with RoguePublisher() as engine:
        options = f"kv_events={engine.live}&replay={engine.replay}"
        with sidecar_process(f"a=vllm+http://127.0.0.1:9?{options}") as sidecar:

            def page_when(name: str, wanted: float, seconds: float, **labels: str) -> Series:
                deadline = time.monotonic() + seconds
                while value(page := _page(sidecar.metrics_url), name, **labels) != wanted:
                    assert time.monotonic() < deadline, value(page, name, **labels)
                return page

            page_when("source_complete", 1, 30)
            os.kill(sidecar.process.pid, signal.SIGSTOP)
            try:
                for number in range(NUM_BATCHES):
                    gone = [removed(number - KEPT)] if number >= KEPT else []
                    engine.publish(number, batch(*gone, stored(number), ts=time.time()))
            finally:
                os.kill(sidecar.process.pid, signal.SIGCONT)
            time.sleep(1)
            engine.publish(NUM_BATCHES, batch(stored(NUM_BATCHES), ts=time.time()))  # shows what is missing
            page = page_when("kv_block_stores_total", NUM_BATCHES + 1, 90, tier="device")
            assert value(page, "kv_indexed_blocks", tier="device", group="0") == KEPT + 1
            assert value(page, "source_complete") == 1
            assert value(page, "source_drift_blocks") == 0
            assert (value(page, "source_gaps_total") or 0) >= 1
            assert value(page, "source_resets_total") == 0


def _page(url: str) -> Series:
    time.sleep(1.05)
    return of_engine(parse_page(httpx.get(url, timeout=10).text), "a")

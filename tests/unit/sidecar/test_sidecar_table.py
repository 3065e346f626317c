"""docs/sources.md, its table of metrics by source: what it says is shown, and nothing else, by whole sidecars."""

import json
import time
from collections.abc import Iterable

import pytest
from engine_page_server import EnginePages
from rogue_engine import value
from rogue_publisher import RoguePublisher, batch, removed, stored
from sidecar_stage import Series, SidecarStage, sidecar_stage, wait_until
from stream_stage import StreamStage, stream_stage

from kvwatch.sources.knowledge import NOT_AVAILABLE, SOURCES, knowledge
from kvwatch.sources.scrape.rules import Dialect, FromLabel, Rule
from kvwatch.sources.scrape.sglang import SGLANG
from kvwatch.sources.scrape.vllm import VLLM
from kvwatch.telemetry.metrics import CATALOGUE
from kvwatch.telemetry.schema import Metric, MetricKind

SUFFIXES = {
    MetricKind.COUNTER: ("_total",), MetricKind.GAUGE: ("",), MetricKind.HISTOGRAM: ("_bucket", "_sum", "_count")
}  # fmt: skip


def metrics_of(series: Iterable[str]) -> set[Metric]:
    """Return the metrics that have a series on a page."""
    by_name = {f"kvwatch_{m.name}{suffix}": m for m in CATALOGUE for suffix in SUFFIXES[m.kind]}
    return {by_name[name] for name in series}


def available(source: str) -> set[Metric]:
    """Return the metrics that the table says a source can tell."""
    column = SOURCES.index(source)
    return {row.metric for row in knowledge() if not row.cells[column].startswith(NOT_AVAILABLE)}


def names(metrics: Iterable[Metric]) -> list[str]:
    return sorted(metric.name for metric in metrics)


def page_of(dialect: Dialect) -> bytes:
    """Return a page on which an engine tells everything that it can."""
    lines = [f"{dialect.prefix}page_size 16"]
    for rule in dialect.rules:
        for name in (*rule.names[:1], *rule.plus):
            lines += rows_of(rule, name)
    return ("\n".join(dict.fromkeys(lines)) + "\n").encode()


def rows_of(rule: Rule, name: str) -> list[str]:
    labels = {each.label: next(iter(each.values)) for each in rule.labels if isinstance(each, FromLabel)}
    if rule.from_label:
        name, labels = rule.names[0], {"num_gpu_blocks": "56", "block_size": "16"}
    text = ",".join(f'{key}="{label}"' for key, label in labels.items())
    if rule.metric.kind is MetricKind.HISTOGRAM:
        return [f'{name}_bucket{{le="1"}} 1', f'{name}_bucket{{le="+Inf"}} 2', f"{name}_sum 3", f"{name}_count 2"]
    return [f"{name}{{{text}}} 1"]


def pages_of(dialect: Dialect, publisher: RoguePublisher) -> dict[str, bytes | int]:
    row = {"publisher": "zmq", "topic": "kv", "endpoint": publisher.live, "replay_endpoint": publisher.replay}
    return {
        "/kv_event_sources": json.dumps({"0": row}).encode(),
        "/server_info": json.dumps({"kv_event_sources": [row | {"dp_rank": 0}]}).encode(),
        "/v1/models": b"{}", "/metrics": page_of(dialect),
    }  # fmt: skip


def has_everything(page: Series) -> bool:
    return (
        value(page, "kv_premature_eviction_extra_blocks_count", tier="device") == 1
        and value(page, "requests", state="running") is not None
        and value(page, "kv_prefix_depth_max", tier="device", group="0") is not None
        and value(page, "kv_indexed_blocks", tier="device", group="0") == 3
    )


@pytest.mark.parametrize(("source", "dialect"), [("vLLM", VLLM), ("SGLang", SGLANG)])
def test_of_a_foreign_engine_that_tells_all_it_can_exactly_the_tables_metrics_are_shown(
    source: str, dialect: Dialect
) -> None:
    with (
        RoguePublisher() as engine,
        EnginePages(pages_of(dialect, engine)) as http,
        sidecar_stage(f"a={source.lower()}+{http.url}") as stage,
    ):
        stage.wait_until_watched(1)
        wait_until(stage.page, lambda page: value(page, "source_complete") == 1)
        for number, events in enumerate(([stored(1, 2)], [removed(2)], [stored(2, 3, parent=1)])):
            engine.publish(number, batch(*events, ts=time.time()))
        page = wait_until(stage.page, has_everything)
        shown = metrics_of(name for name, labels in page)

    assert names(shown - available(source)) == [], "shown, but said to be not available"
    assert names(available(source) - shown) == [], "said to be available, but not shown"


def seen(stage: StreamStage, sidecar: SidecarStage) -> tuple[set[Metric], set[Metric]]:
    theirs = stage.observatory._page.render(fresh=True).body.decode().splitlines()
    own = {line.partition("{")[0].partition(" ")[0] for line in theirs if line.startswith("kvwatch_")}
    return metrics_of(own), metrics_of(name for name, labels in sidecar.page())


def test_of_a_kvwatch_engine_everything_is_shown_that_it_shows_itself() -> None:
    told = available("kvwatch")
    with stream_stage() as stage:
        stage.step(60)
        with sidecar_stage(f"near=grpc://{stage.address}") as sidecar:
            wait_until(sidecar.page, lambda page: value(page, "source_up", engine="near") == 1)
            stage.step(300)
            wait_until(sidecar.page, lambda page: value(page, "prompt_tokens_total", engine="near") not in (None, 0))
            theirs, mine = seen(stage, sidecar)

    assert names(mine - told) == [], "shown, but said to be not available"
    assert names(theirs - told) == [], "the engine shows it, and the table says that a sidecar does not"
    assert names(theirs - mine) == [], "the engine shows it, and the sidecar does not"
    assert len(theirs) > 60

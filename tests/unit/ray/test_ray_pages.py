import asyncio
import time
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvwatch.exporters.prometheus.sample_page import sample_page
from kvwatch.telemetry import metrics as m
from kvwatch_ray.fleet import FORGET_SECONDS, Fleet, Report
from kvwatch_ray.forwarded import Head, end_to_end, error_body
from kvwatch_ray.pages import merged, stalled_seconds, value_of

PAGE = sample_page("text").decode()
ENGINE = next(line for line in PAGE.splitlines() if 'engine="' in line).partition('engine="')[2].partition('"')[0]


def page_of(name: str) -> str:
    return PAGE.replace(f'engine="{ENGINE}"', f'engine="{name}"')


def report(name: str, page: str = "") -> Report:
    return Report(name, "node", 1, 2, "http://127.0.0.1:3/admin/v1", "127.0.0.1:4", {"waiting_requests": 0.0}, page)


def test_a_page_of_many_has_every_series_of_each_under_one_header() -> None:
    page = merged([page_of("ray-0"), page_of("ray-1")])

    families = list(text_string_to_metric_families(page))
    alone = list(text_string_to_metric_families(PAGE))
    assert [family.name for family in families] == [family.name for family in alone]
    series = [(sample.name, tuple(sorted(sample.labels.items()))) for family in families for sample in family.samples]
    assert len(series) == len(set(series)) == 2 * sum(len(family.samples) for family in alone)
    assert page.count("# TYPE kvwatch_kv_blocks ") == 1


def test_a_page_of_one_is_that_page() -> None:
    assert merged([PAGE]) == "\n".join(line for line in PAGE.splitlines() if line and line != "# EOF") + "\n"
    assert merged([]) == "\n"


def test_values_are_summed_over_the_series_that_are_asked_for() -> None:
    page = 'kvwatch_requests{engine="a",state="waiting"} 3\nkvwatch_requests{engine="a",state="running"} 4\n'

    assert value_of(page, m.REQUESTS, {"state": "waiting"}) == 3
    assert value_of(page, m.REQUESTS) == 7
    assert value_of(page, m.KV_USAGE_RATIO) is None
    assert stalled_seconds(PAGE) is not None


def test_a_replica_that_no_longer_reports_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        fleet = Fleet()
        await fleet.report(report("ray-1", page_of("ray-1")))
        await fleet.report(report("ray-0", page_of("ray-0")))
        table = await fleet.table()
        assert [row["name"] for row in table] == ["ray-0", "ray-1"]
        assert "page" not in table[0]
        assert 'engine="ray-1"' in await fleet.page()

        later = time.monotonic() + FORGET_SECONDS + 1
        with monkeypatch.context() as patched:
            patched.setattr("kvwatch_ray.fleet.time", SimpleNamespace(monotonic=lambda: later))
            await fleet.report(report("ray-0"))
            assert [row["name"] for row in await fleet.table()] == ["ray-0"]

    asyncio.run(story())


def test_headers_of_the_connection_stay_behind() -> None:
    assert end_to_end({"Authorization": "Bearer k", "Connection": "close", "Content-Length": "5"}) == {
        "authorization": "Bearer k"
    }
    assert Head(200, {"content-type": "text/event-stream; charset=utf-8"}).is_stream
    assert not Head(200, {"content-type": "application/json"}).is_stream
    assert b'"code": "replica_lost"' in error_body("gone", "replica_lost")

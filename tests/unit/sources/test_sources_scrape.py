"""An engine's metrics in our names: on the page of a real vLLM, on pages written by hand, and over real sockets."""

import asyncio
import gzip
import http.server
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_event_recordings import FOLDER

from kvwatch.ledger.view import HistogramSample, Sample
from kvwatch.sources.engine_http import EngineHTTP
from kvwatch.sources.engines import parse_engine
from kvwatch.sources.scrape import make_scraper
from kvwatch.sources.scrape.page import PageError, read_page
from kvwatch.sources.scrape.rules import Dialect, Rule
from kvwatch.sources.scrape.scraper import MetricsScraper
from kvwatch.sources.scrape.sglang import SGLANG
from kvwatch.sources.scrape.totals import Totals
from kvwatch.sources.scrape.vllm import VLLM
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.schema import Metric, MetricKind

Found = dict[tuple[Metric, tuple[str, ...]], Sample | HistogramSample]


def recorded_pages() -> list[str]:
    text = gzip.decompress((FOLDER / "vllm-0.32-mixed.metrics.gz").read_bytes()).decode()
    return [part.partition("\n")[2] for part in text.split("### ")[1:]]


def by_key(samples: list[Sample | HistogramSample]) -> Found:
    return {(each.metric, each.labels): each for each in samples}


def value(found: Found, metric: Metric, *labels: str) -> float:
    sample = found[metric, labels]
    assert isinstance(sample, Sample)
    return sample.value


def test_the_last_page_of_a_real_vllm_says_what_it_had_counted() -> None:
    page = read_page(recorded_pages()[-1], VLLM)
    assert page.model_name == "smollm2"
    assert list(page.ranks) == [0]
    found = by_key(page.ranks[0])
    assert value(found, m.PREFIX_CACHE_QUERIED_TOKENS) == 37_621
    assert value(found, m.PREFIX_CACHE_HIT_TOKENS, "device") == 17_280
    assert value(found, m.PREEMPTIONS, "recompute", "blocks") == 1
    assert value(found, m.KV_BLOCK_CAPACITY, "device") == 119
    assert value(found, m.KV_BLOCK_SIZE_TOKENS) == 32
    assert value(found, m.REQUESTS, "running") == 0
    idle = found[m.KV_BLOCK_IDLE, ()]
    assert isinstance(idle, HistogramSample)
    assert idle.count == 904


def test_every_rule_of_vllm_has_its_row_on_a_real_page_or_is_of_an_older_version() -> None:
    found = {metric for metric, _ in by_key(read_page(recorded_pages()[-1], VLLM).ranks[0])}
    assert {rule.metric for rule in VLLM.rules} == found
    absent = {rule.names for rule in VLLM.rules if rule.labels == ("swapped",)}
    assert absent == {("vllm:num_requests_swapped",)}


def test_labels_fit_the_metrics_and_derived_values_say_how() -> None:
    for rule in (*VLLM.rules, *SGLANG.rules):
        assert len(rule.labels) == len(rule.metric.labels), rule
        assert rule.fidelity == "exact" or rule.note, rule
        assert all(name.startswith(("vllm:", "sglang:")) for name in rule.names)


def test_counters_of_a_recording_only_grow_and_a_restart_does_not_set_them_back() -> None:
    pages, totals = recorded_pages(), Totals()
    last: Found = {}
    for page in (*pages, *pages):  # played twice: the second time the engine has begun anew
        found = by_key(totals.update(read_page(page, VLLM).ranks[0]))
        for key, sample in last.items():
            if key[0].kind is MetricKind.COUNTER:
                assert value(found, key[0], *key[1]) >= value(last, key[0], *key[1])
            elif isinstance(sample, HistogramSample):
                now = found[key]
                assert isinstance(now, HistogramSample)
                assert all(a <= b for a, b in zip(sample.counts, now.counts, strict=True))
        last = found
    assert value(last, m.PREFIX_CACHE_HIT_TOKENS, "device") == 2 * 17_280


@given(st.lists(st.lists(st.integers(0, 50), min_size=1), min_size=1))
def test_totals_are_the_sum_of_what_each_life_had_counted(lives: list[list[int]]) -> None:
    totals = Totals()
    lives = [sorted(life) for life in lives]
    expected, previous = 0, 0
    for life in lives:
        for reading in life:
            # A new life that begins above the last reading cannot be told from the old one: nobody can.
            expected += reading - previous if reading >= previous else reading
            previous = reading
            (sample,) = totals.update([Sample(m.PREEMPTIONS, ("recompute", "blocks"), reading)])
            assert isinstance(sample, Sample)
            assert sample.value == expected


def test_a_counter_that_is_gone_from_the_page_keeps_its_value_and_a_gauge_does_not() -> None:
    totals = Totals()
    totals.update([Sample(m.PREEMPTIONS, ("recompute", "blocks"), 3), Sample(m.REQUESTS, ("running",), 1)])
    assert totals.update([]) == [Sample(m.PREEMPTIONS, ("recompute", "blocks"), 3)]


def test_older_names_are_read_and_the_newest_wins() -> None:
    old = 'vllm:gpu_cache_usage_perc{engine="0"} 0.5\nvllm:time_per_output_token_seconds_bucket{le="+Inf"} 2\n'
    found = by_key(read_page(old, VLLM).ranks[0])
    assert value(found, m.KV_USAGE_RATIO, "device") == 0.5
    assert (m.INTER_TOKEN_LATENCY, ()) in found
    both = old + 'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
    assert value(by_key(read_page(both, VLLM).ranks[0]), m.KV_USAGE_RATIO, "device") == 0.25


def test_ranks_are_told_apart_and_rows_without_one_belong_to_the_first() -> None:
    text = "".join(f'vllm:num_requests_running{{engine="{rank}"}} {rank + 1}\n' for rank in range(3))
    page = read_page(text + 'vllm:admission_rejections_total{reason="x"} 4\n', VLLM)
    assert {rank: value(by_key(found), m.REQUESTS, "running") for rank, found in page.ranks.items()} == {
        0: 1,
        1: 2,
        2: 3,
    }
    assert value(by_key(page.ranks[0]), m.REQUESTS_REJECTED, "queue_full") == 4


def test_sglang_splits_its_pool_and_only_the_first_of_equal_ranks_is_read() -> None:
    rows = {
        "sglang:page_size": 16, "sglang:kv_used_tokens": 160, "sglang:kv_evictable_tokens": 320,
        "sglang:kv_available_tokens": 1120, "sglang:max_total_num_tokens": 1600, "sglang:num_running_reqs": 3,
    }  # fmt: skip
    text = "".join(
        f'{name}{{model_name="m",tp_rank="{rank}",pp_rank="0"}} {number}\n'
        for name, number in rows.items()
        for rank in (0, 1)
    )
    sources = {"device": 1, "total": 2, "host": 4, "storage": 7, "elsewhere": 9}
    text += "".join(
        f'sglang:cached_tokens_total{{cache_source="{source}",tp_rank="0"}} {number}\n'
        for source, number in sources.items()
    )
    text += 'sglang:cached_tokens_total{tp_rank="0"} 3\n'
    text += 'sglang:num_running_reqs{tp_rank="0",priority="7"} 2\nsglang:num_running_reqs{tp_rank="0",priority="8"} 1\n'
    found = by_key(read_page(text, SGLANG).ranks[0])
    assert value(found, m.KV_BLOCKS, "device", "0", "used") == 10
    assert value(found, m.KV_BLOCKS, "device", "0", "cached") == 20
    assert value(found, m.KV_BLOCKS, "device", "", "empty") == 70
    assert value(found, m.KV_FREE_BLOCKS, "device") == 90
    assert value(found, m.KV_BLOCK_CAPACITY, "device") == 100
    assert value(found, m.REQUESTS, "running") == 3
    hits = {"device": 1 + 2 + 3, "host": 4, "disk": 7, "external": 9}
    assert {tier: value(found, m.PREFIX_CACHE_HIT_TOKENS, tier) for tier in hits} == hits


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html><body>no such page</body></html>",
        'other_metric{engine="0"} 3\n',
        "vllm:num_requests_running{engine=\n",
        "vllm:num_requests_running{} not-a-number\n",
        "vllm:x 1\n" * 100_001,
    ],
    ids=["empty", "html", "foreign", "torn", "word", "endless"],
)
def test_what_is_no_page_is_refused(text: str) -> None:
    with pytest.raises(PageError):
        read_page(text, VLLM)


@pytest.mark.parametrize("number", ["NaN", "+Inf", "-3"])
def test_values_that_cannot_be_are_absent(number: str) -> None:
    page = read_page(f"vllm:num_requests_running {number}\n", VLLM)
    assert not page.ranks[0]


def test_a_histogram_that_falls_or_has_no_end_is_absent() -> None:
    falls = 'vllm:e2e_request_latency_seconds_bucket{le="1"} 5\nvllm:e2e_request_latency_seconds_bucket{le="+Inf"} 3\n'
    endless = 'vllm:e2e_request_latency_seconds_bucket{le="1"} 5\n'
    wrong = 'vllm:e2e_request_latency_seconds_bucket{le="x"} 5\nvllm:e2e_request_latency_seconds_bucket{le="+Inf"} 5\n'
    absurd = "".join(f'vllm:e2e_request_latency_seconds_bucket{{le="{each}"}} 1\n' for each in [*range(300), "+Inf"])
    for text in (
        falls,
        endless,
        wrong,
        absurd,
        *(falls.replace(" 3", f" {each}") for each in ("NaN", "+Inf", "1e400")),
    ):
        assert not read_page(text, VLLM).ranks[0]


def test_ranks_that_no_engine_has_are_left_out() -> None:
    text = "".join(
        f'vllm:num_requests_running{{engine="{rank}"}} 1\n' for rank in ("0", "7", "1024", "99999", "x", "-1")
    )
    assert read_page(text, VLLM).ranks.keys() == {0, 7}


NUMBERS = st.sampled_from(["0", "1", "-1", "NaN", "+Inf", "1e400", "1e18", "1e300", "1e-320", "", "x", '"'])
RULES = st.sampled_from(
    [*VLLM.rules, *SGLANG.rules, *(Rule(each.metric, (each.per,)) for each in SGLANG.rules if each.per)]
)
LINES = st.lists(st.tuples(RULES, st.sampled_from(["", "_bucket", "_sum"]), NUMBERS, NUMBERS))


@given(
    st.text(alphabet=st.sampled_from('vllm:num_requests_running{}=",0123456789.+-eE \n#HELPTYPE\\'), max_size=200),
    LINES,
)
def test_any_text_is_read_or_refused(text: str, lines: list[tuple[Rule, str, str, str]]) -> None:
    told = "\n".join(f'{rule.names[0]}{suffix}{{le="{bound}"}} {number}' for rule, suffix, bound, number in lines)
    for each in ("vllm:" + text, told):
        for dialect in (VLLM, SGLANG):
            _read_or_refuse(each, dialect)


def test_a_page_size_that_is_next_to_nothing_makes_no_pool_without_end() -> None:
    page = read_page("sglang:page_size 1e-320\nsglang:max_total_num_tokens 1e300\n", SGLANG)

    assert m.KV_BLOCK_CAPACITY not in {each.metric for each in page.ranks[0]}


def _read_or_refuse(text: str, dialect: Dialect) -> None:
    try:
        page = read_page(text, dialect)
    except PageError:
        return
    for found in page.ranks.values():
        assert all(math.isfinite(each.value) for each in found if isinstance(each, Sample))
        assert all(math.isfinite(each.sum) for each in found if isinstance(each, HistogramSample))


# ---------------------------------------------------------------- over sockets


class Engine(http.server.ThreadingHTTPServer):
    body = b""
    status = 200
    seen: list[str | None]

    def __init__(self) -> None:
        self.seen = []
        super().__init__(("127.0.0.1", 0), Answer)


class Answer(http.server.BaseHTTPRequestHandler):
    server: Engine

    def do_GET(self) -> None:
        self.server.seen.append(self.headers.get("Authorization"))
        self.send_response(self.server.status)
        self.end_headers()
        try:
            self.wfile.write(self.server.body)
        except OSError:
            return  # whoever asked had enough

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def running_engine() -> Iterator[Engine]:
    with Engine() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def scrape(scraper: MetricsScraper, http_client: EngineHTTP) -> None:
    asyncio.run(scrape_once(scraper, http_client))


async def scrape_once(scraper: MetricsScraper, client: EngineHTTP) -> None:
    await scraper.scrape(client)
    await client.close()


def test_gauges_go_and_counters_stay_while_an_engine_does_not_answer(tmp_path: Path) -> None:
    """aibrix#2569, llm-d-router#2408 (O38): what was scraped last was believed for as long as nothing newer came."""
    token = tmp_path / "token"
    token.write_text("secret-7\n")
    with running_engine() as engine:
        spec = parse_engine(f"a=vllm+http://127.0.0.1:{engine.server_port}?token_file={token}")
        scraper, client = make_scraper(spec), EngineHTTP(spec)
        engine.body = recorded_pages()[-1].encode()
        scrape(scraper, client)
        assert engine.seen == ["Bearer secret-7"]
        assert (scraper.is_up, scraper.model_name, scraper.capacity(0)) == (True, "smollm2", 119)
        whole = by_key(list(scraper.samples(0)))
        for body, status, num_refused in [
            (b"", 503, 0), (b"<html>", 200, 1), (b"x" * (5 << 20), 200, 1), (b"vllm:x\xff\xfe{", 200, 2),
        ]:  # fmt: skip
            engine.body, engine.status = body, status
            scrape(scraper, client)
            assert not scraper.is_up
            left = by_key(list(scraper.samples(0)))
            assert value(left, m.SOURCE_DECODE_ERRORS, "metrics") == num_refused
            assert {key for key in whole if key[0].kind is not MetricKind.GAUGE} == set(left)
            assert value(left, m.PREFIX_CACHE_HIT_TOKENS, "device") == 17_280
        assert scraper.capacity(0) is None


def test_an_engine_that_nobody_runs_is_down() -> None:
    spec = parse_engine("a=vllm+http://127.0.0.1:9")
    scraper = make_scraper(spec)
    scrape(scraper, EngineHTTP(spec))
    assert not scraper.is_up
    assert [each.metric for each in scraper.samples(0)] == [m.SOURCE_DECODE_ERRORS]
    assert list(scraper.samples(1)) == []

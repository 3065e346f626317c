"""vLLM's names: off unless asked for, and with vLLM's meaning."""

from naive_engine import ManualClock, NaiveEngine
from prometheus_client.parser import text_string_to_metric_families

from kvwatch.derive.scenario import ScenarioClock, opening_snapshot, play
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.exporters.prometheus.families import ViewCollector
from kvwatch.exporters.prometheus.page import MetricsPage
from kvwatch.ledger.mirror import Mirror
from kvwatch.telemetry.log import EventLog

Page = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse(text: str) -> Page:
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def page_of(mirror: Mirror, clock: ManualClock | ScenarioClock, *, has_aliases: bool = True) -> Page:
    collector = ViewCollector(lambda: mirror.view, [], EngineIdentity("chat", 3, "tiny"), has_vllm_aliases=has_aliases)
    return parse(MetricsPage(collector, clock, 0).render().body.decode())


def after_the_scenario() -> tuple[Mirror, ScenarioClock]:
    clock = ScenarioClock()
    log = EventLog(1024, clock)
    cursor = log.subscribe("test")
    mirror = Mirror(clock, 0)
    mirror.load(opening_snapshot())
    play(log, clock)
    mirror.apply(cursor.read(1024))
    mirror.publish()
    return mirror, clock


def value(page: Page, name: str, **labels: str) -> float:
    return page[name, tuple(sorted({"model_name": "tiny", "engine": "3", **labels}.items()))]


def total(page: Page, name: str, **labels: str) -> float:
    return sum(v for (series, found), v in page.items() if series == name and labels.items() <= dict(found).items())


def test_without_the_flag_there_is_none() -> None:
    mirror, clock = after_the_scenario()

    assert not [name for name, _ in page_of(mirror, clock, has_aliases=False) if name.startswith("vllm:")]


def test_with_the_flag_every_native_series_is_unchanged() -> None:
    mirror, clock = after_the_scenario()

    native = page_of(mirror, clock, has_aliases=False)

    assert native.items() <= page_of(mirror, clock).items()


def test_aliases_say_what_the_native_series_say() -> None:
    mirror, clock = after_the_scenario()

    page = page_of(mirror, clock)

    pairs = {
        "vllm:num_requests_running": total(page, "kvwatch_requests", state="running"),
        "vllm:num_requests_waiting": total(page, "kvwatch_requests", state="waiting"),
        "vllm:num_preemptions_total": total(page, "kvwatch_preemptions_total"),
        "vllm:prefix_cache_queries_total": total(page, "kvwatch_prefix_cache_queried_tokens_total"),
        "vllm:prefix_cache_hits_total": total(page, "kvwatch_prefix_cache_hit_tokens_total"),
        "vllm:prompt_tokens_total": total(page, "kvwatch_prompt_tokens_total"),
        "vllm:generation_tokens_total": total(page, "kvwatch_generated_tokens_total"),
        "vllm:spec_decode_num_drafts_total": total(page, "kvwatch_spec_decode_drafts_total"),
        "vllm:spec_decode_num_draft_tokens_total": total(page, "kvwatch_spec_decode_draft_tokens_total"),
        "vllm:spec_decode_num_accepted_tokens_total": total(
            page, "kvwatch_spec_decode_draft_tokens_total", outcome="accepted"
        ),
        "vllm:time_to_first_token_seconds_count": total(page, "kvwatch_time_to_first_token_seconds_count"),
        "vllm:inter_token_latency_seconds_sum": total(page, "kvwatch_inter_token_latency_seconds_sum"),
        "vllm:e2e_request_latency_seconds_count": total(page, "kvwatch_end_to_end_seconds_count"),
        "vllm:request_queue_time_seconds_sum": total(page, "kvwatch_queue_seconds_sum"),
        "vllm:request_prompt_tokens_sum": total(page, "kvwatch_request_prompt_tokens_sum"),
    }
    for name, native in pairs.items():
        assert value(page, name) == native
        assert native > 0, f"{name} is not moved by the scenario"


def test_finished_requests_are_summed_over_tenants_and_adapters() -> None:
    mirror, clock = after_the_scenario()

    page = page_of(mirror, clock)

    for reason in ("stop", "length", "abort", "error"):
        expected = total(page, "kvwatch_requests_finished_total", reason=reason)
        assert value(page, "vllm:request_success_total", finished_reason=reason) == expected
    assert total(page, "vllm:request_success_total") > 0


def test_usage_counts_used_blocks_only() -> None:
    """kekzl/imp#1120: one used gauge conflated live and cached blocks, and the prefix cache looked like a leak."""
    clock = ManualClock()
    log = EventLog(4096, clock)
    engine = NaiveEngine(log)
    cursor = log.subscribe("test")
    mirror = Mirror(clock, 0)
    mirror.load(engine.snapshot())
    seen_cached = 0
    for number in range(40):
        clock.advance(0.01)
        engine.step([(number % 13, number), (11, number)])
        mirror.apply(cursor.read(4096))
        mirror.publish()

        page = page_of(mirror, clock)

        assert value(page, "vllm:kv_cache_usage_perc") == len(engine.used()) / (engine.num_blocks - 1)
        seen_cached += len(engine.cached())
    assert seen_cached, "the load leaves nothing in the cache"


def test_the_shape_of_the_cache_counts_the_null_block_as_vllm_does() -> None:
    mirror, clock = after_the_scenario()

    assert value(page_of(mirror, clock), "vllm:cache_config_info", block_size="4", num_gpu_blocks="9") == 1


def test_nothing_is_said_of_an_engine_that_was_not_heard_of() -> None:
    clock = ManualClock()

    page = page_of(Mirror(clock), clock)

    gauges = {"vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:cache_config_info"}
    assert gauges.isdisjoint(name for name, _ in page)

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvwatch.bench.exposition import parse_page
from kvwatch.bench.signals import Reading, kind_of, read_signals

GOLDEN = (Path(__file__).parents[2] / "golden" / "exposition.txt").read_text(encoding="utf-8")

VLLM = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.1
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7e9
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 250.0
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
vllm:num_preemptions_total{engine="1",model_name="m"} 1.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="101",kv_cache_size_tokens="1600"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="51"} 1.0
"""
OLD_VLLM = """vllm:gpu_cache_usage_perc{model_name="m"} 0.25
vllm:gpu_prefix_cache_queries_total{model_name="m"} 10
vllm:gpu_prefix_cache_hits_total{model_name="m"} 5
vllm:num_preemptions_total{model_name="m"} 2
vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0
"""
SGLANG = """sglang:num_running_reqs{tp_rank="0"} 4
sglang:num_running_reqs{tp_rank="1"} 4
sglang:num_queue_reqs{tp_rank="0"} 2
sglang:kv_available_tokens{tp_rank="0"} 100
sglang:kv_evictable_tokens{tp_rank="0"} 60
sglang:kv_used_tokens{tp_rank="0"} 340
sglang:max_total_num_tokens{tp_rank="0"} 500
sglang:page_size{tp_rank="0"} 16
sglang:num_retracted_requests_total{tp_rank="0"} 3
sglang:num_retracted_requests_total{tp_rank="1"} 3
sglang:num_retracted_input_tokens_total{tp_rank="0"} 30
sglang:num_retracted_output_tokens_total{tp_rank="0"} 12
sglang:prompt_tokens_total{tp_rank="0"} 1000
sglang:cached_tokens_total{cache_source="device",tp_rank="0"} 300
sglang:cached_tokens_total{cache_source="host",tp_rank="0"} 100
"""
OLD_SGLANG = "sglang:num_used_tokens 340\nsglang:max_total_num_tokens 500\nsglang:token_usage 0.68\n"


def reading(text: str) -> Reading:
    found = read_signals(kind_of(text), text)
    assert found is not None
    return found


def golden(name: str, **labels: str) -> list[float]:
    """Values of the golden page, as Prometheus' own parser reads them."""
    samples = [sample for family in text_string_to_metric_families(GOLDEN) for sample in family.samples]
    return [each.value for each in samples if each.name == f"kvwatch_{name}" and labels.items() <= each.labels.items()]


def test_kvwatchs_own_page_is_understood() -> None:
    assert kind_of(GOLDEN) == "kvwatch"
    found = reading(GOLDEN)
    assert found.num_running == sum(golden("requests", state="running")) > 0
    assert found.num_waiting == sum(golden("requests", state="waiting")) > 0
    assert found.free_blocks == sum(golden("kv_free_blocks", tier="device")) > 0
    assert found.used_blocks == sum(golden("kv_blocks", tier="device", state="used")) > 0
    assert found.window_free_blocks == min(golden("kv_free_blocks_min", tier="device")) > 0
    assert found.window_seconds == 60
    assert found.held_slots == sum(golden("kv_held_slots", tier="device")) > 0
    assert found.filled_slots == sum(golden("kv_filled_slots", tier="device")) > 0
    assert found.token_capacity == min(golden("kv_token_capacity", tier="device")) > 0
    assert found.num_preemptions == sum(golden("preemptions_total")) > 0
    assert found.recomputed_tokens == sum(golden("recomputed_tokens_total")) > 0
    assert found.queried_tokens == sum(golden("prefix_cache_queried_tokens_total")) > 0
    assert found.hit_tokens == sum(golden("prefix_cache_hit_tokens_total")) > 0


def test_a_kvwatch_that_also_shows_vllms_names_is_a_kvwatch() -> None:
    assert kind_of(VLLM + GOLDEN) == "kvwatch"


def test_vllm_with_two_ranks() -> None:
    assert kind_of(VLLM) == "vllm"
    found = reading(VLLM)
    assert (found.num_running, found.num_waiting, found.num_preemptions) == (5, 1, 8)
    assert (found.used_blocks, found.free_blocks) == (50 + 5, 50 + 45)
    assert (found.queried_tokens, found.hit_tokens) == (1000, 250)
    assert found.token_capacity == 800  # of the smaller pool: 50 blocks beside the null block
    assert found.held_slots is found.filled_slots is found.recomputed_tokens is found.window_free_blocks is None


def test_an_older_vllm_under_its_older_names() -> None:
    found = reading(OLD_VLLM)
    assert (found.num_preemptions, found.queried_tokens, found.hit_tokens) == (2, 10, 5)
    assert found.free_blocks is found.token_capacity is found.num_running is None


def test_sglangs_ranks_that_repeat_a_number_count_once() -> None:
    assert kind_of(SGLANG) == "sglang"
    found = reading(SGLANG)
    assert (found.num_running, found.num_waiting, found.num_preemptions) == (4, 2, 3)
    assert (found.free_blocks, found.used_blocks, found.token_capacity) == (10, 22, 500)
    assert (found.recomputed_tokens, found.queried_tokens, found.hit_tokens) == (42, 1000, 400)


def test_an_older_sglang_without_gauges_of_free_tokens() -> None:
    found = reading(OLD_SGLANG)
    assert (found.free_blocks, found.num_preemptions, found.hit_tokens) == (160, None, None)


@pytest.mark.parametrize("text", ["", "<html></html>", "up 1\n", "process_cpu_seconds_total 5\n", "\x00\xff" * 100])
def test_a_page_of_something_else_says_nothing(text: str) -> None:
    assert kind_of(text) == "unknown"
    assert read_signals(kind_of(text), text) is None


def test_a_page_of_a_known_kind_without_known_series_says_nothing() -> None:
    assert read_signals("vllm", "vllm:something_new 5\n") is None


def test_the_quick_parser_agrees_with_prometheus_own() -> None:
    families = list(text_string_to_metric_families(GOLDEN))
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for each in families
        for sample in each.samples
    }

    page = parse_page(GOLDEN, {name for name, _ in samples})

    found = {(name, tuple(sorted(one.labels.items()))): one.value for name, many in page.items() for one in many}
    assert found == samples


def test_escapes_and_nonsense_lines() -> None:
    text = 'a{x="q\\"b\\\\s\\nn,}{"} 1\na{x="no value"}\na{x="y"} word\na 2 1700000000000\nb 3\na{'
    assert [(each.labels, each.value) for each in parse_page(text, {"a"})["a"]] == [({"x": 'q"b\\s\nn,}{'}, 1), ({}, 2)]

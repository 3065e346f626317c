"""The metrics of a vLLM, in the names of its versions from 0.8 on."""

from kvwatch.sources.scrape.rules import Dialect, FromLabel, Rule
from kvwatch.telemetry import metrics as m

_FINISHED = FromLabel(
    "finished_reason", {"stop": "stop", "length": "length", "abort": "abort", "error": "error"}, "other"
)
_CONFIG = "vllm:cache_config_info"

VLLM = Dialect(
    prefix="vllm:",
    rank_label="engine",
    only={},
    rules=(
        Rule(m.REQUESTS, ("vllm:num_requests_running",), ("running",)),
        Rule(m.REQUESTS, ("vllm:num_requests_waiting",), ("waiting",)),
        Rule(m.REQUESTS, ("vllm:num_requests_swapped",), ("swapped",)),
        Rule(
            m.KV_USAGE_RATIO, ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"), ("device",),
            note="vLLM's name says percent, its value is a ratio",
        ),
        Rule(
            m.KV_BLOCK_CAPACITY, (_CONFIG,), ("device",), "derived", "num_gpu_blocks without the null block",
            from_label="num_gpu_blocks", minus=1,
        ),
        Rule(m.KV_BLOCK_SIZE_TOKENS, (_CONFIG,), from_label="block_size"),
        Rule(
            m.PREFIX_CACHE_QUERIED_TOKENS,
            ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
            note="versions before 0.11 count resumed requests again",
        ),
        Rule(
            m.PREFIX_CACHE_HIT_TOKENS, ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"), ("device",)
        ),
        Rule(
            m.PREFIX_CACHE_HIT_TOKENS, ("vllm:external_prefix_cache_hits_total",), ("external",), "derived",
            "hits of all tiers behind the device together",
        ),
        Rule(
            m.PREEMPTIONS, ("vllm:num_preemptions_total",), ("recompute", "blocks"), "derived",
            "vLLM tells neither mode nor reason; it knows only this one",
        ),
        Rule(m.PROMPT_TOKENS, ("vllm:prompt_tokens_total",), fidelity="derived", note="counted at the first token"),
        Rule(m.GENERATED_TOKENS, ("vllm:generation_tokens_total",)),
        Rule(
            m.REQUESTS_FINISHED, ("vllm:request_success_total",), (_FINISHED, "", ""), "derived",
            "counts sequences, n for each request; lora and tenant are not told",
        ),
        Rule(
            m.REQUESTS_REJECTED, ("vllm:admission_rejections_total",), ("queue_full",), "derived",
            "of both limits of its queue",
        ),
        Rule(m.TIME_TO_FIRST_TOKEN, ("vllm:time_to_first_token_seconds",)),
        Rule(
            m.INTER_TOKEN_LATENCY, ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
        ),
        Rule(m.END_TO_END, ("vllm:e2e_request_latency_seconds",)),
        Rule(m.QUEUE_SECONDS, ("vllm:request_queue_time_seconds",), fidelity="derived", note="observed at the end"),
        Rule(m.PREFILL_SECONDS, ("vllm:request_prefill_time_seconds",)),
        Rule(m.DECODE_SECONDS, ("vllm:request_decode_time_seconds",)),
        Rule(m.REQUEST_PROMPT_TOKENS, ("vllm:request_prompt_tokens",)),
        Rule(m.REQUEST_GENERATED_TOKENS, ("vllm:request_generation_tokens",)),
        Rule(
            m.KV_BLOCK_IDLE, ("vllm:kv_block_idle_before_evict_seconds",), (), "derived",
            "of the blocks that --kv-cache-metrics-sample chooses, blocks without content included",
        ),
        Rule(
            m.KV_BLOCK_REUSE_GAP, ("vllm:kv_block_reuse_gap_seconds",), (), "derived",
            "of the blocks that --kv-cache-metrics-sample chooses",
        ),
    ),
)  # fmt: skip
"""What vLLM does not tell: the split of free blocks into cached and empty, filled slots, sharing, who was preempted."""

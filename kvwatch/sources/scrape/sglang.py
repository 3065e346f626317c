"""The metrics of an SGLang. Every tensor-parallel rank reports the same counts: only the first is read."""

from kvwatch.sources.scrape.rules import Dialect, FromLabel, Rule
from kvwatch.telemetry import metrics as m

_PAGE = "sglang:page_size"
_USED, _EVICTABLE, _AVAILABLE = "sglang:kv_used_tokens", "sglang:kv_evictable_tokens", "sglang:kv_available_tokens"
_SOURCES = {"device": "device", "host": "host", "storage": "disk"}
_SOURCE = FromLabel("cache_source", _SOURCES | {"": "device", "total": "device"}, "external")
"""Where SGLang does not say the source, there is only one."""
_PAGES = "tokens divided by the page size"

SGLANG = Dialect(
    prefix="sglang:",
    rank_label="dp_rank",
    only={"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"},
    rules=(
        Rule(m.REQUESTS, ("sglang:num_running_reqs",), ("running",), total_where_empty="priority"),
        Rule(m.REQUESTS, ("sglang:num_queue_reqs",), ("waiting",), total_where_empty="priority"),
        Rule(m.KV_BLOCKS, (_USED,), ("device", "0", "used"), "derived", _PAGES, per=_PAGE),
        Rule(m.KV_BLOCKS, (_EVICTABLE,), ("device", "0", "cached"), "derived", _PAGES, per=_PAGE),
        Rule(m.KV_BLOCKS, (_AVAILABLE,), ("device", "", "empty"), "derived", _PAGES, per=_PAGE),
        Rule(
            m.KV_FREE_BLOCKS, (_EVICTABLE,), ("device",), "derived", "evictable and available " + _PAGES,
            plus=(_AVAILABLE,), per=_PAGE,
        ),
        Rule(
            m.KV_BLOCK_CAPACITY, ("sglang:max_total_num_tokens",), ("device",), "derived", _PAGES, per=_PAGE
        ),
        Rule(m.KV_TOKEN_CAPACITY, ("sglang:max_total_num_tokens",), ("device", "0")),
        Rule(m.KV_USAGE_RATIO, ("sglang:full_token_usage", "sglang:token_usage"), ("device",)),
        Rule(m.KV_BLOCK_SIZE_TOKENS, (_PAGE,)),
        Rule(m.PREFIX_CACHE_HIT_TOKENS, ("sglang:cached_tokens_total",), (_SOURCE,)),
        Rule(
            m.PREEMPTIONS, ("sglang:num_retracted_requests_total",), ("recompute", "blocks"), "derived",
            "requests that SGLang calls retracted",
        ),
        Rule(m.PROMPT_TOKENS, ("sglang:prompt_tokens_total",)),
        Rule(m.GENERATED_TOKENS, ("sglang:generation_tokens_total",)),
        Rule(m.TIME_TO_FIRST_TOKEN, ("sglang:time_to_first_token_seconds",)),
        Rule(m.INTER_TOKEN_LATENCY, ("sglang:inter_token_latency_seconds",)),
        Rule(m.REQUEST_PROMPT_TOKENS, ("sglang:prompt_tokens_histogram",)),
        Rule(m.REQUEST_GENERATED_TOKENS, ("sglang:generation_tokens_histogram",)),
        Rule(m.END_TO_END, ("sglang:e2e_request_latency_seconds",)),
        Rule(m.QUEUE_SECONDS, ("sglang:queue_time_seconds",)),
    ),
)  # fmt: skip
"""What SGLang does not tell: queried tokens of the prefix cache as a counter, filled slots, sharing."""

"""What the /metrics page of a kvwatch, vLLM or SGLang says about its KV cache, in one form.

What a server does not export is None here, never 0. Names of several versions are tried in turn.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from kvwatch.bench.exposition import Page, Series, parse_page
from kvwatch.derive.metrics import PREFIX, full_name
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.schema import Metric

Kind = Literal["kvwatch", "vllm", "sglang", "unknown"]

_PREFIXES: dict[Kind, str] = {"kvwatch": PREFIX, "vllm": "vllm:", "sglang": "sglang:"}
_DEVICE = {"tier": "device"}
_REPEATED_BY = frozenset({"tp_rank", "pp_rank", "moe_ep_rank", "pid"})
"""Labels of ranks that each report the same number: one of them counts."""


class Reading(msgspec.Struct, kw_only=True):
    """One look at a page. Counters are totals since the server began."""

    seconds: float = 0.0
    """When it was taken, since the run began."""
    num_running: float | None = None
    num_waiting: float | None = None
    free_blocks: float | None = None
    window_free_blocks: float | None = None
    """Fewest free blocks within the server's window; only kvwatch tells."""
    window_seconds: float | None = None
    used_blocks: float | None = None
    held_slots: float | None = None
    filled_slots: float | None = None
    token_capacity: float | None = None
    num_preemptions: float | None = None
    recomputed_tokens: float | None = None
    queried_tokens: float | None = None
    hit_tokens: float | None = None


def kind_of(page: str) -> Kind:
    """Return whose page it is. kvwatch comes first: it can show vLLM's names too."""
    lines = page.splitlines()
    for kind, prefix in _PREFIXES.items():
        if any(line.startswith(prefix) for line in lines):
            return kind
    return "unknown"


def read_signals(kind: Kind, text: str) -> Reading | None:
    """Return what a page says, or None if it says nothing that is known."""
    if kind == "unknown":
        return None
    wanted, read = _READERS[kind]
    page = parse_page(text, wanted)
    return read(page) if page else None


# ---------------------------------------------------------------- kvwatch

_OURS = {
    metric: full_name(metric)
    for metric in (
        m.REQUESTS, m.KV_FREE_BLOCKS, m.KV_FREE_BLOCKS_MIN, m.KV_BLOCKS, m.KV_HELD_SLOTS, m.KV_FILLED_SLOTS,
        m.KV_TOKEN_CAPACITY, m.PREEMPTIONS, m.RECOMPUTED_TOKENS, m.PREFIX_CACHE_QUERIED_TOKENS,
        m.PREFIX_CACHE_HIT_TOKENS,
    )
}  # fmt: skip


def _kvwatch(page: Page) -> Reading:
    def total(metric: Metric, **labels: str) -> float | None:
        return _sum(page, (_OURS[metric],), labels)

    lowest = [each for each in page.get(_OURS[m.KV_FREE_BLOCKS_MIN], ()) if each.labels.get("tier") == "device"]
    window = lowest[0].labels.get("window", "").removesuffix("s") if lowest else ""
    return Reading(
        num_running=total(m.REQUESTS, state="running"),
        num_waiting=total(m.REQUESTS, state="waiting"),
        free_blocks=total(m.KV_FREE_BLOCKS, **_DEVICE),
        window_free_blocks=min((each.value for each in lowest), default=None),
        window_seconds=float(window) if window.isdigit() else None,
        used_blocks=total(m.KV_BLOCKS, state="used", **_DEVICE),
        held_slots=total(m.KV_HELD_SLOTS, **_DEVICE),
        filled_slots=total(m.KV_FILLED_SLOTS, **_DEVICE),
        token_capacity=min((s.value for s in _matching(page, _OURS[m.KV_TOKEN_CAPACITY], _DEVICE)), default=None),
        num_preemptions=total(m.PREEMPTIONS),
        recomputed_tokens=total(m.RECOMPUTED_TOKENS),
        queried_tokens=total(m.PREFIX_CACHE_QUERIED_TOKENS),
        hit_tokens=total(m.PREFIX_CACHE_HIT_TOKENS),
    )


# ---------------------------------------------------------------- vLLM

_VLLM_RUNNING = ("vllm:num_requests_running",)
_VLLM_WAITING = ("vllm:num_requests_waiting",)
_VLLM_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # 0.9 and before: the second
_VLLM_CONFIG = ("vllm:cache_config_info",)
_VLLM_PREEMPTIONS = ("vllm:num_preemptions_total", "vllm:num_preemptions")
_VLLM_QUERIED = (
    "vllm:prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_queries",
)
_VLLM_HIT = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits")


def _vllm(page: Page) -> Reading:
    reading = Reading(
        num_running=_sum(page, _VLLM_RUNNING),
        num_waiting=_sum(page, _VLLM_WAITING),
        num_preemptions=_sum(page, _VLLM_PREEMPTIONS),
        queried_tokens=_sum(page, _VLLM_QUERIED),
        hit_tokens=_sum(page, _VLLM_HIT),
    )
    capacity = {_engine(each): _vllm_capacity(each) for each in page.get(_VLLM_CONFIG[0], ())}
    usage = next((page[name] for name in _VLLM_USAGE if name in page), [])
    pools = [(capacity.get(_engine(each)), each.value) for each in usage]
    if pools and all(blocks is not None for blocks, _ in pools):
        # Cached blocks count as free there, as they do here.
        used = [round(ratio * blocks) for blocks, ratio in pools if blocks is not None]
        reading.used_blocks = sum(used)
        reading.free_blocks = sum(blocks for blocks, _ in pools if blocks is not None) - sum(used)
    tokens = [size for each in page.get(_VLLM_CONFIG[0], ()) for size in _vllm_tokens(each)]
    reading.token_capacity = min(tokens, default=None)
    return reading


def _engine(series: Series) -> str:
    return series.labels.get("engine", "")


def _vllm_capacity(config: Series) -> float | None:
    """Return the blocks of a pool without its null block."""
    blocks = _number(config.labels.get("num_gpu_blocks"))
    return None if blocks is None else blocks - 1


def _vllm_tokens(config: Series) -> list[float]:
    """Return what a pool says of the tokens that fit it; its own number, in newer versions, counts the null block."""
    blocks, size = _vllm_capacity(config), _number(config.labels.get("block_size"))
    own = _number(config.labels.get("kv_cache_size_tokens"))
    fitting = None if blocks is None or size is None else blocks * size
    return [each for each in (own, fitting) if each is not None]


# ---------------------------------------------------------------- SGLang

_SGLANG_RUNNING = ("sglang:num_running_reqs",)
_SGLANG_WAITING = ("sglang:num_queue_reqs",)
_SGLANG_AVAILABLE = ("sglang:kv_available_tokens",)
_SGLANG_EVICTABLE = ("sglang:kv_evictable_tokens",)
_SGLANG_USED = ("sglang:kv_used_tokens", "sglang:num_used_tokens")
_SGLANG_MOST = ("sglang:max_total_num_tokens",)
_SGLANG_PAGE = ("sglang:page_size",)
_SGLANG_RETRACTED = ("sglang:num_retracted_requests_total",)
_SGLANG_RETRACTED_INPUT = ("sglang:num_retracted_input_tokens_total",)
_SGLANG_RETRACTED_OUTPUT = ("sglang:num_retracted_output_tokens_total",)
_SGLANG_PROMPT = ("sglang:prompt_tokens_total",)
_SGLANG_CACHED = ("sglang:cached_tokens_total",)


def _sglang(page: Page) -> Reading:
    size = _sum(page, _SGLANG_PAGE) or 1.0  # its default page is one token
    used, most = _sum(page, _SGLANG_USED), _sum(page, _SGLANG_MOST)
    available, evictable = _sum(page, _SGLANG_AVAILABLE), _sum(page, _SGLANG_EVICTABLE)
    free = available + evictable if available is not None and evictable is not None else None
    if free is None and used is not None and most is not None:
        free = most - used
    retracted = [_sum(page, _SGLANG_RETRACTED_INPUT), _sum(page, _SGLANG_RETRACTED_OUTPUT)]
    known = [each for each in retracted if each is not None]
    return Reading(
        num_running=_sum(page, _SGLANG_RUNNING),
        num_waiting=_sum(page, _SGLANG_WAITING),
        free_blocks=None if free is None else math.floor(free / size),
        used_blocks=None if used is None else math.ceil(used / size),
        token_capacity=most,
        num_preemptions=_sum(page, _SGLANG_RETRACTED),
        recomputed_tokens=sum(known) if known else None,
        queried_tokens=_sum(page, _SGLANG_PROMPT),
        hit_tokens=_sum(page, _SGLANG_CACHED),
    )


# ---------------------------------------------------------------- series


def _matching(page: Page, name: str, labels: Mapping[str, str]) -> list[Series]:
    found = page.get(name, ())
    return [each for each in found if all(each.labels.get(label) == value for label, value in labels.items())]


def _sum(page: Page, names: Iterable[str], labels: Mapping[str, str] | None = None) -> float | None:
    """Return the sum over the series of the first name that the page has; ranks that repeat a number count once."""
    found = next((_matching(page, name, labels or {}) for name in names if name in page), [])
    by_rank: dict[tuple[tuple[str, str], ...], float] = {}
    for each in found:
        key = tuple(sorted((label, value) for label, value in each.labels.items() if label not in _REPEATED_BY))
        by_rank[key] = max(each.value, by_rank.get(key, each.value))
    return sum(by_rank.values()) if by_rank else None


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _names(*groups: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name for group in groups for name in group)


_READERS = {
    "kvwatch": (frozenset(_OURS.values()), _kvwatch),
    "vllm": (
        _names(_VLLM_RUNNING, _VLLM_WAITING, _VLLM_USAGE, _VLLM_CONFIG, _VLLM_PREEMPTIONS, _VLLM_QUERIED, _VLLM_HIT),
        _vllm,
    ),
    "sglang": (
        _names(
            _SGLANG_RUNNING, _SGLANG_WAITING, _SGLANG_AVAILABLE, _SGLANG_EVICTABLE, _SGLANG_USED, _SGLANG_MOST,
            _SGLANG_PAGE, _SGLANG_RETRACTED, _SGLANG_RETRACTED_INPUT, _SGLANG_RETRACTED_OUTPUT, _SGLANG_PROMPT,
            _SGLANG_CACHED,
        ),
        _sglang,
    ),
}  # fmt: skip

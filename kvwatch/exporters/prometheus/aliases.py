"""The same numbers under vLLM's names, for dashboards and gateways that know only those.

Only what means the same is here. `vllm:iteration_tokens_total`, for instance, is left out: it counts a prompt when its
last chunk is done, kvwatch's `step_tokens` what each step computes. Off by default, since whoever sums over both names
counts twice; and never in a sidecar, beside a vLLM that has the true ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvwatch.exporters.identity import EngineIdentity
from kvwatch.exporters.prometheus.gateway import TIER
from kvwatch.exporters.prometheus.labels import printable
from kvwatch.ledger.view import HistogramSample, Sample, View
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.schema import Metric, MetricKind

PREFIX = "vllm:"
LABELS = ("model_name", "engine")
"""Labels of every series; `engine` is the data-parallel rank."""


@dataclass(frozen=True, slots=True)
class Alias:
    """One metric of vLLM's and the one that it is read from."""

    name: str
    source: Metric
    matching: Mapping[str, str | tuple[str, ...]] | None = None
    """Only series with these labels, each with that value or one of those; they are summed over all that are not
    renamed."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Labels that are kept, as (kvwatch's name, vLLM's name)."""


ALIASES = (
    Alias("num_requests_running", m.REQUESTS, {"state": "running"}),
    Alias("num_requests_waiting", m.REQUESTS, {"state": ("waiting", "swapped")}),
    Alias("kv_cache_usage_perc", m.KV_USAGE_RATIO, {"tier": TIER}),
    Alias("num_preemptions", m.PREEMPTIONS),
    Alias("prefix_cache_queries", m.PREFIX_CACHE_QUERIED_TOKENS),
    Alias("prefix_cache_hits", m.PREFIX_CACHE_HIT_TOKENS, {"tier": TIER}),
    Alias("prompt_tokens", m.PROMPT_TOKENS),
    Alias("generation_tokens", m.GENERATED_TOKENS),
    Alias("spec_decode_num_drafts", m.SPEC_DECODE_DRAFTS),
    Alias("spec_decode_num_draft_tokens", m.SPEC_DECODE_DRAFT_TOKENS),
    Alias("spec_decode_num_accepted_tokens", m.SPEC_DECODE_DRAFT_TOKENS, {"outcome": "accepted"}),
    Alias("request_success", m.REQUESTS_FINISHED, None, (("reason", "finished_reason"),)),
    Alias("time_to_first_token_seconds", m.TIME_TO_FIRST_TOKEN),
    Alias("inter_token_latency_seconds", m.INTER_TOKEN_LATENCY),
    Alias("e2e_request_latency_seconds", m.END_TO_END),
    Alias("request_queue_time_seconds", m.QUEUE_SECONDS),
    Alias("request_prefill_time_seconds", m.PREFILL_SECONDS),
    Alias("request_decode_time_seconds", m.DECODE_SECONDS),
    Alias("request_prompt_tokens", m.REQUEST_PROMPT_TOKENS),
    Alias("request_generation_tokens", m.REQUEST_GENERATED_TOKENS),
)


@dataclass(frozen=True, slots=True)
class AliasFamily:
    """One metric of vLLM's with its series, ready to be rendered."""

    name: str
    kind: MetricKind
    brief: str
    labels: tuple[str, ...]
    values: Sequence[tuple[tuple[str, ...], float]]
    """Series of a counter or gauge: label values and value."""
    histogram: HistogramSample | None = None
    """The one series of a histogram."""


def alias_families(view: View, identity: EngineIdentity) -> Iterator[AliasFamily]:
    """Yield vLLM's metrics as far as a view gives them. Label values are in the order of `labels`."""
    common = (printable(identity.model_name), str(identity.dp_rank))
    samples: dict[Metric, list[Sample]] = {}
    for sample in (*view.gauges, *view.counters):
        samples.setdefault(sample.metric, []).append(sample)
    histograms = {sample.metric: sample for sample in view.histograms if not sample.labels}
    for alias in ALIASES:
        name, source = PREFIX + alias.name, alias.source
        labels = (*LABELS, *(new for _, new in alias.renamed))
        if source.kind is MetricKind.HISTOGRAM:
            histogram = histograms.get(source)
            if histogram is not None:
                yield AliasFamily(name, source.kind, source.brief, labels, [(common, 0)], histogram)
            continue
        values = _summed(alias, samples.get(source, []))
        if values:
            yield AliasFamily(
                name, source.kind, source.brief, labels, [((*common, *key), value) for key, value in values.items()]
            )
    yield from _cache_config(view, common)


def _summed(alias: Alias, samples: Sequence[Sample]) -> dict[tuple[str, ...], float]:
    totals: dict[tuple[str, ...], float] = {}
    matching = alias.matching or {}
    for sample in samples:
        labels = dict(zip(alias.source.labels, sample.labels, strict=True))
        if all(labels[name] in ((wanted,) if isinstance(wanted, str) else wanted) for name, wanted in matching.items()):
            key = tuple(printable(labels[old]) for old, _ in alias.renamed)
            totals[key] = totals.get(key, 0) + sample.value
    return totals


def _cache_config(view: View, common: tuple[str, str]) -> Iterator[AliasFamily]:
    """Yield vLLM's only word about the pool's size; it counts the null block."""
    block_size = view.value(m.KV_BLOCK_SIZE_TOKENS)
    capacity = view.value(m.KV_BLOCK_CAPACITY, TIER)
    if block_size is None or capacity is None:
        return
    labels = (*LABELS, "block_size", "num_gpu_blocks")
    values = (*common, f"{block_size:.0f}", f"{capacity + 1:.0f}")
    brief = "Always 1; the shape of the cache as labels, the null block counted."
    yield AliasFamily(f"{PREFIX}cache_config_info", MetricKind.GAUGE, brief, labels, [(values, 1)])

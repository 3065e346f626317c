"""What each kind of source can tell of each metric; docs/sources.md is derived from this.

What a scraper reads of an engine's own page is declared by its rules; what follows from events is declared here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvwatch.sources.scrape.rules import Rule
from kvwatch.sources.scrape.sglang import SGLANG
from kvwatch.sources.scrape.vllm import VLLM
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.metrics import CATALOGUE
from kvwatch.telemetry.schema import Metric

SOURCES = ("kvwatch", "vLLM", "SGLang")
NOT_AVAILABLE = "not available"
ITS_OWN = "the sidecar's own"


@dataclass(frozen=True, slots=True)
class Knowledge:
    """One metric, and what each source of `SOURCES` can tell of it."""

    metric: Metric
    cells: tuple[str, str, str]
    """`exact`, `derived (how)`, `the sidecar's own` or `not available`."""


_EVENTS = "from its KV events"
_FROM_KV_EVENTS: dict[Metric, str] = {
    m.KV_INDEXED_BLOCKS: f"exact, {_EVENTS}; absent while `source_complete` is 0",
    m.KV_BLOCK_STORES: f"exact, {_EVENTS}; a further copy of a resident hash is not counted",
    m.KV_BLOCK_EVICTIONS: f"derived ({_EVENTS}: removals of a last copy; why is not told, so reason is `removed`)",
    m.KV_BLOCK_LIFETIME: f"derived ({_EVENTS}: since the hash became resident, not since the block was allocated)",
    m.KV_PREFIX_ROOTS: f"derived ({_EVENTS}: chains of parents)",
    m.KV_PREFIX_BRANCHES: f"derived ({_EVENTS}: chains of parents)",
    m.KV_PREFIX_FAN_OUT_MAX: f"derived ({_EVENTS}: chains of parents)",
    m.KV_PREFIX_DEPTH_MAX: f"derived ({_EVENTS}: chains of parents)",
    m.KV_PREMATURE_EVICTION_AWAY: f"derived ({_EVENTS}: removals that are still remembered)",
    m.KV_PREMATURE_EVICTION_EXTRA: f"derived ({_EVENTS}: removals that are still remembered)",
    m.SOURCE_LAG: "derived (difference of two clocks)",
}
_OF_EVERY_SOURCE = {m.SOURCE_UP, m.SOURCE_COMPLETE, m.SOURCE_GAPS, m.SOURCE_RESETS, m.SOURCE_DECODE_ERRORS}
_OF_EVERY_SOURCE |= {m.SOURCE_LAST_EVENT_TIMESTAMP}
_OF_FOREIGN_SOURCES = {m.SOURCE_DRIFT, m.SOURCE_REPLAYS}
_OF_THE_SIDECAR = {
    m.BUILD_INFO, m.TELEMETRY_EVENTS, m.TELEMETRY_GAPS, m.TELEMETRY_DROPPED, m.TELEMETRY_LAG, m.TELEMETRY_ERRORS,
    m.TELEMETRY_CPU, m.LEDGER_UPDATE_TIMESTAMP, m.ADMIN_AUTH_FAILURES,
}  # fmt: skip
"""What tells of the sidecar itself, whatever it reads."""

_NOT_OF_KVWATCH: dict[Metric, str] = {
    m.LEDGER_VIOLATIONS: f"{ITS_OWN}, whose ledger follows the same events",
    m.KV_INDEXED_BLOCKS: f"{NOT_AVAILABLE} (see `kv_blocks`, which says more)",
    **dict.fromkeys(
        (m.KV_PREFIX_ROOTS, m.KV_PREFIX_BRANCHES, m.KV_PREFIX_FAN_OUT_MAX, m.KV_PREFIX_DEPTH_MAX),
        "derived (chains of parents; once the cache was seen empty)",
    ),
    **dict.fromkeys(
        (m.KV_PREMATURE_EVICTION_AWAY, m.KV_PREMATURE_EVICTION_EXTRA),
        "derived (evictions that are still remembered)",
    ),
    m.SOURCE_LAG: "derived (difference of two clocks)",
}
"""What the engine itself does not show."""


def knowledge() -> list[Knowledge]:
    """Return what each source can tell of every metric of the catalogue, in its order."""
    return [
        Knowledge(metric, (_of_kvwatch(metric), _of_foreign(metric, VLLM.rules), _of_foreign(metric, SGLANG.rules)))
        for metric in CATALOGUE
    ]


def _of_kvwatch(metric: Metric) -> str:
    if metric in _OF_FOREIGN_SOURCES:
        return NOT_AVAILABLE
    if metric in _OF_THE_SIDECAR:
        return ITS_OWN
    return _NOT_OF_KVWATCH.get(metric, "exact")


def _of_foreign(metric: Metric, rules: Iterable[Rule]) -> str:
    if metric in _OF_THE_SIDECAR:
        return ITS_OWN
    if metric in _OF_EVERY_SOURCE | _OF_FOREIGN_SOURCES:
        return "exact"
    told = [each for each in [_FROM_KV_EVENTS.get(metric)] if each is not None]
    scraped = [rule for rule in rules if rule.metric == metric]
    derived = [rule for rule in scraped if rule.fidelity == "derived"]
    if scraped and len(derived) < len(scraped):
        exact = dict.fromkeys(rule.note for rule in scraped if rule.fidelity != "derived" and rule.note)
        told.append("exact" + "".join(f"; {note}" for note in exact))
    told += [f"derived ({note})" for note in dict.fromkeys(rule.note for rule in derived)]
    return "; ".join(told) or NOT_AVAILABLE

"""Rules about the prefix cache and the size of blocks."""

from kvwatch.derive.metrics import full_name
from kvwatch.insight.diagnosis import thresholds as t
from kvwatch.insight.diagnosis.finding import Evidence, Verdict
from kvwatch.insight.diagnosis.pressure import DEVICE
from kvwatch.insight.diagnosis.reading import Observation
from kvwatch.telemetry import metrics as m


def block_size_too_large(o: Observation) -> Verdict | None:
    """Prompts fill so few blocks that their tails, which can never hit, and half-empty blocks dominate."""
    size = o.now(m.KV_BLOCK_SIZE_TOKENS)
    evidence = [each for each in (_lost_tails(o), _waste(o)) if each is not None] if size > 1 else []
    if not evidence:
        return None
    queries = _num_prompts(o)
    mean = o.growth(m.PROMPT_TOKENS) / queries if queries else 0.0
    return Verdict(
        f"Blocks of {size:.0f} tokens are too large for these prompts: most of what they could share, or hold, is lost"
        " to partly filled blocks.",
        "Choose a smaller --block-size, such as half of it, and look again.",
        (
            *evidence,
            Evidence("block size", size, "tokens", (full_name(m.KV_BLOCK_SIZE_TOKENS),)),
            Evidence("mean prompt", mean, "tokens", (full_name(m.PROMPT_TOKENS), full_name(m.QUEUE_SECONDS))),
        ),
    )


def evicted_before_reuse(o: Observation) -> Verdict | None:
    """Blocks leave the cache for want of room and are asked for again."""
    told = _regretted(o) if o.knows(m.PREFIX_CACHE_REGRETTED_TOKENS) else _came_back(o)
    if told is None:
        return None
    return Verdict(
        "The prefix cache evicts blocks before they are asked for again: prompts are computed that were known a moment"
        " ago.",
        "Give the pool more memory, put a tier behind it (--host-memory, --disk-dir), or send requests with the same"
        " prefix to the same replica.",
        told,
    )


def _num_prompts(o: Observation) -> int:
    """Return how many requests were admitted for the first time."""
    return o.spread(m.QUEUE_SECONDS).count


def _lost_tails(o: Observation) -> Evidence | None:
    queried = o.growth(m.PREFIX_CACHE_QUERIED_TOKENS)
    lost = o.growth(m.PREFIX_CACHE_GRANULARITY_LOST_TOKENS)
    if not queried or lost / queried < t.GRANULARITY_LOST_RATIO or _num_prompts(o) < t.MIN_PROMPTS:
        return None
    names = (full_name(m.PREFIX_CACHE_GRANULARITY_LOST_TOKENS), full_name(m.PREFIX_CACHE_QUERIED_TOKENS))
    return Evidence("prompt tokens in no block that can hit", lost / queried, "ratio", names)


def _waste(o: Observation) -> Evidence | None:
    """Return the waste if short requests cause it: blocks that are about to be filled hold nothing either."""
    lengths = o.spread(m.REQUEST_PROMPT_TOKENS), o.spread(m.REQUEST_GENERATED_TOKENS)
    is_short = sum(each.mean for each in lengths) < t.SHORT_BLOCKS * o.now(m.KV_BLOCK_SIZE_TOKENS)
    if not is_short or lengths[0].count < t.MIN_PROMPTS:
        return None
    held, filled = o.least(m.KV_HELD_SLOTS, tier=DEVICE), o.most(m.KV_FILLED_SLOTS, tier=DEVICE)
    waste = 1 - filled / held if held else 0.0  # of the sums over groups: what was wasted at both looks at least
    if waste < t.WASTE_RATIO or o.least(m.KV_USAGE_RATIO, tier=DEVICE) < t.WASTE_USAGE_RATIO:
        return None
    names = (full_name(m.KV_FILLED_SLOTS), full_name(m.KV_HELD_SLOTS))
    return Evidence("slots of used blocks without a token", waste, "ratio", names)


def _regretted(o: Observation) -> tuple[Evidence, ...] | None:
    queried, hit = o.growth(m.PREFIX_CACHE_QUERIED_TOKENS), o.growth(m.PREFIX_CACHE_HIT_TOKENS)
    regretted = o.growth(m.PREFIX_CACHE_REGRETTED_TOKENS)
    floor = max(t.REGRETTED_QUERIED_RATIO * queried, t.REGRETTED_HIT_RATIO * (hit + regretted))
    if not regretted or regretted < floor or _num_prompts(o) < t.MIN_PROMPTS:
        return None
    names = (full_name(m.PREFIX_CACHE_REGRETTED_TOKENS), full_name(m.PREFIX_CACHE_QUERIED_TOKENS))
    evicted = o.growth(m.KV_BLOCK_EVICTIONS, tier=DEVICE, reason="pressure")
    return (
        Evidence("prompt tokens that had been evicted", regretted / queried, "ratio", names),
        Evidence("prompt tokens found", hit / queried, "ratio", (full_name(m.PREFIX_CACHE_HIT_TOKENS), names[1])),
        Evidence("blocks evicted for want of room", evicted, "blocks", (full_name(m.KV_BLOCK_EVICTIONS),)),
    )


def _came_back(o: Observation) -> tuple[Evidence, ...] | None:
    removed, back = o.growth(m.KV_BLOCK_EVICTIONS), o.spread(m.KV_PREMATURE_EVICTION_AWAY)
    if not back.count or back.count < t.PREMATURE_RATIO * removed:
        return None
    names = (full_name(m.KV_PREMATURE_EVICTION_AWAY), full_name(m.KV_BLOCK_EVICTIONS))
    return (
        Evidence("removed blocks that came back", back.count, "blocks", names),
        Evidence("blocks removed", removed, "blocks", names[1:]),
        Evidence("mean time away", back.mean, "seconds", names[:1]),
    )

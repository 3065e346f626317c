"""Rules about requests that lose their blocks: the pool is too small, or the watermark too low. Never both at once."""

from kvwatch.derive.metrics import full_name
from kvwatch.insight.diagnosis import thresholds as t
from kvwatch.insight.diagnosis.finding import Evidence, Verdict, many
from kvwatch.insight.diagnosis.reading import Observation
from kvwatch.telemetry import metrics as m

DEVICE = "device"


def thrashes(o: Observation) -> bool:
    """Return whether requests are preempted for want of blocks so often that it is no accident."""
    preemptions = o.growth(m.PREEMPTIONS, reason="blocks")
    admissions = o.spread(m.QUEUE_SECONDS).count
    return preemptions >= max(t.MIN_PREEMPTIONS, t.PREEMPTIONS_PER_ADMISSION * admissions)


def pool_too_small(o: Observation) -> Verdict | None:
    """Preemptions, though the watermark covers what running requests need next or cannot do so in this pool."""
    if not thrashes(o) or (o.knows(m.KV_WATERMARK_BLOCKS) and _wanted_watermark(o) is not None):
        return None
    return Verdict(
        f"The pool is too small and thrashing: {many(o.growth(m.PREEMPTIONS, reason='blocks'), 'preemption')} in"
        f" {o.seconds:.0f} s threw computed K/V away.",
        "Enlarge the pool (--num-blocks, --kv-memory, a smaller --kv-dtype), lower --max-num-seqs to what fits, or"
        " add a replica.",
        (*_preemption_evidence(o), _capacity(o)),
    )


def watermark_too_low(o: Observation) -> Verdict | None:
    """Preemptions, and fewer blocks are held back at admission than running requests take next."""
    if not thrashes(o):
        return None
    wanted = _wanted_watermark(o)
    if wanted is None:
        return None
    watermark = o.now(m.KV_WATERMARK_BLOCKS, tier=DEVICE)
    return Verdict(
        f"The watermark is too low: it holds {watermark:.0f} blocks back for {wanted} running sequences, which preempt"
        " each other when each takes its next block.",
        f"Raise the watermark to about {wanted} blocks (--watermark); if requests are still preempted, the pool is too"
        " small.",
        (
            *_preemption_evidence(o),
            Evidence("watermark", watermark, "blocks", (full_name(m.KV_WATERMARK_BLOCKS),)),
            Evidence("sequences in a step", o.spread(m.BATCH_SIZE).mean, "count", (full_name(m.BATCH_SIZE),)),
        ),
    )


def _wanted_watermark(o: Observation) -> int | None:
    """Return the blocks to be held back, one for each running sequence; none if that is so, or the pool too small."""
    sequences = round(o.spread(m.BATCH_SIZE).mean)
    watermark, capacity = o.now(m.KV_WATERMARK_BLOCKS, tier=DEVICE), o.now(m.KV_BLOCK_CAPACITY, tier=DEVICE)
    is_covered, is_possible = watermark >= sequences, sequences <= t.MAX_WATERMARK_RATIO * capacity
    return sequences if is_possible and not is_covered else None


def _preemption_evidence(o: Observation) -> tuple[Evidence, ...]:
    found = [
        Evidence(
            "preemptions for want of blocks", o.growth(m.PREEMPTIONS, reason="blocks"), "count",
            (full_name(m.PREEMPTIONS),),
        ),
        Evidence("requests admitted", o.spread(m.QUEUE_SECONDS).count, "requests", (full_name(m.QUEUE_SECONDS),)),
    ]  # fmt: skip
    if o.knows(m.RECOMPUTED_TOKENS):
        computed = o.growth(m.COMPUTED_TOKENS)
        tax = o.growth(m.RECOMPUTED_TOKENS) / computed if computed else 0.0
        names = (full_name(m.RECOMPUTED_TOKENS), full_name(m.COMPUTED_TOKENS))
        found.append(Evidence("tokens computed again", tax, "ratio", names))
    return tuple(found)


def _capacity(o: Observation) -> Evidence:
    return Evidence(
        "blocks of the pool", o.now(m.KV_BLOCK_CAPACITY, tier=DEVICE), "blocks", (full_name(m.KV_BLOCK_CAPACITY),)
    )

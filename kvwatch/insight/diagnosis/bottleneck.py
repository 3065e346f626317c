"""Rules about what requests wait for: memory, the model, or a limit that somebody set."""

from kvwatch.derive.metrics import full_name
from kvwatch.insight.diagnosis import thresholds as t
from kvwatch.insight.diagnosis.finding import Evidence, Verdict, many
from kvwatch.insight.diagnosis.pressure import DEVICE, thrashes
from kvwatch.insight.diagnosis.reading import Observation
from kvwatch.telemetry import metrics as m

_PHASES = ("schedule", "forward", "sample", "apply")
_LIMITS = {
    "sequences": (
        "all places for running sequences are taken",
        "Raise --max-num-seqs; the pool has room for more.",
    ),
    "tokens": (
        "the tokens of a step are used up, while the model is idle most of the time",
        "Raise --max-batch-tokens; larger steps cost the model little time.",
    ),
    "transfer": (
        "their K/V is on its way between tiers",
        "Look at kvwatch_swap_seconds: the disk or the link is too slow for this load; prefer --preemption-mode"
        " recompute, or keep more in --host-memory.",
    ),
}


def kv_bound(o: Observation) -> Verdict | None:
    """Requests wait for blocks most of the time, without throwing each other out."""
    if thrashes(o):
        return None
    evidence = _waits_for_blocks(o)
    if evidence is None:
        return None
    return Verdict(
        "The engine is bound by KV memory: requests wait for blocks, so that fewer run together than the model could"
        " take.",
        "Give the pool more memory (--num-blocks, --kv-memory), store less a token (--kv-dtype), or add a replica; more"
        " compute alone will not help.",
        evidence,
    )


def compute_bound(o: Observation) -> Verdict | None:
    """Requests wait for their share of a step's tokens, blocks are there, and the model takes most of the time."""
    waiting = o.least(m.WAITING_REQUESTS, reason="tokens")
    share = _model_share(o)
    if waiting < 1 or share < t.MODEL_TIME_RATIO:
        return None
    return Verdict(
        f"The engine is bound by compute: {many(waiting, 'request')} waiting for a turn in a step, the model takes"
        f" {share:.0%} of the time, and blocks are not short.",
        "Add a replica or a faster device, or send shorter prompts; more KV memory will not help. A smaller"
        " --target-itl-seconds makes tokens flow more evenly, not faster.",
        (
            Evidence("requests waiting for tokens of a step", waiting, "requests", (full_name(m.WAITING_REQUESTS),)),
            Evidence("time in the model", share, "ratio", (full_name(m.STEP_DURATION),)),
            Evidence("tokens of a step", o.spread(m.STEP_TOKENS).mean, "tokens", (full_name(m.STEP_TOKENS),)),
        ),
    )


def waiting_though_free(o: Observation) -> Verdict | None:
    """Requests wait for something else than blocks, which are free; each reason has its remedy."""
    free, watermark = o.least(m.KV_FREE_BLOCKS, tier=DEVICE), o.now(m.KV_WATERMARK_BLOCKS, tier=DEVICE)
    if free - watermark < t.FREE_RATIO * o.now(m.KV_BLOCK_CAPACITY, tier=DEVICE) or thrashes(o):
        return None
    waiting = {reason: o.least(m.WAITING_REQUESTS, reason=reason) for reason in _LIMITS}
    if waiting["tokens"] and _model_share(o) >= t.MODEL_TIME_RATIO:
        waiting["tokens"] = 0  # that is being bound by compute
    reason = max(waiting, key=lambda each: waiting[each])
    if waiting[reason] < 1:
        return None
    why, remedy = _LIMITS[reason]
    return Verdict(
        f"{many(waiting[reason], 'request')} waiting though {free:.0f} blocks are free (reason: {reason}): {why}.",
        remedy,
        (
            Evidence(f"requests waiting for {reason}", waiting[reason], "requests", (full_name(m.WAITING_REQUESTS),)),
            Evidence("free blocks", free, "blocks", (full_name(m.KV_FREE_BLOCKS),)),
        ),
    )


def _model_share(o: Observation) -> float:
    """Return the part of the time of steps that the model takes; 0 when no step ended."""
    seconds = {phase: o.spread(m.STEP_DURATION, phase=phase).total for phase in _PHASES}
    whole = sum(seconds.values())
    return (seconds["forward"] + seconds["sample"]) / whole if whole else 0.0


def _waits_for_blocks(o: Observation) -> tuple[Evidence, ...] | None:
    if o.knows(m.KV_STALL_SECONDS):
        stalled = o.growth(m.KV_STALL_SECONDS) / o.seconds
        if stalled < t.STALL_RATIO:
            return None
        waiting = o.most(m.WAITING_REQUESTS, reason="blocks")
        return (
            Evidence("time with requests waiting for blocks", stalled, "ratio", (full_name(m.KV_STALL_SECONDS),)),
            Evidence("requests waiting for blocks", waiting, "requests", (full_name(m.WAITING_REQUESTS),)),
            Evidence("blocks in use", o.most(m.KV_USAGE_RATIO, tier=DEVICE), "ratio", (full_name(m.KV_USAGE_RATIO),)),
        )
    # Engines that do not say what requests wait for: a full pool at both looks, and a queue.
    waiting, usage = o.least(m.REQUESTS, state="waiting"), o.least(m.KV_USAGE_RATIO, tier=DEVICE)
    if waiting < 1 or usage < t.FULL_RATIO:
        return None
    return (
        Evidence("requests waiting", waiting, "requests", (full_name(m.REQUESTS),)),
        Evidence("blocks in use", usage, "ratio", (full_name(m.KV_USAGE_RATIO),)),
    )

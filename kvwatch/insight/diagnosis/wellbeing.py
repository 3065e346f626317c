"""Rules about an engine that does not do what it should, whatever the load: leaks, stands still, was left paused."""

from kvwatch.derive.metrics import full_name
from kvwatch.insight.diagnosis.finding import Evidence, Verdict, many
from kvwatch.insight.diagnosis.reading import Observation
from kvwatch.telemetry import metrics as m


def engine_unwell(o: Observation) -> Verdict | None:
    """The engine is stuck or failed, or its steps fail."""
    state = next((name for name in ("failed", "stalled") if o.now(m.ENGINE_STATE, state=name)), None)
    failed = o.growth(m.STEP_ERRORS)
    if state is None and not failed:
        return None
    what = f"is {state}" if state else f"fails steps: {failed:.0f} in {o.seconds:.0f} s"
    return Verdict(
        f"The engine {what}; requests end with errors or do not end.",
        "Read the engine's log for the exception; a failed or stuck engine must be restarted, and its flight recorder"
        " says what came before.",
        (
            Evidence("steps that failed", failed, "count", (full_name(m.STEP_ERRORS),)),
            Evidence("stalled or failed", float(state is not None), "count", (full_name(m.ENGINE_STATE),)),
        ),
    )


def leak(o: Observation) -> Verdict | None:
    """Blocks are in use that no live request holds, at both looks: no moment between two events shows that."""
    orphaned = o.least(m.KV_ORPHANED_BLOCKS)
    if not orphaned:
        return None
    return Verdict(
        f"Blocks leak: {many(orphaned, 'used block')} held by no live request, which will never be free again.",
        "Keep a snapshot or the flight recorder's file and report a defect; restarting the engine frees the blocks.",
        (
            Evidence("orphaned blocks", orphaned, "blocks", (full_name(m.KV_ORPHANED_BLOCKS),)),
            Evidence("blocks of the pool", o.now(m.KV_BLOCK_CAPACITY), "blocks", (full_name(m.KV_BLOCK_CAPACITY),)),
        ),
    )


def admission_paused(o: Observation) -> Verdict | None:
    """Requests wait since somebody paused admission, at both looks."""
    waiting = o.least(m.WAITING_REQUESTS, reason="paused")
    if waiting < 1:
        return None
    return Verdict(
        f"Admission is paused: {many(waiting, 'request')} waiting until somebody resumes it.",
        "Resume admission, or find out who paused it and why; nothing else will let these requests start.",
        (Evidence("requests waiting for admission to resume", waiting, "requests", (full_name(m.WAITING_REQUESTS),)),),
    )

"""Deliberate faults of the diagnosis, of the doctor, and of alerts and dashboards."""

from mutate.fault import Fault

RULES = "tests/unit/insight/test_diagnosis_rules.py"
READING = "tests/unit/insight/test_diagnosis_reading.py"
PAGES = "tests/unit/doctor/test_doctor_pages.py"
DESK = "tests/unit/observatory/test_observatory_desk.py"
DASHBOARDS = "tests/contract/test_dashboards.py"

INSIGHT: tuple[Fault, ...] = (
    Fault(
        name="thrash-whatever-the-load",
        stands_for="One preemption among thousands of requests is called thrash.",
        file="kvwatch/insight/diagnosis/pressure.py",
        old="    return preemptions >= max(t.MIN_PREEMPTIONS, t.PREEMPTIONS_PER_ADMISSION * admissions)\n",
        new="    return preemptions + admissions > 0\n",
        tests=(RULES,),
    ),
    Fault(
        name="the-watermark-covers-everything",
        stands_for="A watermark of none is thought to be enough, so that a larger pool is asked for.",
        file="kvwatch/insight/diagnosis/pressure.py",
        old="watermark >= sequences, sequences",
        new="watermark >= 0, sequences",
        tests=(RULES,),
    ),
    Fault(
        name="kv-bound-though-thrashing",
        stands_for="One sickness is named twice: a thrashing engine is called KV-bound as well.",
        file="kvwatch/insight/diagnosis/bottleneck.py",
        old='without throwing each other out."""\n    if thrashes(o):',
        new='without throwing each other out."""\n    if not o:',
        tests=(RULES,),
    ),
    Fault(
        name="blocks-being-filled-are-waste",
        stands_for="Blocks that a transfer or a long prefill is about to fill are called waste.",
        file="kvwatch/insight/diagnosis/cache.py",
        old="    if not is_short or lengths[0].count < t.MIN_PROMPTS:\n        return None\n",
        new="",
        tests=(RULES,),
    ),
    Fault(
        name="absent-is-zero",
        stands_for="What a source does not tell is taken for 0, and rules find all well.",
        file="kvwatch/insight/diagnosis/reading.py",
        old="    if absent is None:\n        raise Unseen(metric)\n    return absent\n",
        new="    return absent or 0.0\n",
        tests=(READING,),
    ),
    Fault(
        name="a-restart-is-growth",
        stands_for="A counter that began anew is judged as if it had fallen.",
        file="kvwatch/insight/diagnosis/reading.py",
        old="        if now < before:\n            raise Unseen(metric)\n        return now - before\n",
        new="        return now - before\n",
        tests=(READING,),
    ),
    Fault(
        name="buckets-are-not-cumulative",
        stands_for="Cumulative buckets of a page are taken for counts: every histogram is too tall.",
        file="kvwatch/doctor/pages.py",
        old="max(0, round(b - a))",
        new="max(0, round(b))",
        tests=(RULES,),
    ),
    Fault(
        name="engines-of-a-page-are-one",
        stands_for="A sidecar's engines are thrown together, so that one healthy rank hides a sick one.",
        file="kvwatch/doctor/pages.py",
        old='int(labels.get("dp_rank") or 0)',
        new='int(labels.get("dp_rank") or 0) * 0',
        tests=(PAGES,),
    ),
    Fault(
        name="what-is-over-is-told-for-ever",
        stands_for="The first look is never forgotten: an hour-old fault is still the bottleneck.",
        file="kvwatch/insight/diagnosis/lookback.py",
        old="            readings.popleft()\n",
        new="            break\n",
        tests=(READING, DESK),
    ),
    Fault(
        name="a-query-names-nothing",
        stands_for="A recording rule was renamed, and an alert still asks for the old one.",
        file="dashboards/kvwatch_dashboards/alerts/ticket.py",
        old='expr=f"{r.RECOMPUTE_TAX.name} > {s.RECOMPUTE_TAX_RATIO}"',
        new='expr=f"engine:kvwatch_recompute:ratio > {s.RECOMPUTE_TAX_RATIO}"',
        tests=(DASHBOARDS,),
    ),
)

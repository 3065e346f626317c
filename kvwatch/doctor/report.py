"""A diagnosis as text for a person. Pure."""

from collections.abc import Iterator
from textwrap import wrap

from kvwatch.insight.diagnosis import Diagnosis, DiagnosisReport, EngineDiagnosis, Evidence

WIDTH = 100
HEALTHY = "healthy: no rule has anything to say"


def text_report(report: DiagnosisReport) -> str:
    """Return one paragraph for each engine: findings gravest first, and what could not be judged."""
    return "\n".join(line for engine in report.engines for line in _engine(engine)) + "\n"


def _engine(told: EngineDiagnosis) -> Iterator[str]:
    model = f" ({told.model_name})" if told.model_name else ""
    rank = f" rank {told.dp_rank}" if told.dp_rank else ""
    diagnosis = told.diagnosis
    if diagnosis is None:
        yield f"{told.engine}{rank}{model}: seen only once; ask again in some seconds"
        return
    yield f"{told.engine}{rank}{model}, over {diagnosis.seconds:.0f} s"
    if diagnosis.is_healthy:
        yield f"  {HEALTHY}"
    for finding in diagnosis.findings:
        yield from _indented(f"{finding.gravity.upper()} {finding.rule}: {finding.sentence}", "  ")
        for evidence in finding.evidence:
            yield f"    {evidence.what}: {shown(evidence)}"
        yield from _indented(f"next: {finding.next_step}", "    ")
    yield from _unjudged(diagnosis)


def shown(evidence: Evidence) -> str:
    """Return a number with its unit."""
    if evidence.unit == "ratio":
        return f"{evidence.value:.1%}"
    number = f"{evidence.value:.3g}" if evidence.value != int(evidence.value) else f"{evidence.value:.0f}"
    return number if evidence.unit == "count" else f"{number} {evidence.unit}"


def _unjudged(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.unjudged:
        told = ", ".join(f"{each.rule} (no {each.missing})" for each in diagnosis.unjudged)
        yield from _indented(f"not judged, for want of figures at both looks: {told}", "  ")


def _indented(text: str, margin: str) -> list[str]:
    return wrap(text, WIDTH, initial_indent=margin, subsequent_indent=margin + "  ", break_on_hyphens=False)

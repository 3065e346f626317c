"""Applies all rules to one observation. Pure."""

from kvwatch.derive.metrics import full_name
from kvwatch.insight.diagnosis.finding import Diagnosis, Finding, Unjudged
from kvwatch.insight.diagnosis.reading import Observation, Unseen
from kvwatch.insight.diagnosis.rules import RULES


def diagnose(observation: Observation) -> Diagnosis:
    """Return what the rules say, gravest first; a rule whose metrics are not told is silent and noted as such."""
    findings: list[Finding] = []
    unjudged: list[Unjudged] = []
    for rule in RULES:
        try:
            verdict = rule.judge(observation)
        except Unseen as missed:
            if not rule.only_of_sidecars:
                unjudged.append(Unjudged(rule.name, full_name(missed.metric)))
            continue
        if verdict is not None:
            findings.append(Finding(rule.name, rule.gravity, verdict.sentence, verdict.next_step, verdict.evidence))
    bottleneck = findings[0].sentence if findings else ""
    return Diagnosis(observation.seconds, bottleneck, tuple(findings), tuple(unjudged))

"""Rules over two looks at one engine that name the present bottleneck in one sentence.

    lookback = Lookback()
    lookback.add(Reading(seconds, samples))     # now and then
    diagnosis = lookback.diagnose()

- reading.py     two looks at an engine, and what grew between them
- finding.py     what a rule says, and what a diagnosis is
- thresholds.py  every number that a rule compares with, and its reason
- pressure.py, bottleneck.py, cache.py, wellbeing.py, trust.py   the rules
- rules.py       all of them, gravest first
- judge.py       applies them
- lookback.py    keeps looks until they are old enough
"""

from kvwatch.insight.diagnosis.finding import (
    Diagnosis,
    DiagnosisReport,
    EngineDiagnosis,
    Evidence,
    Finding,
    Gravity,
    Unjudged,
)
from kvwatch.insight.diagnosis.judge import diagnose
from kvwatch.insight.diagnosis.lookback import Lookback
from kvwatch.insight.diagnosis.reading import Observation, Reading
from kvwatch.insight.diagnosis.rules import RULES, Rule

__all__ = [
    "RULES",
    "Diagnosis",
    "DiagnosisReport",
    "EngineDiagnosis",
    "Evidence",
    "Finding",
    "Gravity",
    "Lookback",
    "Observation",
    "Reading",
    "Rule",
    "Unjudged",
    "diagnose",
]

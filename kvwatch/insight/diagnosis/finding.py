"""What a rule says of an engine, and what all rules together say. Values only; they go out as JSON unchanged."""

from typing import Literal

import msgspec

Gravity = Literal["critical", "warning"]
"""critical: the engine or what it says of itself is defective. warning: it could serve more, or better."""


class Evidence(msgspec.Struct, frozen=True):
    """One number that a finding rests on."""

    what: str
    """What it is, in words."""
    value: float
    unit: str
    """`ratio`, `blocks`, `tokens`, `seconds`, `requests`, `count`, `events`."""
    metrics: tuple[str, ...] = ()
    """Full names of the metrics that it comes from."""


def many(number: float, noun: str) -> str:
    """Return a number with its noun: `1 step`, `2 steps`."""
    return f"{number:.0f} {noun}{'' if round(number) == 1 else 's'}"


class Verdict(msgspec.Struct, frozen=True):
    """What a rule answers when it has something to say."""

    sentence: str
    """The whole finding for somebody who reads nothing else."""
    next_step: str
    """What to do about it."""
    evidence: tuple[Evidence, ...]


class Finding(msgspec.Struct, frozen=True):
    """A verdict, and whose it is."""

    rule: str
    gravity: Gravity
    sentence: str
    next_step: str
    evidence: tuple[Evidence, ...]


class Unjudged(msgspec.Struct, frozen=True):
    """A rule that had to stay silent: what it looks at was not told at both looks, or began anew between them."""

    rule: str
    missing: str
    """Full name of the first metric that it missed."""


class Diagnosis(msgspec.Struct, frozen=True):
    """What the rules say of one engine."""

    seconds: float
    """Time between the two looks."""
    bottleneck: str
    """The gravest finding's sentence; empty when all is well."""
    findings: tuple[Finding, ...]
    """Gravest first."""
    unjudged: tuple[Unjudged, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether no rule had anything to say."""
        return not self.findings


class EngineDiagnosis(msgspec.Struct, frozen=True):
    """What is said of one engine, or of one data-parallel rank of it."""

    engine: str
    dp_rank: int
    model_name: str
    diagnosis: Diagnosis | None
    """None while there was only one look at it: ask again in some seconds."""


class DiagnosisReport(msgspec.Struct, frozen=True):
    """The answer of `GET /admin/v1/diagnosis`, and what `kvwatch doctor --json` prints."""

    engines: tuple[EngineDiagnosis, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether every engine was judged and none has a finding."""
        return all(each.diagnosis is not None and each.diagnosis.is_healthy for each in self.engines)

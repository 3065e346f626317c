"""All rules, gravest first: what the engine says must be true before a bottleneck is worth naming."""

from collections.abc import Callable
from dataclasses import dataclass

from kvwatch.insight.diagnosis.bottleneck import compute_bound, kv_bound, waiting_though_free
from kvwatch.insight.diagnosis.cache import block_size_too_large, evicted_before_reuse
from kvwatch.insight.diagnosis.finding import Gravity, Verdict
from kvwatch.insight.diagnosis.pressure import pool_too_small, watermark_too_low
from kvwatch.insight.diagnosis.reading import Observation
from kvwatch.insight.diagnosis.trust import numbers_untrue, source_incomplete, telemetry_lagging
from kvwatch.insight.diagnosis.wellbeing import admission_paused, engine_unwell, leak


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `judge` is a pure function; its first docstring line says when it speaks."""

    judge: Callable[[Observation], Verdict | None]
    gravity: Gravity
    only_of_sidecars: bool = False
    """Whether it looks at what a sidecar alone tells, so that its silence elsewhere is not worth a word."""

    @property
    def name(self) -> str:
        """The name under which findings are told."""
        return self.judge.__name__


RULES: tuple[Rule, ...] = (
    Rule(engine_unwell, "critical"),
    Rule(numbers_untrue, "critical"),
    Rule(source_incomplete, "critical", only_of_sidecars=True),
    Rule(leak, "critical"),
    Rule(admission_paused, "warning"),
    Rule(pool_too_small, "warning"),
    Rule(watermark_too_low, "warning"),
    Rule(kv_bound, "warning"),
    Rule(waiting_though_free, "warning"),
    Rule(compute_bound, "warning"),
    Rule(evicted_before_reuse, "warning"),
    Rule(block_size_too_large, "warning"),
    Rule(telemetry_lagging, "warning"),
)

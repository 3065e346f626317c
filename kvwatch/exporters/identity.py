"""Who an engine is, in the words that every exporter uses."""

import msgspec

COMMON_LABELS = ("engine", "dp_rank", "model_name")
"""Labels of every series; those that say where a process runs (job, instance, pod) are Prometheus' own."""


class EngineIdentity(msgspec.Struct, frozen=True):
    """Labels of one engine."""

    engine: str
    """The configured, stable name."""
    dp_rank: int = 0
    """Rank among data-parallel replicas."""
    model_name: str = ""

    @property
    def labels(self) -> tuple[str, str, str]:
        """Values of `COMMON_LABELS`."""
        return (self.engine, str(self.dp_rank), self.model_name)

"""Trials on disk: short runs add to one file, and what is said of it is said of all of them."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from peers.roofline import Machine
from peers.trial import Figures


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one side in one round. Trials of one load and round were made right after each other."""

    load: str
    side: str
    round: int
    figures: Figures
    machine: Machine
    """Measured at the beginning of the load's round, with every server frozen."""


class Results(msgspec.Struct, kw_only=True):
    """Everything that was measured, and what it was measured on."""

    about: dict[str, object] = {}
    """Machine, model and sides of the last run."""
    trials: list[Trial] = []

    def next_round(self, load: str) -> int:
        """Return the number of the first round that no earlier run has begun."""
        return 1 + max((trial.round for trial in self.trials if trial.load == load), default=-1)

    def loads(self) -> list[str]:
        """Return the loads that were measured, in the order of their first trials."""
        return list(dict.fromkeys(trial.load for trial in self.trials))

    def of(self, load: str, side: str) -> dict[int, Trial]:
        """Return round -> trial."""
        return {trial.round: trial for trial in self.trials if (trial.load, trial.side) == (load, side)}

    def pairs(self, load: str, side: str, other: str) -> list[tuple[Figures, Figures]]:
        """Return the figures of two sides, of the rounds that both took part in."""
        ours, theirs = self.of(load, side), self.of(load, other)
        return [(ours[number].figures, theirs[number].figures) for number in sorted(ours.keys() & theirs.keys())]


def read_results(file: Path) -> Results:
    """Return what earlier runs measured; nothing if there is no such file."""
    return msgspec.json.decode(file.read_bytes(), type=Results) if file.exists() else Results()


def write_results(file: Path, results: Results) -> None:
    """Write everything, whole or not at all."""
    unfinished = file.with_name(f".{file.name}.partial")
    unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    unfinished.replace(file)


def column(figures: Iterable[Figures], name: str) -> Sequence[float]:
    """Return one figure of several trials.

    Args:
        figures: the trials'.
        name: `output_tokens_per_second`, `seconds`, or a latency and a quantile such as `ttft.p99`.
    """
    first, _, second = name.partition(".")
    values = [getattr(each, first) for each in figures]
    return [float(getattr(value, second) if second else value) for value in values]

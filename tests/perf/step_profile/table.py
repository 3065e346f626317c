"""The table of a profile: each phase and operation with its time, its share, and the least that it could take.

The least time is the roofline's (see `peers.roofline`), of the bytes and operations that this very step needs. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from peers.roofline import Machine, ModelSize
from step_profile.served import ProfiledStep

_NS_PER_MS = 1e6
_NS_PER_SECOND = 1e9
_HEAD = ("", "ms a step", "share", "calls", "least ms", "of the roof")


@dataclass(frozen=True)
class Roof:
    """What bounds the operations."""

    machine: Machine
    model: ModelSize


@dataclass(frozen=True)
class Line:
    """One phase or operation; means over all steps."""

    name: str
    ms: float | None
    """None where nobody knows."""
    share: float | None
    """Of the whole step; None for what happens beside it."""
    calls: float | None = None
    least_ms: float | None = None
    """No machine of this bandwidth and rate does it in less; None where the model says nothing."""


def lines(steps: Sequence[ProfiledStep], num_calls: Mapping[str, int], roof: Roof | None) -> list[Line]:
    """Return the table of some steps, at least one.

    Args:
        steps: what was measured.
        num_calls: calls of each operation in a step.
        roof: what bounds the operations, if it was measured.
    """
    whole = _mean(steps, lambda step: step.wall_ns)
    assert whole is not None, "every step has a time"

    def line(name: str, ns: float | None, calls: float | None = None, least_ms: float | None = None) -> Line:
        return Line(name, None if ns is None else ns / _NS_PER_MS, None if ns is None else ns / whole, calls, least_ms)

    def phase(name: str) -> Line:
        return line(name, _mean(steps, lambda step: getattr(step.completed, f"{name}_ns")))

    operations = []
    for name in ("linear", "attention", "rotary", "norm", "activation", "logits"):
        ns = _mean(steps, lambda step, name=name: getattr(step.completed, f"{name}_ns"))  # type: ignore[misc]
        least = None if roof is None or name not in _WORK else _least_ms(steps, roof, _WORK[name])
        operations.append(line(f"  {name}", ns, num_calls.get(name), least))
    forward = phase("forward")
    known = sum(each.ms or 0.0 for each in operations) * _NS_PER_MS
    rest = line("  rest", (forward.ms or 0.0) * _NS_PER_MS - known)
    phases = [phase("schedule"), phase("build"), forward, phase("sample"), phase("apply")]
    between = line("between", whole - sum(each.ms or 0.0 for each in phases) * _NS_PER_MS)
    emit_ns = _mean(steps, lambda step: step.emit_ns)
    detokenize_ns = _mean(steps, lambda step: step.detokenize_ns)
    least_of_all = [each.least_ms for each in operations if each.least_ms is not None]
    return [
        *phases[:3], *operations, rest, *phases[3:], between,
        line("step", whole, least_ms=sum(least_of_all) if least_of_all else None),
        line("emit (within the others)", emit_ns, _mean(steps, lambda step: step.num_events)),
        Line(
            "detokenize (on the server's thread)", (detokenize_ns or 0.0) / _NS_PER_MS, None,
            _mean(steps, lambda step: step.num_output_tokens),
        ),
    ]  # fmt: skip


def heading(steps: Sequence[ProfiledStep]) -> str:
    """Say what the steps of a table have in common."""
    count = len(steps)
    return (
        f"{count} steps, on average {sum(s.num_sequences for s in steps) / count:.1f} sequences, "
        f"{sum(s.num_tokens for s in steps) / count:.1f} tokens, "
        f"{sum(s.num_context_tokens for s in steps) / count:.0f} tokens of context, "
        f"{sum(s.num_output_tokens for s in steps) / count:.1f} tokens out"
    )


def markdown(table: Sequence[Line]) -> str:
    """Return a table as Markdown that is also readable as it stands."""
    rows = [_HEAD, *(_cells(line) for line in table)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    texts = ["| " + " | ".join(_padded(row, widths)) + " |" for row in rows]
    rule = "|" + "|".join("-" * (width + 1) + (":" if column else "-") for column, width in enumerate(widths)) + "|"
    return "\n".join([texts[0], rule, *texts[1:]])


def _cells(line: Line) -> tuple[str, ...]:
    is_bound = line.least_ms is not None and line.ms
    return (
        line.name,
        "unknown" if line.ms is None else f"{line.ms:.3f}",
        "" if line.share is None else f"{100 * line.share:.1f} %",
        "" if line.calls is None else f"{line.calls:.4g}",
        "" if line.least_ms is None else f"{line.least_ms:.3f}",
        f"{100 * (line.least_ms or 0.0) / (line.ms or 1.0):.0f} %" if is_bound else "",
    )


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    name, *numbers = row
    return [name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True))]


def _mean(steps: Sequence[ProfiledStep], of: Callable[[ProfiledStep], int | None]) -> float | None:
    """Return the mean over all steps, none if one of them does not tell it."""
    values = [of(step) for step in steps]
    told = [each for each in values if each is not None]
    return sum(told) / len(told) if len(told) == len(values) else None


def _least_ms(
    steps: Sequence[ProfiledStep], roof: Roof, work: Callable[[ProfiledStep, ModelSize], tuple[float, float]]
) -> float:
    """Return the mean over the steps of the least time for bytes and operations."""
    seconds = 0.0
    for step in steps:
        size, count = work(step, roof.model)
        seconds += max(size / roof.machine.bandwidth, count / roof.machine.peak)
    return seconds * 1000 / len(steps)


def _linear_work(step: ProfiledStep, model: ModelSize) -> tuple[float, float]:
    layer_bytes = model.weight_bytes * model.layer_weights / (model.layer_weights + model.logit_weights)
    return layer_bytes, 2 * model.layer_weights * step.num_tokens


def _attention_work(step: ProfiledStep, model: ModelSize) -> tuple[float, float]:
    return step.num_context_tokens * model.kv_bytes_per_token, step.num_seen_tokens * model.attention_operations


def _logits_work(step: ProfiledStep, model: ModelSize) -> tuple[float, float]:
    share = model.logit_weights / (model.layer_weights + model.logit_weights)
    return model.weight_bytes * share if step.num_sampled else 0.0, 2 * model.logit_weights * step.num_sampled


_WORK = {"linear": _linear_work, "attention": _attention_work, "logits": _logits_work}

import pytest
from peers.roofline import Machine, ModelSize
from step_profile.served import ProfiledStep
from step_profile.table import Line, Roof, lines, markdown

from kvwatch.telemetry.events import StepCompleted

MODEL = ModelSize(
    weight_bytes=1_000, layer_weights=400, logit_weights=100, kv_bytes_per_token=10, attention_operations=8
)  # fmt: skip
SLOW_MEMORY = Roof(Machine(bandwidth=1e6, peak=1e12), MODEL)
SLOW_PRODUCTS = Roof(Machine(bandwidth=1e12, peak=1e6), MODEL)
CALLS = {"linear": 12, "attention": 3, "rotary": 6, "norm": 7, "activation": 3}


def step(*, linear_ns: int | None = 400_000, num_tokens: int = 4, scale: int = 1) -> ProfiledStep:
    completed = StepCompleted(
        10_000 * scale, 900_000 * scale, 40_000 * scale, 30_000 * scale, 4, 0, [], [], 0, 0, 0, 0, 0, 0, {},
        build_ns=20_000 * scale, linear_ns=None if linear_ns is None else linear_ns * scale,
        attention_ns=200_000 * scale, rotary_ns=50_000 * scale, norm_ns=30_000 * scale, activation_ns=20_000 * scale,
        logits_ns=100_000 * scale,
    )  # fmt: skip
    return ProfiledStep(
        num_tokens=num_tokens, num_sequences=4, num_sampled=4, num_context_tokens=100, num_seen_tokens=100,
        completed=completed, wall_ns=1_050_000 * scale, emit_ns=2_000 * scale, num_events=3, detokenize_ns=5_000,
        num_output_tokens=4,
    )  # fmt: skip


def by_name(table: list[Line]) -> dict[str, Line]:
    return {line.name.split(" (")[0]: line for line in table}


def test_phases_and_what_is_between_them_are_the_step() -> None:
    table = by_name(lines([step(), step(scale=3)], CALLS, None))

    assert table["step"].ms == pytest.approx(2 * 1.05)
    phases = ("schedule", "build", "forward", "sample", "apply", "between")
    assert [table[name].ms for name in phases] == pytest.approx([0.02, 0.04, 1.8, 0.08, 0.06, 0.1])
    assert sum(table[name].share or 0 for name in phases) == pytest.approx(1)


def test_operations_and_the_rest_are_the_forward_pass() -> None:
    table = by_name(lines([step()], CALLS, None))

    names = ("  linear", "  attention", "  rotary", "  norm", "  activation", "  logits", "  rest")
    assert sum(table[name].ms or 0 for name in names) == pytest.approx(table["forward"].ms)
    assert table["  rest"].ms == pytest.approx(0.1)
    assert table["  linear"].calls == 12
    assert table["  logits"].calls is None


def test_what_one_step_does_not_tell_is_unknown() -> None:
    table = lines([step(), step(linear_ns=None)], CALLS, None)

    assert by_name(table)["  linear"].ms is None
    assert "|   linear " in markdown(table)
    assert "unknown" in markdown(table)


def test_beneath_slow_memory_the_bytes_are_the_least_time() -> None:
    table = by_name(lines([step()], CALLS, SLOW_MEMORY))

    assert table["  linear"].least_ms == pytest.approx(1_000 * 4 / 5 / 1e6 * 1e3)
    assert table["  logits"].least_ms == pytest.approx(1_000 / 5 / 1e6 * 1e3)
    assert table["  attention"].least_ms == pytest.approx(100 * 10 / 1e6 * 1e3)
    assert table["  norm"].least_ms is None
    assert table["step"].least_ms == pytest.approx((1_000 + 100 * 10) / 1e6 * 1e3)


def test_beneath_slow_products_the_operations_are() -> None:
    table = by_name(lines([step(num_tokens=50)], CALLS, SLOW_PRODUCTS))

    assert table["  linear"].least_ms == pytest.approx(2 * 400 * 50 / 1e6 * 1e3)
    assert table["  logits"].least_ms == pytest.approx(2 * 100 * 4 / 1e6 * 1e3)
    assert table["  attention"].least_ms == pytest.approx(100 * 8 / 1e6 * 1e3)

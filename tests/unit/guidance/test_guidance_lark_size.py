"""How much a terminal stands for, counted before anything writes it out."""

import pytest

from kvwatch_engine.guidance.lark_size import largest_terminal


@pytest.mark.parametrize(
    ("lark", "size"),
    [
        ("", 0),
        ("no grammar", 0),
        ('start: "abc"\n', 0),
        ('start: A\nA: "abc"\n', 5),
        ('start: A\nA: B B\nB: C C\nC: "x"\n', 12),
        ('start: A\n_A.2: B /[a-z]+/\n   | B // B B B\nB: "x"\n', 3 + 8 + 3 + 8),
        ('start: a a\na: b b\nb: c c\nc: X\nX: "x"\n', 3),
    ],
)  # fmt: skip
def test_sizes_of_small_grammars(lark: str, size: int) -> None:
    assert largest_terminal(lark, 100) == size


def test_counting_ends_at_the_limit_whatever_the_order_of_the_lines() -> None:
    lines = ["A0: A1 A1"] + [f"A{i}: A{i + 1} A{i + 1}" for i in range(1, 300)] + ['A300: "x"']

    assert largest_terminal("\n".join(lines), 10_000) == 10_001
    assert largest_terminal("\n".join(reversed(lines)), 10_000) == 10_001

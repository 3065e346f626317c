import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.bench.plots import Bar, Line, bar_plot, cumulative, line_plot, ticks

EVIL = "<script>alert('&\"')</script>"


def parsed(figure: str) -> ElementTree.Element:
    return ElementTree.fromstring(figure)


@given(most=st.floats(1e-6, 1e9))
def test_ticks_are_round_few_and_within(most: float) -> None:
    found = ticks(most)
    assert found[0] == 0
    assert found[-1] <= most * 1.001
    assert 3 <= len(found) <= 8
    for tick in found[1:]:
        digits = re.sub(r"e.*", "", f"{tick:.9e}").replace(".", "").rstrip("0")
        assert len(digits) <= 3, tick


@given(values=st.lists(st.floats(0, 100), min_size=1, max_size=2000))
def test_a_distribution_rises_from_0_to_1_in_steps(values: list[float]) -> None:
    points = cumulative(values)
    assert points[0] == (min(values), 0.0)
    assert points[-1] == (max(values), 1.0)
    assert points == sorted(points)
    assert len(points) <= 802
    for before, after in zip(points[::2], points[1::2], strict=True):
        assert before[0] == after[0]  # upright
    if len(values) <= 400:  # then nothing is left out
        assert points[1::2] == [(value, (place + 1) / len(values)) for place, value in enumerate(sorted(values))]


@given(
    lines=st.lists(
        st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), max_size=30).map(
            lambda points: Line(EVIL, points, 3)
        ),
        max_size=4,
    )
)
def test_every_plot_is_well_formed_and_stays_within_its_frame(lines: list[Line]) -> None:
    figure = line_plot(EVIL, EVIL, EVIL, lines, x_most=100)
    if not any(line.points for line in lines):
        assert figure == ""
        return
    root = parsed(figure)
    drawn = list(root.iter("polyline"))
    assert len(drawn) == sum(bool(line.points) for line in lines)
    for each in drawn:
        for place in each.attrib["points"].split():
            x, y = map(float, place.split(","))
            assert 0 <= x <= 560
            assert 0 <= y <= 300
    assert not [each for each in root.iter() if each.tag == "script"]


def test_bars_go_from_left_to_right_in_their_order() -> None:
    bars = [Bar(1.0, [(2.0, "wait"), (4.0, "serve")], EVIL), Bar(2.0, [(3.0, "fail")], "b")]
    root = parsed(bar_plot("t", "x", "y", bars, [("wait", EVIL)]))
    boxes = [(each.attrib["class"], float(each.attrib["x"]), float(each.attrib["width"])) for each in root.iter("rect")]
    assert [box[0] for box in boxes] == ["bar wait", "bar serve", "bar fail"]
    assert boxes[0][1] + boxes[0][2] == pytest.approx(boxes[1][1], abs=0.2)
    assert boxes[1][2] == pytest.approx(2 * boxes[0][2], abs=0.2)
    tops = [float(each.attrib["y"]) for each in root.iter("rect")]
    assert tops[0] == tops[1] < tops[2]

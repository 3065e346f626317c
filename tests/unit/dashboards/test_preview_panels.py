"""Pictures honour what a panel says: unit, legend, thresholds, kind, and what is shown instead of nothing."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from kvwatch_dashboards.boards import BOARDS
from kvwatch_dashboards.panel import Level, Panel, Query
from kvwatch_dashboards.preview.drawing import LEGEND_ROWS, LEVELS, draw
from kvwatch_dashboards.preview.missing import silent
from kvwatch_dashboards.preview.reading import Reading, Shown, Span, legend
from kvwatch_dashboards.preview.units import written

SPAN = Span(1_000_000.0, 1_000_600.0, 5.0)


def line(query: Query, values: list[float], **labels: str) -> Shown:
    points = tuple((SPAN.start + 60.0 * place, value) for place, value in enumerate(values))
    return Shown(legend(query.legend, labels), labels, points, query)


def drawn(panel: Panel, *shown: Shown) -> "Figure":
    figure = Figure(figsize=(4, 2))
    draw(figure.add_subplot(), Reading(panel, shown), SPAN, [])
    figure.canvas.draw()
    return figure


def lines(**more: object) -> Panel:
    return Panel(**({"title": "Title", "unit": "short", "queries": (Query("up"),)} | more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "short", "0"), (1234, "short", "1.23 K"), (0.5, "short", "0.5"), (0.625, "percentunit", "62.5%"),
        (62.5, "percent", "62.5%"), (0.0034, "s", "3.4 ms"), (90, "s", "1.5 min"), (0, "s", "0 s"),
        (3 * 2**20, "bytes", "3 MiB"), (2500, "Bps", "2.5 KB/s"), (0, "Bps", "0 B/s"), (7, "cps", "7 c/s"),
        (0.25, "reqps", "0.25 req/s"),
    ],
)  # fmt: skip
def test_values_are_written_with_their_unit(value: float, unit: str, text: str) -> None:
    assert written(value, unit) == text


def test_every_unit_of_every_panel_can_be_written() -> None:
    panels = [panel for board in BOARDS for row in board.rows for panel in row.panels]
    units = {unit for panel in panels for unit in (panel.unit, *(query.unit for query in panel.queries)) if unit}

    assert all(written(1.0, unit) for unit in units)


def test_a_query_is_asked_as_grafana_asks_it() -> None:
    query = 'rate(kvwatch_x_total{job=~"$job",tier=~"$tier"}[$__rate_interval])'

    assert SPAN.asked("x[$__range]") == "x[600000ms]"
    assert SPAN.asked(query) == 'rate(kvwatch_x_total{job=~".*",tier=~".*"}[20000ms])'
    assert Span(0, 86_400, 15).rate_interval == "375000ms", "a step, and a scrape"


def test_legends_name_lines_and_long_ones_say_what_is_left_out() -> None:
    panel = lines(queries=(Query("up", "{{engine}}/{{dp_rank}}"),))
    shown = [line(panel.queries[0], [1, 2], engine=f"e{number}", dp_rank="0") for number in range(30)]

    (axes,) = drawn(panel, *shown).axes
    drawn_legend = axes.get_legend()
    assert drawn_legend is not None
    texts = [text.get_text() for text in drawn_legend.get_texts()]
    assert texts[0] == "e0/0"
    assert texts[-1].endswith(f"and {30 - len(texts)} more")
    assert len(texts) % LEGEND_ROWS == 0
    assert len(axes.lines) == 30


def test_thresholds_are_dashed_lines_that_do_not_move_the_scale() -> None:
    panel = lines(levels=(Level(1.5, "yellow"), Level(100.0, "red")))

    (axes,) = drawn(panel, line(panel.queries[0], [1, 2, 3])).axes
    dashed = [each for each in axes.lines if each.get_linestyle() == "--"]
    assert [each.get_color() for each in dashed] == [LEVELS["yellow"], LEVELS["red"]]
    assert 3 <= axes.get_ylim()[1] < 10
    assert axes.get_ylim()[0] == 0


def test_ratios_reach_from_nothing_to_all() -> None:
    panel = lines(unit="percentunit")

    (axes,) = drawn(panel, line(panel.queries[0], [0.1, 0.2])).axes
    assert axes.get_ylim() == pytest.approx((0, 1.03))


def test_no_line_is_drawn_over_a_gap() -> None:
    panel = lines()
    points = ((SPAN.start, 1.0), (SPAN.start + 5, 1.0), (SPAN.start + 60, 2.0), (SPAN.start + 65, 2.0))

    (axes,) = drawn(panel, Shown("x", {}, points, panel.queries[0])).axes
    values = np.asarray(axes.lines[0].get_ydata(), dtype=float).tolist()
    assert [value for value in values if value == value] == [1, 1, 2, 2]
    assert values[2] != values[2], "not a number between"


def test_stacks_add_up() -> None:
    panel = lines(kind="stack")

    (axes,) = drawn(panel, line(panel.queries[0], [1, 2], a="x"), line(panel.queries[0], [3, 4], a="y")).axes
    assert [list(each.get_ydata()) for each in axes.lines] == [[1, 2], [4, 6]]  # type: ignore[arg-type]


def test_a_table_has_a_row_for_each_set_of_labels_sorted_by_its_first_column() -> None:
    panel = lines(
        kind="table", queries=(Query("a", column="risk", unit="percentunit"), Query("b", column="waiting")),
        levels=(Level(0.8, "red"),),
    )  # fmt: skip
    risk, waiting = panel.queries

    (axes,) = drawn(
        panel, line(risk, [0.1], engine="calm"), line(risk, [0.9], engine="full"), line(waiting, [7], engine="full")
    ).axes
    (table,) = axes.tables
    texts = {place: cell.get_text().get_text() for place, cell in table.get_celld().items()}
    assert [texts[0, column] for column in range(3)] == ["engine", "risk", "waiting"]
    assert [texts[1, column] for column in range(3)] == ["full", "90%", "7"]
    assert [texts[2, column] for column in range(3)] == ["calm", "10%", ""]


def test_a_number_is_the_last_value() -> None:
    panel = lines(kind="number", unit="percentunit")

    (axes,) = drawn(panel, line(panel.queries[0], [0.5, 0.25])).axes
    assert "25%" in [text.get_text() for text in axes.texts]


def test_an_empty_panel_says_what_grafana_would_say_and_is_listed() -> None:
    panel = lines()

    (axes,) = drawn(panel).axes
    assert [text.get_text() for text in axes.texts] == [panel.when_empty]
    assert list(silent([Reading(panel, ())])) == ["Title"]


def test_a_query_without_data_is_listed_beside_one_with() -> None:
    panel = lines(queries=(Query("a", "there"), Query("b", "not there")))

    assert list(silent([Reading(panel, (line(panel.queries[0], [1]),))])) == ["Title: not there"]

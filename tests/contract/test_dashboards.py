"""What is generated names only what exists; every alert can be looked up; nothing generated was changed by hand."""

import json
import re
from pathlib import Path

import pytest
from metric_names import SELECTOR, metric_of, wrong_selectors

from kvwatch.derive.metrics import PREFIX, full_name
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.metrics import CATALOGUE
from kvwatch_dashboards import promql
from kvwatch_dashboards.alerts import ALERTS, Alert
from kvwatch_dashboards.boards import BOARDS
from kvwatch_dashboards.generated import FOLDER, differences, files
from kvwatch_dashboards.panel import Board
from kvwatch_dashboards.recording import RECORDINGS
from kvwatch_dashboards.unused import UNUSED

RUNBOOK = (Path(__file__).parents[2] / "dashboards" / "runbook.md").read_text(encoding="utf-8")
AGGREGATED = re.compile(r"(?<![\w:])(engine:kvwatch_\w+:\w+)")
PARTS_OF_THE_RUNBOOK = ("**Meaning.**", "**Impact.**", "**First checks**", "**Remedy.**")


def queries() -> list[str]:
    return [*(alert.expr for alert in ALERTS), *(rule.expr for rule in RECORDINGS)]


def panel_queries() -> list[str]:
    """Return the queries of the generated dashboards: panels, variables and annotations."""
    found: list[str] = []
    for text in (text for name, text in files().items() if name.endswith(".json")):
        board = json.loads(text)
        found += [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
        found += [each["expr"] for each in board["annotations"]["list"]]
        found += [each["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    return found


def runbook_queries() -> list[str]:
    return [code for code in re.findall(r"`([^`]+)`", RUNBOOK.replace("\n   ", " ")) if PREFIX in code]


def test_what_is_generated_is_what_would_be_generated_now() -> None:
    assert differences() == []
    assert sorted(files()) == sorted(path.name for path in FOLDER.iterdir())


def test_generation_is_deterministic() -> None:
    assert files() == files()


def test_queries_of_rules_name_metrics_and_labels_that_exist() -> None:
    assert [wrong for query in queries() for wrong in wrong_selectors(query)] == []


def test_queries_of_the_runbook_name_metrics_and_labels_that_exist() -> None:
    found = runbook_queries()

    assert len(found) > 40
    assert [wrong for query in found for wrong in wrong_selectors(query)] == []
    recorded = {rule.name for rule in RECORDINGS}
    assert {name for query in (*found, *queries()) for name in AGGREGATED.findall(query)} <= recorded


def test_queries_of_dashboards_name_metrics_and_labels_that_exist() -> None:
    """ROCm/rocm-aic#134, inference-perf#277 (O71): a metric got another name, and its panels stayed empty."""
    found = panel_queries()

    assert len(found) > 200
    assert [wrong for query in found for wrong in wrong_selectors(query)] == []


def test_every_metric_is_shown_or_watched_or_deliberately_neither() -> None:
    text = " ".join((*panel_queries(), *queries()))
    used = {metric for name, _ in SELECTOR.findall(text) if (metric := metric_of(name)) is not None}

    forgotten = [full_name(metric) for metric in CATALOGUE if metric not in used | UNUSED.keys()]
    assert forgotten == [], "show it in kvwatch_dashboards/boards, or name it with a reason in unused.py; `make derive`"
    assert [full_name(metric) for metric in UNUSED if metric in used] == []
    assert all(UNUSED.values())


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_every_panel_says_what_to_do_in_which_unit_and_what_an_empty_one_means(board: Board) -> None:
    made = json.loads(files()[f"{board.uid}.json"])
    panels = [panel for panel in made["panels"] if panel["type"] not in {"row", "text"}]

    assert panels
    for panel in panels:
        defaults = panel["fieldConfig"]["defaults"]
        assert len(panel["description"]) > 40, panel["title"]
        assert panel["description"].rstrip().endswith((".", "?")), panel["title"]
        assert defaults["unit"], panel["title"]
        assert defaults["noValue"] != "No data", panel["title"]
        assert panel["targets"], panel["title"]
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    assert len({panel["title"] for panel in panels}) == len(panels)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_dashboards_share_variables_annotations_and_links(board: Board) -> None:
    made = json.loads(files()[f"{board.uid}.json"])

    names = [each["name"] for each in made["templating"]["list"]]
    assert names == ["datasource", "job", "model", "engine", "dp_rank", "tier", "group", "admin"]
    assert [each["name"] for each in made["annotations"]["list"]] == [
        "Configuration changed", "Pool rebuilt", "Engine restarted",
    ]  # fmt: skip
    assert [each["title"] for each in made["links"]] == ["kvwatch", "Diagnosis", "Admin API"]


def test_latencies_lead_to_traces() -> None:
    panels = [panel for board in BOARDS for row in board.rows for panel in row.panels if panel.has_exemplars]

    assert {"Time to first token", "Time between tokens", "End to end"} <= {panel.title for panel in panels}


def test_no_query_averages_ratios() -> None:
    assert not [query for query in (*panel_queries(), *queries()) if re.search(r"\bavg(_over_time)?\b", query)]


def test_the_check_of_queries_sees_what_is_wrong() -> None:
    bad = 'rate(kvwatch_nothing_total[5m]) + kvwatch_requests{stat="x"} + kvwatch_queue_seconds + kvwatch_preemptions'

    assert len(list(wrong_selectors(bad))) == 4


def test_recording_rules_are_named_level_metric_operation() -> None:
    assert all(re.fullmatch(r"engine:kvwatch_[a-z_]+:(rate|ratio|ratio_rate)\w*", rule.name) for rule in RECORDINGS)


def test_every_alert_has_its_section_in_the_runbook_with_three_first_checks() -> None:
    sections = re.split(r"^## ", RUNBOOK, flags=re.MULTILINE)[1:]
    by_name = {section.split("\n", 1)[0]: section for section in sections}

    assert list(by_name) == [alert.name for alert in ALERTS]
    for name, section in by_name.items():
        assert all(part in section for part in PARTS_OF_THE_RUNBOOK), name
        assert re.findall(r"^(\d)\. ", section, flags=re.MULTILINE) == ["1", "2", "3"], name
        assert re.search(r"`(?:kvwatch|curl|engine:|up|sum|increase|histogram|rate|time|df)", section), name


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_says_what_it_means_and_where_to_read_on(alert: Alert) -> None:
    assert alert.runbook_url.endswith(f"#{alert.name.lower()}")
    assert alert.summary
    assert not alert.summary.endswith(".")
    assert alert.description.endswith(".")


def test_an_unknown_label_or_the_wrong_kind_fails_while_building() -> None:
    with pytest.raises(promql.QueryError, match="no label 'stat'"):
        promql.series(m.REQUESTS, stat="running")
    with pytest.raises(promql.QueryError, match="plain selector"):
        promql.series(m.QUEUE_SECONDS)
    with pytest.raises(promql.QueryError, match="not a counter"):
        promql.rate(m.REQUESTS)
    with pytest.raises(promql.QueryError, match="not a gauge"):
        promql.gauge(m.PREEMPTIONS)
    with pytest.raises(promql.QueryError, match="no bound"):
        promql.late_ratio(m.TIME_TO_FIRST_TOKEN, 3.14, "5m")


def test_annotations_are_json_and_so_yaml() -> None:
    for line in (FOLDER / "alerts.rules.yaml").read_text(encoding="utf-8").splitlines():
        _, _, scalar = line.strip().partition(": ")
        if scalar.startswith('"'):
            json.loads(scalar)

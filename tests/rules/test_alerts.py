"""Every alert fires in its sickness, not before, and clears after: judged by promtool, on the generated files."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from rule_cases import PAGE_CASES, QUIET_CASES, TICKET_CASES, Case

from kvwatch_dashboards.alerts import ALERTS, Alert
from kvwatch_dashboards.generated import FOLDER

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not here: install the package 'prometheus'"
)
FIRING = 'clamp_max(count(ALERTS{{alertname="{}",alertstate="firing"}}), 1) or vector(0)'
CASES = (*PAGE_CASES, *TICKET_CASES)
RULES = [str(FOLDER / name) for name in ("recording.rules.yaml", "alerts.rules.yaml")]


def verdict_of_promtool(folder: Path, case: Case, firing: dict[int, bool]) -> str:
    """Return what promtool has to say about an alert that should fire at these points; empty when it agrees."""
    story = {
        "rule_files": RULES,
        "evaluation_interval": f"{case.minutes}m",
        "tests": [
            {
                "interval": f"{case.minutes}m",
                "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
                "promql_expr_test": [
                    {
                        "expr": FIRING.format(case.alert),
                        "eval_time": f"{point * case.minutes}m",
                        "exp_samples": [{"labels": "{}", "value": int(fires)}],
                    }
                    for point, fires in firing.items()
                ],
            }
        ],
    }
    path = folder / "story.yaml"
    path.write_text(json.dumps(story), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


@needs_promtool
def test_promtool_takes_the_generated_rules() -> None:
    done = subprocess.run(
        ["promtool", "check", "rules", *RULES], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("case", CASES, ids=[f"{case.alert}-{number}" for number, case in enumerate(CASES)])
def test_an_alert_fires_in_its_sickness_and_neither_before_nor_after(case: Case, tmp_path: Path) -> None:
    """llm-d-kv-cache#664, #676 (O67): alerts that nobody had seen fire."""
    firing = {**dict.fromkeys(case.quiet, False), case.fires: True, case.clears: False}

    assert verdict_of_promtool(tmp_path, case, firing) == ""


@needs_promtool
@pytest.mark.parametrize("case", QUIET_CASES, ids=[f"{case.alert}-{number}" for number, case in enumerate(QUIET_CASES)])
def test_an_alert_is_silent_when_only_a_part_of_its_condition_holds(case: Case, tmp_path: Path) -> None:
    """llm-d-router#2330 (O67): a ratio of parts with other labels than the whole, before they were summed."""
    assert verdict_of_promtool(tmp_path, case, dict.fromkeys(case.quiet, False)) == ""


@needs_promtool
@pytest.mark.slow
@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_summary_and_description_are_filled_in_with_labels_and_numbers(alert: Alert, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.alert == alert.name)
    nothing = {"alertname": alert.name, "eval_time": f"{case.fires * case.minutes}m", "exp_alerts": []}
    story = {
        "rule_files": RULES,
        "evaluation_interval": f"{case.minutes}m",
        "tests": [
            {
                "interval": f"{case.minutes}m",
                "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
                "alert_rule_test": [nothing],
            }
        ],
    }
    path = tmp_path / "story.yaml"
    path.write_text(json.dumps(story), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    shown = done.stdout + done.stderr  # it complains that nothing was expected, and shows what there was

    assert alert.runbook_url in shown
    assert not [sign for sign in ("<error", "<no value>", "{{", "$labels", "$value", "NaN") if sign in shown], shown


def test_every_alert_has_a_story() -> None:
    assert {case.alert for case in CASES} == {alert.name for alert in ALERTS}

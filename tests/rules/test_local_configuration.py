"""What Prometheus and Alertmanager are told on this machine is what their own tools accept."""

import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_stage import seconds_of, shortened

from kvwatch_dashboards.alerts import ALERTS
from kvwatch_dashboards.generated import files
from kvwatch_dashboards.local.configuration import Timing, alertmanager_config, prometheus_config
from kvwatch_dashboards.local.servers import RULES


def verdict(*command: str) -> str:
    """Return what a tool has to say; empty when all is well."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("amtool") is None, reason="amtool is not here: install 'prometheus-alertmanager'")
@pytest.mark.parametrize("webhook", [None, "http://127.0.0.1:9/alerts"])
def test_amtool_takes_the_configuration_and_routes_by_severity(webhook: str | None, tmp_path: Path) -> None:
    path = tmp_path / "alertmanager.yml"
    path.write_text(alertmanager_config(webhook, Timing()), encoding="utf-8")

    assert verdict("amtool", "check-config", str(path)) == ""
    for severity, receiver in (("page", "pages"), ("ticket", "tickets")):
        route = ("amtool", "config", "routes", "test", f"--config.file={path}", f"--verify.receivers={receiver}")
        assert verdict(*route, f"severity={severity}") == ""
        assert verdict(*route, "severity=page" if severity == "ticket" else "severity=ticket") != ""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not here: install the package 'prometheus'")
def test_promtool_takes_the_configuration_with_the_generated_rules(tmp_path: Path) -> None:
    path = tmp_path / "prometheus.yml"
    jobs = {"kvwatch": ["127.0.0.1:9400"], "kvwatch-sidecar": []}
    path.write_text(prometheus_config(jobs, RULES, ["127.0.0.1:9093"], Timing()), encoding="utf-8")

    assert verdict("promtool", "check", "config", str(path)) == ""
    path.write_text(path.read_text(encoding="utf-8").replace("scrape_configs", "scrape_config"), encoding="utf-8")
    assert verdict("promtool", "check", "config", str(path)) != ""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not here: install the package 'prometheus'")
def test_shortened_rules_are_the_same_rules_in_less_time(tmp_path: Path) -> None:
    path = tmp_path / "alerts.yaml"
    path.write_text(shortened(files()["alerts.rules.yaml"], 60), encoding="utf-8")
    text = path.read_text(encoding="utf-8")

    assert verdict("promtool", "check", "rules", str(path)) == ""
    for alert in ALERTS:
        assert f"alert: {alert.name}\n" in text
        assert f"    for: {1000 * seconds_of(alert.lasts) // 60}ms\n" in text
    assert "offset 1440000ms" in text
    assert "[15m]" not in text
    assert "ratio_rate5m" in text, "names of recorded series stay"

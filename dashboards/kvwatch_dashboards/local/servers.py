"""Prometheus and Alertmanager as processes on loopback, ready when their constructors return."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx

from kvwatch.errors import ConfigError
from kvwatch_dashboards.generated import FOLDER
from kvwatch_dashboards.local.configuration import Timing, alertmanager_config, prometheus_config
from kvwatch_dashboards.local.process import ManagedProcess, free_address

PROMETHEUS_PORT, ALERTMANAGER_PORT = 9090, 9093
RULES = (FOLDER / "recording.rules.yaml", FOLDER / "alerts.rules.yaml")
_READY_SECONDS = 60.0


class Server:
    """A server with an address and a page that says when it is ready."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, address: str) -> None:
        self.address = address
        self.url = f"http://{address}"
        self.process = ManagedProcess(name, command, folder / f"{name.lower()}.log")
        try:
            self.process.wait_until(self._is_ready, _READY_SECONDS)
        except BaseException:
            self.process.end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.end()

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=5, trust_env=False).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False


@dataclass(frozen=True, slots=True)
class Told:
    """What a Prometheus is to do."""

    jobs: Mapping[str, Sequence[str]]
    """Name of each scrape job -> its targets, `host:port`."""
    alertmanagers: Sequence[str] = ()
    rule_files: Sequence[Path] = RULES
    timing: Timing = field(default_factory=Timing)


def start_prometheus(folder: Path, told: Told, preferred_port: int = 0) -> Server:
    """Start Prometheus; its configuration, data and log are in `folder`, which is made.

    Raises:
        ConfigError: it is not installed.
        ProcessError: it ends, for instance since it does not understand a rule.
    """
    program = _program("prometheus", package="prometheus")
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "prometheus.yml"
    config.write_text(prometheus_config(told.jobs, told.rule_files, told.alertmanagers, told.timing), encoding="utf-8")
    address = free_address(preferred_port)
    command = [
        program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'prometheus-data'}",
        f"--web.listen-address={address}", "--enable-feature=exemplar-storage", "--log.level=warn",
    ]  # fmt: skip
    return Server("Prometheus", command, folder, address)


def start_alertmanager(
    folder: Path, webhook: str | None = None, timing: Timing | None = None, preferred_port: int = 0
) -> Server:
    """Start an Alertmanager without peers; its configuration, data and log are in `folder`, which is made.

    Raises:
        ConfigError: it is not installed.
        ProcessError: it ends.
    """
    program = _program("prometheus-alertmanager", "alertmanager", package="prometheus-alertmanager")
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "alertmanager.yml"
    config.write_text(alertmanager_config(webhook, timing or Timing()), encoding="utf-8")
    address = free_address(preferred_port)
    command = [
        program, f"--config.file={config}", f"--storage.path={folder / 'alertmanager-data'}",
        f"--web.listen-address={address}", "--cluster.listen-address=", "--log.level=warn",
    ]  # fmt: skip
    return Server("Alertmanager", command, folder, address)


def _program(*names: str, package: str) -> str:
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return found
    raise ConfigError(f"{names[0]} is not on PATH: install it, on Debian with `apt-get install {package}`")

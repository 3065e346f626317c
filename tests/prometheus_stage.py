"""A real Prometheus and Alertmanager over whatever a test serves, with the generated rules, and a webhook behind."""

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from kvwatch_dashboards.generated import files
from kvwatch_dashboards.local.configuration import Timing
from kvwatch_dashboards.local.servers import Told, start_alertmanager, start_prometheus
from kvwatch_dashboards.prometheus_api import PrometheusApi

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not here: install the package 'prometheus'"
)
needs_alertmanager = pytest.mark.skipif(
    shutil.which("prometheus-alertmanager") is None,
    reason="Alertmanager is not here: install the package 'prometheus-alertmanager'",
)

QUICK = Timing(scrape="1s", group_wait="1s", group_interval="1s", page_repeat="1h", ticket_repeat="1h")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?<=\[)(\d+)([smhd])(?=\])|(?<=offset )(\d+)([smhd])\b|(?<=for: )(\d+)([smhd])$", re.MULTILINE)


def seconds_of(duration: str) -> int:
    """Return a duration of one unit, such as `5m`, in seconds."""
    return int(duration[:-1]) * _SECONDS[duration[-1]]


def shortened(rules: str, factor: int) -> str:
    """Return rules whose ranges, offsets and waits are all a `factor`-th as long; names stay."""

    def shorter(match: re.Match[str]) -> str:
        return f"{round(1000 * seconds_of(match.group(0)) / factor)}ms"

    return _DURATION.sub(shorter, rules)


def write_rules(folder: Path, factor: int = 1) -> list[Path]:
    """Write the generated rules, shortened by a factor; return the files."""
    paths = []
    for name in ("recording.rules.yaml", "alerts.rules.yaml"):
        paths.append(folder / name)
        paths[-1].write_text(shortened(files()[name], factor), encoding="utf-8")
    return paths


@contextmanager
def prometheus(
    folder: Path,
    jobs: Mapping[str, Sequence[str]],
    *,
    factor: int = 1,
    alertmanagers: Sequence[str] = (),
    timing: Timing = QUICK,
) -> Iterator[PrometheusApi]:
    """Run a Prometheus that scrapes these pages (URLs); it is ready once each was reached."""
    targets = {job: [urlsplit(url).netloc for url in urls] for job, urls in jobs.items()}
    told = Told(targets, alertmanagers, write_rules(folder, factor), timing)
    with start_prometheus(folder, told) as server:
        api = PrometheusApi(server.url)
        try:
            wanted = [target for found in targets.values() for target in found]
            server.process.wait_until(lambda: api.is_scraped(wanted), 60)
            yield api
        finally:
            api.close()


def wait_for(what: Callable[[], bool], seconds: float, why: Callable[[], object] = lambda: "") -> None:
    """Wait until something is true; `why` says what there is instead."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, why()
        time.sleep(0.2)


class SentAlert(msgspec.Struct, frozen=True, kw_only=True):
    """An alert as Alertmanager tells it."""

    status: str
    """firing or resolved."""
    labels: dict[str, str]
    annotations: dict[str, str]


class _Message(msgspec.Struct, frozen=True):
    alerts: list[SentAlert]


class Webhook:
    """Whoever is told: an HTTP server that keeps what Alertmanager sends."""

    def __init__(self) -> None:
        self.alerts: list[SentAlert] = []
        kept = self.alerts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                kept.extend(msgspec.json.decode(body, type=_Message).alerts)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def statuses(self, name: str) -> list[str]:
        """Return what was told of an alert, in order."""
        return [alert.status for alert in list(self.alerts) if alert.labels["alertname"] == name]

    def pages(self) -> set[str]:
        """Return the names of alerts for which somebody would have got up."""
        return {alert.labels["alertname"] for alert in list(self.alerts) if alert.labels["severity"] == "page"}

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()


@contextmanager
def webhook() -> Iterator[Webhook]:
    receiver = Webhook()
    try:
        yield receiver
    finally:
        receiver.close()


@contextmanager
def alertmanager(folder: Path, receiver: Webhook, timing: Timing = QUICK) -> Iterator[str]:
    """Run an Alertmanager that tells `receiver`; yields its address."""
    with start_alertmanager(folder, receiver.url, timing) as server:
        yield server.address

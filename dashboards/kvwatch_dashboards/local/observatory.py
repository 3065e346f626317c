"""An engine, a Prometheus that scrapes it and an Alertmanager behind that, on this machine, for a person.

python -m kvwatch_dashboards.local [--webhook URL] [--data DIR] [flags of `kvwatch serve`]
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from kvwatch.errors import KVWatchError
from kvwatch_dashboards import settings
from kvwatch_dashboards.local.process import ManagedProcess, ProcessError, free_address
from kvwatch_dashboards.local.servers import (
    ALERTMANAGER_PORT,
    PROMETHEUS_PORT,
    Server,
    Told,
    start_alertmanager,
    start_prometheus,
)
from kvwatch_dashboards.prometheus_api import PrometheusApi

_ENGINE_SECONDS = 900.0
"""The first start converts the embedded model and compiles kernels."""
_SCRAPED_SECONDS = 60.0
_LOOK_SECONDS = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Run all three until Ctrl-C or SIGTERM; return the exit status, 1 if one of them ended by itself."""
    options, flags = _parser().parse_known_args(argv)
    stop = threading.Event()

    def on_signal(_: int, __: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    try:
        with contextlib.ExitStack() as stack:
            folder = options.data or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvwatch-")))
            folder.mkdir(parents=True, exist_ok=True)
            for line in _running(stack, folder, flags, options.webhook, stop):
                _say(line)
    except _Stopped:
        pass
    except KVWatchError as error:
        _say(str(error))
        return 1
    _say("all ended")
    return 0


class _Stopped(Exception):
    """Somebody wants it to end before everything is up."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make observatory",
        description="An engine, Prometheus and Alertmanager on this machine; Ctrl-C ends all three.",
        epilog="Everything else is passed on to `kvwatch serve`.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--data", type=Path, help="folder for configuration, data and logs; by default one that is removed at the end"
    )
    parser.add_argument("--webhook", help="URL that Alertmanager posts alerts to; by default it only shows them")
    return parser


def _running(
    stack: contextlib.ExitStack, folder: Path, flags: Sequence[str], webhook: str | None, stop: threading.Event
) -> Iterator[str]:
    """Start one after the other, yielding what a person wants to know; return when `stop` is set."""
    yield f"starting an engine, minutes the first time; its log is {folder / 'engine.log'}"
    engine = stack.enter_context(ManagedProcess("the engine", _serve_command(flags), folder / "engine.log"))
    ready = _wait_for_engine(engine, stop)
    alertmanager = stack.enter_context(start_alertmanager(folder, webhook, preferred_port=ALERTMANAGER_PORT))
    scraped = urlsplit(ready["metrics"]).netloc
    told = Told({settings.ENGINE_JOBS: [scraped], settings.SIDECAR_JOBS: []}, [alertmanager.address])
    prometheus = stack.enter_context(start_prometheus(folder, told, PROMETHEUS_PORT))
    _wait_for_scrape(prometheus, scraped)
    yield from _addresses(ready, prometheus, alertmanager)
    while not stop.wait(_LOOK_SECONDS):
        for process in (engine, prometheus.process, alertmanager.process):
            process.check()
    yield "ending"


def _addresses(ready: dict[str, str], prometheus: Server, alertmanager: Server) -> Iterator[str]:
    rows = {
        "API": ready["api"],
        "metrics": ready["metrics"],
        "admin API": ready["admin"],
        "event stream": ready["grpc"],
        "Prometheus": prometheus.url,
        "alerts": f"{prometheus.url}/alerts",
        "Alertmanager": alertmanager.url,
    }
    yield from (f"{name:<13} {address}" for name, address in rows.items())
    python = os.path.relpath(sys.executable)
    yield f"{'load':<13} {python} -m kvwatch bench --url {ready['api'].removesuffix('/v1')} --num-requests 200"
    yield "Ctrl-C ends all three"


def _serve_command(flags: Sequence[str]) -> list[str]:
    listeners = (("--metrics-listen", 9400), ("--admin-listen", 9401), ("--grpc-listen", 9402))
    port = free_address(8000).rpartition(":")[2]
    return [
        sys.executable, "-m", "kvwatch", "serve", "--port", port,
        *(word for flag, preferred in listeners for word in (flag, free_address(preferred))),
        *flags, "--log-format", "json",
    ]  # fmt: skip


def _wait_for_engine(engine: ManagedProcess, stop: threading.Event) -> dict[str, str]:
    """Return what the engine says when it is ready."""
    found: dict[str, str] = {}

    def is_ready() -> bool:
        if stop.is_set():
            raise _Stopped
        for line in engine.text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                said = json.loads(line)
                if isinstance(said, dict) and said.get("event") == "ready":
                    found.update({name: str(value) for name, value in said.items()})
        return bool(found)

    engine.wait_until(is_ready, _ENGINE_SECONDS)
    if found["metrics"] == "off":
        raise ProcessError("there is nothing to scrape with --metrics-listen off; leave that flag out")
    return found


def _wait_for_scrape(prometheus: Server, target: str) -> None:
    api = PrometheusApi(prometheus.url)
    with contextlib.closing(api):
        prometheus.process.wait_until(lambda: api.is_scraped([target]), _SCRAPED_SECONDS)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()

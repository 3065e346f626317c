"""Everybody who listens to telemetry, in a process of their own: a collector, a scraper, and a reader of the stream.

    python telemetry_peers.py METRICS_PORT GRPC_PORT SCRAPE_SECONDS

Prints the collector's endpoint when it is up. Standard input says `on` and `off`: only between them somebody scrapes
and reads, so that nobody knocks at ports that are closed. Ends when standard input does. Does as little as it can, on
what the engine leaves of the processor: all these live on other machines, and their own work is not what is measured.
"""

import contextlib
import http.client
import os
import sys
import threading
import time
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).parents[1]))

from otlp_receiver import grpc_collector

from kvwatch.stream.contract import SUBSCRIBE, method_path

AFTER_TICK_SECONDS = 0.02
"""When a page is asked for: after the observatory has looked at the log, whose clock is the machine's."""
RETRY_SECONDS = 0.05


def scrape(port: int, period_seconds: float, is_on: threading.Event) -> None:
    """Read the metrics page once in a period."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    while True:
        is_on.wait()
        now = time.monotonic()
        time.sleep((now // period_seconds + 1) * period_seconds + AFTER_TICK_SECONDS - now)
        try:
            connection.request("GET", "/metrics")
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            connection.close()


def read_stream(port: int, is_on: threading.Event) -> None:
    """Take every event, as bytes: what a reader makes of them is its own affair."""
    while True:
        is_on.wait()
        with contextlib.suppress(grpc.RpcError), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in channel.unary_stream(method_path(SUBSCRIBE))(b""):
                pass
        time.sleep(RETRY_SECONDS)


def main() -> None:
    """Run until nobody needs it."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    metrics_port, grpc_port, period_seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    is_on = threading.Event()
    threading.Thread(target=scrape, args=[metrics_port, period_seconds, is_on], daemon=True).start()
    threading.Thread(target=read_stream, args=[grpc_port, is_on], daemon=True).start()
    with grpc_collector() as collected:
        print(collected.endpoint, flush=True)
        for line in sys.stdin:
            (is_on.set if line.strip() == "on" else is_on.clear)()


if __name__ == "__main__":
    main()

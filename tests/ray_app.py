"""The Ray Serve application as a process of its own, in the environment that `make test-ray` builds.

The environment variable KVWATCH_RAY_PYTHON names its interpreter. The engines run in this interpreter's environment.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

PYTHON = "KVWATCH_RAY_PYTHON"
ROOT = Path(__file__).parents[1]
START_SECONDS = 600.0
PATIENCE = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120"}
"""Ray gives a proxy five seconds, which a busy machine may not have."""

FLAGS = ("--num-blocks", "600", "--max-model-len", "1024", "--flight-dir", "off")


class RayApp:
    """A running application."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self.log = log

    def replicas(self) -> list[dict[str, Any]]:
        """Return the rows of the fleet."""
        rows: list[dict[str, Any]] = httpx.get(f"{self.url}/kvwatch/replicas", timeout=60).json()
        return rows

    def page(self) -> str:
        """Return the metrics of all replicas."""
        return httpx.get(f"{self.url}/metrics", timeout=60).text

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 300.0) -> None:
        """Wait until something holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not so after {seconds} s: {what}; {self.log.read_text()[-3000:]}"
            time.sleep(0.5)


@contextmanager
def ray_app(folder: Path, replicas: int) -> Iterator[RayApp]:
    """Serve the embedded model with so many replicas; wait until all have reported."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    log = folder / f"ray-{replicas}.log"
    python = str(Path(os.environ[PYTHON]).absolute())
    options = ["--port", str(port), "--replicas", str(replicas), "--cpus", "0.5"]
    engine = f"{sys.executable} -m kvwatch"
    command = [python, "-m", "kvwatch_ray", *options, "--command", engine, "--", *FLAGS]
    paths = [ROOT, ROOT / "engine", ROOT / "kernels", ROOT / "dashboards", ROOT / "deploy" / "ray"]
    # What begins with KVWATCH_ is a setting for the engines.
    environment = {name: value for name, value in os.environ.items() if name != PYTHON} | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        **PATIENCE,
    }
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    app = RayApp(f"http://127.0.0.1:{port}", log)
    try:
        app.wait_for(
            lambda: process.poll() is not None or b"kvwatch_ray: ready" in log.read_bytes(), "ready", START_SECONDS
        )
        assert process.poll() is None, log.read_text()[-3000:]
        app.wait_for(lambda: len(app.replicas()) == replicas, f"{replicas} reports")
        yield app
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)

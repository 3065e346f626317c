"""`kvwatch sidecar` as its users run it: a process of its own, found through the addresses that it announces."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from server_process import ServerProcess


@contextlib.contextmanager
def sidecar_process(*engines: str, flags: tuple[str, ...] = ()) -> Iterator[ServerProcess]:
    """Start a sidecar beside these engines on free ports and wait until it is ready."""
    command = [
        sys.executable, "-m", "kvwatch", "sidecar", "--metrics-listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0",
        "--admin-listen", "127.0.0.1:0",
        "--flight-dir", "off", "--log-format", "json",
        *(word for engine in engines for word in ("--engine", engine)), *flags,
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    sidecar = ServerProcess(process)
    try:
        ready = sidecar.wait_for("ready", 30)
        sidecar.metrics_url = str(ready["metrics"])
        yield sidecar
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        assert process.stderr is not None
        process.stderr.close()

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from peers.servers import Server, ServerFailed, free_port

CHILD = "import time\nwhile True: time.sleep(0.01)"
PARENT = f"import subprocess, sys, http.server\nsubprocess.Popen([sys.executable, '-c', {CHILD!r}])\n"
SERVE = "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()"


class Running:
    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        command = [sys.executable, "-c", PARENT + SERVE, str(self.port)]
        self.server = Server(command, {"GREETING": "hello"}, folder / "log", is_ours=False)
        self.server.wait_ready(f"http://127.0.0.1:{self.port}/")
        self.processes = [each for each in psutil.Process().children(recursive=True) if self._is_ours(each)]

    def _is_ours(self, process: psutil.Process) -> bool:
        return process.environ().get("GREETING") == "hello"

    def states(self) -> set[str]:
        return {process.status() for process in self.processes}

    def wait_for(self, states: set[str]) -> bool:
        deadline = time.monotonic() + 60
        while not self.states() <= states:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    found = Running(tmp_path)
    yield found
    found.server.end()


def test_a_frozen_server_stands_still_with_its_children(running: Running) -> None:
    assert len(running.processes) == 2

    running.server.freeze()
    assert running.wait_for({psutil.STATUS_STOPPED})
    spent = running.server.cpu_seconds()
    time.sleep(0.3)
    assert running.server.cpu_seconds() == spent

    running.server.thaw()
    assert running.wait_for({psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING})


def test_a_frozen_server_ends_with_its_children(running: Running) -> None:
    running.server.freeze()

    running.server.end()

    gone, alive = psutil.wait_procs(running.processes, timeout=60)
    assert len(gone) == 2, alive


def test_a_frozen_server_does_not_outlive_whoever_started_it(tmp_path: Path) -> None:
    port = free_port()
    start = (
        "import os, pathlib, signal, sys; from peers.servers import Server\n"
        f"server = Server([sys.executable, '-c', {PARENT + SERVE!r}, '{port}'], {{'GREETING': 'bye'}},"
        f" pathlib.Path({str(tmp_path / 'log')!r}), is_ours=False)\n"
        f"server.wait_ready('http://127.0.0.1:{port}/'); server.freeze(); print('up', flush=True); signal.pause()"
    )
    paths = os.pathsep.join([str(Path(__file__).parents[2] / "perf"), os.environ.get("PYTHONPATH", "")])
    starter = subprocess.Popen(
        [sys.executable, "-c", start], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": paths}
    )  # fmt: skip
    assert starter.stdout is not None
    assert starter.stdout.readline() == b"up\n"
    servers = [
        each for each in psutil.Process(starter.pid).children(recursive=True) if each.environ().get("GREETING") == "bye"
    ]

    starter.kill()
    starter.communicate()

    gone, alive = psutil.wait_procs(servers, timeout=60)
    assert len(gone) == 2, alive


def test_variables_of_this_environment_stay_out_of_others(running: Running) -> None:
    assert "PYTHONPATH" not in running.processes[0].environ()
    assert running.processes[0].environ()["PATH"] == os.environ["PATH"]


def test_a_server_that_ends_at_once_is_reported_with_its_words(tmp_path: Path) -> None:
    server = Server([sys.executable, "-c", "import sys; sys.exit('no such model')"], {}, tmp_path / "log", is_ours=True)

    with pytest.raises(ServerFailed, match=r"status 1(.|\n)*no such model"):
        server.wait_ready(f"http://127.0.0.1:{free_port()}/")
    server.end()

"""The child process of a replica: a small program stands for the engine, since only start and end are of interest."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvwatch_ray.child import EngineNotStarted, EngineProcess

READY = (
    "import json, sys, time; print(json.dumps({'event': 'loading'}), file=sys.stderr);"
    "print(json.dumps({'event': 'ready', 'api': 'http://127.0.0.1:5/v1', 'metrics': 'm', 'admin': 'a', 'grpc': 'g'}),"
    " file=sys.stderr, flush=True); time.sleep(600)"
)


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_it_is_found_by_what_it_announces_and_ended() -> None:
    ended = threading.Event()
    engine = EngineProcess([sys.executable, "-c", READY], [], "ray-0", ended.set)

    assert engine.addresses is not None
    assert engine.addresses.api == "http://127.0.0.1:5"
    engine.stop()
    wait_until_gone(engine.pid)
    assert not ended.wait(0.2)


def test_whoever_started_it_is_told_of_its_end() -> None:
    ended = threading.Event()
    engine = EngineProcess([sys.executable, "-c", READY], [], "ray-0", ended.set)

    os.kill(engine.pid, signal.SIGKILL)

    assert ended.wait(60)


def test_one_that_does_not_start_says_why() -> None:
    program = "import sys; sys.exit('kvwatch: --num-blcks is unknown')"
    with pytest.raises(EngineNotStarted, match="num-blcks"):
        EngineProcess([sys.executable, "-c", program], [], "ray-0", lambda: None)
    with pytest.raises(EngineNotStarted, match="No such file"):
        EngineProcess(["/nowhere/kvwatch"], [], "ray-0", lambda: None)


def test_it_ends_with_its_parent_however_that_ends() -> None:
    program = (
        "import sys, threading; from kvwatch_ray.child import EngineProcess;"
        f"engine = EngineProcess([sys.executable, '-c', {READY!r}], [], 'ray-0', lambda: None);"
        "print(engine.pid, flush=True); threading.Event().wait()"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_running(child)
        parent.kill()
        parent.wait(30)
    wait_until_gone(child)

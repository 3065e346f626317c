"""A flame graph of this very process, drawn by py-spy, which looks at it from outside a hundred times a second."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SAMPLES_PER_SECOND = 100
_START_SECONDS = 1.0
_STOP_SECONDS = 60.0
_SET_PTRACER = 0x59616D61
"""`PR_SET_PTRACER` of prctl(2): whom Linux' Yama allows to look into this process, who is not its child."""
_ANYBODY = ctypes.c_ulong(-1)


@dataclass
class FlameGraph:
    """What has become of it."""

    path: Path
    reason: str = ""
    """Why there is none; empty if there is one."""


@contextmanager
def flame_graph(path: Path) -> Iterator[FlameGraph]:
    """Sample what runs inside; afterwards the answer says whether the SVG was written. Never raises on its own."""
    graph = FlameGraph(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    sampler = _start(graph)
    try:
        yield graph
    finally:
        if sampler is not None:
            _stop(sampler, graph)


def _start(graph: FlameGraph) -> "subprocess.Popen[str] | None":
    """Start the sampler and give it time to find out whether it may look."""
    _allow_to_look()
    command = [
        str(Path(sys.executable).with_name("py-spy")), "record", "--pid", str(os.getpid()), "--output", str(graph.path),
        "--format", "flamegraph", "--rate", str(_SAMPLES_PER_SECOND), "--duration", "unlimited",
        "--nonblocking",  # threads that wait for each other in loops must not be stopped one by one
    ]  # fmt: skip
    try:
        sampler = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        graph.reason = f"py-spy cannot be started ({error.strerror}); `pip install py-spy` brings it"
        return None
    time.sleep(_START_SECONDS)
    if sampler.poll() is not None:
        graph.reason = _said(sampler)
        return None
    return sampler


def _stop(sampler: "subprocess.Popen[str]", graph: FlameGraph) -> None:
    sampler.send_signal(signal.SIGINT)
    try:
        sampler.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        sampler.kill()
    said = _said(sampler)
    if not graph.path.exists():
        graph.reason = said


def _said(sampler: "subprocess.Popen[str]") -> str:
    """Return the last words of a sampler that has ended."""
    words = [line.strip() for line in sampler.communicate()[0].splitlines() if line.strip()]
    return " / ".join(words[-3:]) or f"py-spy ended with {sampler.returncode}"


def _allow_to_look() -> None:
    """Let a child look into this process where Linux allows that to its parents alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PTRACER, _ANYBODY, 0, 0, 0)

"""Runs `kvwatch bench` as its users do, in this process or in one of its own."""

import argparse
import json
import subprocess
import sys
from typing import Any

import pytest

from kvwatch.bench.command import COMMAND

PROGRAM = "import argparse, sys; from bench_runs import run; sys.exit(run(sys.argv[1:]))"


def run(words: list[str]) -> int:
    """Run it with these words; return its exit status."""
    parser = argparse.ArgumentParser(prog="kvwatch bench")
    COMMAND.add_arguments(parser)
    return COMMAND.run(parser.parse_args(words))


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    """Run it in this process with `--json`; return its exit status and the report (None if there is none)."""
    status = run([*words, "--json"])
    text = capsys.readouterr().out
    return status, json.loads(text) if text else None


def bench_process(*words: str) -> "subprocess.Popen[str]":
    """Start it as a process."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
        cwd=__file__.rsplit("/", 1)[0],
    )  # fmt: skip

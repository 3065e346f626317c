"""`kvwatch tail`, as a command in a process of its own."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from stream_stage import StreamStage, stream_stage

from kvwatch.errors import ConfigError
from kvwatch.stream.access import StreamOptions
from kvwatch.stream.tail import COMMAND, TOKEN_VARIABLE

PROGRAM = (
    # Whoever runs the tests in the background of a shell has its children ignore interrupts.
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "import argparse, sys; from kvwatch.errors import KVWatchError; from kvwatch.stream.tail import COMMAND\n"
    "parser = argparse.ArgumentParser(); COMMAND.add_arguments(parser)\n"
    "try: sys.exit(COMMAND.run(parser.parse_args()))\n"
    "except KVWatchError as error: sys.exit(f'error: {error}')\n"
)


def started(
    stage: StreamStage | str, *words: str, environment: dict[str, str] | None = None
) -> "subprocess.Popen[str]":
    address = stage if isinstance(stage, str) else stage.address
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "--address", address, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )


def tail(stage: StreamStage | str, *words: str, environment: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Run it to its end; return status, output and errors."""
    process = started(stage, *words, environment=environment)
    out, errors = process.communicate(timeout=60)
    return process.returncode, out, errors


class Following:
    """A tail that goes on, and the objects that it prints."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.objects: list[dict[str, object]] = []
        self.notes: list[str] = []
        self._readers = [threading.Thread(target=read) for read in (self._read_out, self._read_notes)]
        for reader in self._readers:
            reader.start()

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.objects.append(json.loads(line))

    def _read_notes(self) -> None:
        assert self.process.stderr is not None
        self.notes += list(self.process.stderr)

    def wait_for(self, kind: str, number: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.of(kind)) < number:
            assert time.monotonic() < deadline, f"{len(self.of(kind))} of {number} {kind} lines"
            time.sleep(0.02)

    def of(self, kind: str) -> list[dict[str, object]]:
        return [each for each in self.objects if each["kind"] == kind]

    def end(self) -> int:
        status = None
        for _ in range(4):  # whoever sees nothing happen presses the keys again
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                status = self.process.wait(20)
                break
        assert status is not None, "it does not end"
        for reader in self._readers:
            reader.join(10)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return status


@contextmanager
def following(stage: StreamStage | str, *words: str) -> Iterator[Following]:
    tail = Following(started(stage, "--follow", "--json", *words))
    try:
        yield tail
    finally:
        if tail.process.poll() is None:
            tail.process.kill()
            tail.end()


@pytest.fixture
def stage() -> Iterator[StreamStage]:
    with stream_stage() as stage:
        stage.step(30)
        yield stage


def test_it_prints_the_last_events_and_ends(stage: StreamStage) -> None:
    status, out, errors = tail(stage)

    first, *lines = out.splitlines()
    assert (status, errors) == (0, "")
    assert first.startswith(f"-- epoch {stage.server.epoch}, from event {stage.log.head - 20}")
    assert len(lines) == 20
    assert " step.completed " in lines[-1]


def test_it_prints_as_many_as_asked_for_as_json(stage: StreamStage) -> None:
    status, out, _ = tail(stage, "--json", "--lines", "7")

    first, *objects = map(json.loads, out.splitlines())
    assert status == 0
    assert first["kind"] == "started"
    assert [each["seq"] for each in objects] == list(range(stage.log.head - 7, stage.log.head))


def test_a_filter_leaves_the_rest_out_and_ends_too(stage: StreamStage) -> None:
    status, out, _ = tail(stage, "--json", "--since", "0", "--event", "request.queued", "--event", "step.completed")

    names = {json.loads(line).get("event") for line in out.splitlines()[1:]}
    assert status == 0
    assert names == {"request.queued", "step.completed"}


def test_from_a_snapshot_it_prints_the_state(stage: StreamStage) -> None:
    used = len(stage.engine.used())

    status, out, _ = tail(stage, "--from-snapshot")

    assert status == 0
    assert f"state before event {stage.log.head}: device: {used} used" in out.splitlines()[1]


def test_an_idle_engine_ends_it_at_once() -> None:
    with stream_stage() as stage:
        status, out, _ = tail(stage)
    assert (status, len(out.splitlines())) == (0, 1)


def test_following_it_goes_on_until_interrupted(stage: StreamStage) -> None:
    with following(stage, "--lines", "0") as tail:
        tail.wait_for("started", 1)
        head = stage.log.head
        stage.step(10)
        tail.wait_for("event", stage.log.head - head)
        assert [each["seq"] for each in tail.of("event")] == list(range(head, stage.log.head))
        assert tail.process.poll() is None
        assert tail.end() != 0


def test_following_it_survives_a_restart_of_the_engine_and_says_so() -> None:
    with stream_stage() as first:
        address = first.address
        tail = Following(started(first, "--follow", "--json", "--lines", "0"))
        try:
            tail.wait_for("started", 1)
            first.step(5)
            tail.wait_for("event", first.log.head)
            first.observatory.stop()
            with stream_stage(options=StreamOptions(listen=address)) as second:
                tail.wait_for("started", 2)
                tail.wait_for("snapshot", 1)
                seen = len(tail.of("event"))
                second.step(5)
                tail.wait_for("event", seen + second.log.head)
                assert [each["epoch"] for each in tail.of("started")] == [first.server.epoch, second.server.epoch]
        finally:
            tail.end()
        assert "trying again" in tail.notes[0]


def test_a_tail_that_is_killed_gives_up_its_place(stage: StreamStage) -> None:
    with following(stage) as tail:
        tail.wait_for("started", 1)
        assert stage.server.num_subscribers == 1
        tail.process.kill()
        deadline = time.monotonic() + 60
        while stage.server.num_subscribers:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        tail.end()


def test_a_reader_that_has_had_enough_is_no_error(stage: StreamStage) -> None:
    process = started(stage, "--follow")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    stage.step(10)

    status = process.wait(30)

    assert status == 0
    assert process.stderr.read() == ""
    process.stderr.close()


def test_what_is_wrong_is_said_in_a_line(stage: StreamStage) -> None:
    for words, message in [
        (("--event", "request.finish"), "did you mean request.finished"),
        (("--since", "99999"), "in the future"),
        (("--token-file", "/nonexistent"), "--token-file: /nonexistent cannot be read"),
    ]:
        status, out, errors = tail(stage, *words)
        assert (status, out) == (1, "")
        assert message in errors
        assert "Traceback" not in errors

    status, _, errors = tail("127.0.0.1:1")
    assert status == 1
    assert "is the engine running" in errors


def test_the_token_is_found_where_the_server_finds_it(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# first\nsecret\n", encoding="utf-8")
    with stream_stage(options=StreamOptions(listen="127.0.0.1:0", token_file=str(path))) as stage:
        assert tail(stage)[0] == 1
        assert tail(stage, "--token-file", str(path))[0] == 0
        assert tail(stage, environment={TOKEN_VARIABLE: str(path)})[0] == 0


def test_an_empty_token_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("\n", encoding="utf-8")
    parser = argparse.ArgumentParser()
    COMMAND.add_arguments(parser)

    with pytest.raises(ConfigError, match="holds no token"):
        COMMAND.run(parser.parse_args(["--token-file", str(path)]))


def test_importing_the_command_does_not_import_grpc() -> None:
    program = "import sys, kvwatch.stream.tail; print('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"

"""What `kvwatch serve` does on SIGUSR2."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import structlog
from recording_stage import RecordingStage, recorder_settings

from kvwatch_engine.serve.signals import dump_on_signal


@dataclass(frozen=True)
class Waiting:
    """Waits until something is true."""

    seconds: float = 10

    def until(self, path: Path) -> list[Path]:
        deadline = time.monotonic() + self.seconds
        while not (found := list(path.glob("*.kvrec"))):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return found


@pytest.fixture(autouse=True)
def sigusr2() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, before)


def send(times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGUSR2)


def test_the_signal_writes_the_flight_recorder_out(tmp_path: Path) -> None:
    stage = RecordingStage(recorder_settings(tmp_path, record_dir=None, flight_dir=tmp_path))
    stage.run(5)

    with dump_on_signal() as dumps:
        dumps.attach(stage.part)
        send()
        stage.part.poll()
        assert len(Waiting().until(tmp_path)) == 1

    stage.close()


def test_a_signal_that_can_do_nothing_says_so_and_does_no_harm(tmp_path: Path) -> None:
    stage = RecordingStage(recorder_settings(tmp_path))

    with structlog.testing.capture_logs() as lines:
        for part in (None, stage.part):
            with dump_on_signal() as dumps:
                dumps.attach(part)
                send()

    stage.close()
    assert [line["log_level"] for line in lines] == ["warning", "warning"]
    assert all("--flight-dir" in str(line) for line in lines)


def test_a_signal_that_comes_before_the_server_has_begun_or_after_it_has_stopped_does_no_harm() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)

    with structlog.testing.capture_logs() as lines, dump_on_signal():
        send()
    send()

    assert "still starting" in str(lines)


def test_who_took_the_signal_before_takes_it_again() -> None:
    taken = []
    signal.signal(signal.SIGUSR2, lambda *_: taken.append(1))

    with dump_on_signal():
        pass
    send()

    assert taken == [1]


def test_a_storm_of_signals_does_not_flood_the_log(tmp_path: Path) -> None:
    stage = RecordingStage(recorder_settings(tmp_path, record_dir=None, flight_dir=tmp_path))

    with structlog.testing.capture_logs() as lines, dump_on_signal() as dumps:
        dumps.attach(stage.part)
        begin = time.monotonic()
        for _ in range(300):
            send()
            stage.part.poll()
        seconds = time.monotonic() - begin

    stage.close()
    refused = [line for line in lines if "could not" in line["event"]]
    assert 1 <= len(refused) <= 1 + seconds

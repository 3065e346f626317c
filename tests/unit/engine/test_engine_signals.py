"""What `kvwatch serve` does on SIGUSR2."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import structlog
from recording_stage import RecordingStage, recorder_settings

from kvwatch_engine.serve_signals import dump_on_signal


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


def test_the_signal_writes_the_flight_recorder_out(tmp_path: Path) -> None:
    stage = RecordingStage(recorder_settings(tmp_path, record_dir=None, flight_dir=tmp_path))
    stage.run(5)
    before = signal.getsignal(signal.SIGUSR2)

    with dump_on_signal(stage.part):
        os.kill(os.getpid(), signal.SIGUSR2)
        stage.part.poll()
        assert len(Waiting().until(tmp_path)) == 1

    assert signal.getsignal(signal.SIGUSR2) == before
    stage.close()


def test_a_signal_that_can_do_nothing_says_so_and_does_no_harm(tmp_path: Path) -> None:
    stage = RecordingStage(recorder_settings(tmp_path))

    with structlog.testing.capture_logs() as lines:
        for part in (None, stage.part):
            with dump_on_signal(part):
                os.kill(os.getpid(), signal.SIGUSR2)

    stage.close()
    assert [line["log_level"] for line in lines] == ["warning", "warning"]
    assert all("--flight-dir" in str(line) for line in lines)

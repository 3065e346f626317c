"""A process that is killed without warning leaves a flight recorder that shows its last steps, exactly."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import recorded_process
from recorded_process import digest

from kvwatch.ledger.pace import POLL_SECONDS
from kvwatch.recorder.reader import Recording
from kvwatch.recorder.replay import Target, ledger_at

Told = tuple[int, int, str]
"""Step, number of the next event, digest of the state: what the engine said of itself."""


@contextlib.contextmanager
def killed_after(seconds: float, mode: str, folder: Path, seed: int) -> Iterator[list[Told]]:
    """Run the process, kill it `seconds` after its first word; give what it had said by then."""
    program = Path(recorded_process.__file__)
    process = subprocess.Popen(
        [sys.executable, str(program), mode, str(folder), str(seed)], stdout=subprocess.PIPE, text=True
    )
    told: list[Told] = []
    has_begun = threading.Event()

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith("\n"):
                step, seq, state = line.split()
                told.append((int(step), int(seq), state))
                has_begun.set()

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        assert has_begun.wait(60), "the process says nothing"
        time.sleep(seconds)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        listener.join(10)
        assert process.stdout is not None
        process.stdout.close()
    yield told


def check(path: Path, told: list[Told]) -> tuple[int, int]:
    """Compare every state that lies in a recording; return how many there are and the number of the next event."""
    with Recording(path) as recording:
        span = recording.span
        assert span is not None
        first = next(frame.span.first_seq for frame in recording.frames if frame.kind.name == "STATE")
        inside = [each for each in told if first <= each[1] <= span.end_seq][-20:]
        for _, seq, state in inside:
            assert digest(ledger_at(recording, Target(seq=seq - 1)).to_snapshot()) == state
        ledger_at(recording)
    return len(inside), span.end_seq


@pytest.mark.parametrize("seed", range(8))
def test_a_kill_in_the_middle_of_writes_costs_at_most_the_events_that_were_being_written(
    tmp_path: Path, seed: int
) -> None:
    with killed_after(0.2 + 0.037 * seed, "parts", tmp_path, seed) as told:
        (ring,) = tmp_path.glob("*.kvring")

        num_checked, end_seq = check(ring, told)

        assert num_checked == min(20, len(told)) or num_checked > 5
        assert end_seq >= told[-1][1]  # whoever speaks had been recorded
        for path in sorted(tmp_path.glob("*.kvrec"))[-3:]:
            with contextlib.suppress(StopIteration):  # killed before its state was written
                check(path, told)


@pytest.mark.parametrize("seed", range(2))
def test_after_a_kill_under_load_replay_shows_the_last_steps(tmp_path: Path, seed: int) -> None:
    with killed_after(5 * POLL_SECONDS, "observatory", tmp_path, seed) as told:
        (ring,) = tmp_path.glob("*.kvring")

        num_checked, end_seq = check(ring, told)

        assert num_checked > 5
        # What came since the observatory's last look is lost: a fifth; on a busy machine it may come late.
        steps_shown = sum(seq <= end_seq for _, seq, _ in told) / len(told)
        assert steps_shown > 0.5
        shown = subprocess.run(
            [sys.executable, "-c", _REPLAY, str(ring)], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        assert "not closed: the process was killed" in shown
        assert f"after event {end_seq - 1}," in shown
        assert "capacity 40 = empty" in shown


_REPLAY = """
import argparse, sys
from kvwatch.recorder.command import REPLAY_COMMAND
parser = argparse.ArgumentParser()
REPLAY_COMMAND.add_arguments(parser)
sys.exit(REPLAY_COMMAND.run(parser.parse_args(sys.argv[1:])))
"""

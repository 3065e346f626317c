"""`kvwatch serve` records what it serves, on disk and in its flight recorder, through signals and kills."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess, serve_process
from tiny_models import make_tiny_model

from kvwatch.ledger.pace import POLL_SECONDS
from kvwatch.recorder.reader import Recording
from kvwatch.recorder.replay import ledger_at
from kvwatch.telemetry import events as ev
from kvwatch.telemetry.schema import Event

PROMPT = "the secret of the flight recorder " * 3
SECRET_WORD = "secret"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=512)


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    with serve_process(
        model, "--served-model-name", "tiny", "--num-blocks", "100", "--engine-name", "pod/1",
        "--record-dir", str(tmp_path / "rec"), "--flight-dir", str(tmp_path / "flight"), "--flight-bytes", "1MiB",
    ) as running:  # fmt: skip
        yield running


def complete(server: ServerProcess, max_tokens: int = 12) -> None:
    with server.openai() as client:
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=max_tokens, extra_body={"ignore_eos": True})


def read_events(path: Path) -> list[Event]:
    with Recording(path) as recording:
        return [event for item in recording.items() if isinstance(item, list) for event in item]


def test_what_was_served_is_recorded_without_its_text_and_a_signal_writes_the_last_seconds_out(
    server: ServerProcess, tmp_path: Path
) -> None:
    complete(server)
    time.sleep(0.5)
    server.process.send_signal(signal.SIGUSR2)
    dump = Path(str(server.wait_for("the flight recorder was written out", 20)["file"]))
    complete(server)
    assert server.terminate() == 0

    assert dump.parent == tmp_path / "flight"
    with Recording(dump) as recording:
        assert recording.header.reason == "signal"
        assert ledger_at(recording).requests == {}
    assert any(isinstance(event, ev.RequestFinished) for event in read_events(dump))
    (path,) = (tmp_path / "rec").glob("*.kvrec")
    with Recording(path) as recording:
        assert recording.is_complete
        assert recording.header.identity == {"engine": "pod/1", "dp_rank": "0", "model_name": "tiny"}
        assert recording.header.config["num_blocks"] == "100"
        ledger = ledger_at(recording)
        assert (ledger.num_running, ledger.pool("device").num_used) == (0, 0)
        assert ledger.pool("device").num_cached > 0
    events = read_events(path)
    assert [event.seq for event in events] == list(range(events[0].seq, events[-1].seq + 1))
    finished = [event for event in events if isinstance(event, ev.RequestFinished)]
    assert [event.generated_tokens for event in finished] == [12, 12]
    for file in (*(tmp_path / "rec").iterdir(), *(tmp_path / "flight").iterdir()):
        with Recording(file) as recording:
            assert not any(SECRET_WORD in repr(item) for item in recording.items())
    assert all(event.token_ids is None for event in events if isinstance(event, ev.BlocksStored))


def test_a_killed_server_leaves_what_it_did_last(server: ServerProcess, tmp_path: Path) -> None:
    complete(server, max_tokens=30)
    time.sleep(3 * POLL_SECONDS)  # it has been looked at
    server.process.kill()
    server.process.wait(10)

    (ring,) = (tmp_path / "flight").glob("*.kvring")
    with Recording(ring) as recording:
        ledger = ledger_at(recording)
        assert ledger.pool("device").num_cached > 0
    assert any(isinstance(event, ev.RequestFinished) for event in read_events(ring))


def keep_asking(server: ServerProcess, max_tokens: int) -> None:
    """Be served until the server is gone."""
    with contextlib.suppress(Exception):
        while True:
            complete(server, max_tokens)


def test_a_server_that_is_killed_under_load_leaves_its_last_steps_to_the_replay_command(
    server: ServerProcess, tmp_path: Path
) -> None:
    # Of different lengths: equal ones end in one step, and nobody runs until the next.
    clients = [threading.Thread(target=keep_asking, args=(server, 50 + 9 * number)) for number in range(6)]
    for client in clients:
        client.start()
    (ring,) = (tmp_path / "flight").glob("*.kvring")
    deadline = time.monotonic() + 60
    while sum(isinstance(event, ev.RequestFinished) for event in read_events(ring)) < 8:
        assert time.monotonic() < deadline, "nobody is served"
        time.sleep(0.1)
    killed_ns = time.monotonic_ns()
    server.process.kill()
    server.process.wait(10)
    for client in clients:
        client.join(60)

    steps = [event for event in read_events(ring) if isinstance(event, ev.StepCompleted)]
    command = [sys.executable, "-m", "kvwatch", "replay", str(ring), "--step", str(steps[-1].step), "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert shown.returncode == 0, shown.stderr
    assert f'"step": {steps[-1].step}' in shown.stdout
    assert len(steps) > 50
    assert killed_ns - steps[-1].time_ns < 10e9, "the last seconds are missing"
    with Recording(ring) as recording:
        ledger = ledger_at(recording)
    assert ledger.num_running + ledger.num_waiting > 0, "it was killed under load"
    assert ledger.pool("device").num_used > 0

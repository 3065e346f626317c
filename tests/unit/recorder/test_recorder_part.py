"""The recorder as a part of a running observatory."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from naive_engine import NaiveEngine
from recording_stage import make_headers, record_files, recorder_settings

from kvwatch.errors import ExporterError
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.observatory import Observatory
from kvwatch.recorder.part import RecorderPart
from kvwatch.recorder.reader import Recording
from kvwatch.recorder.replay import ledger_at
from kvwatch.telemetry.log import EventLog


class Stage:
    def __init__(self, folder: Path, **overrides: object) -> None:
        self.folder = folder
        self.log = EventLog(4096)
        self.engine = NaiveEngine(self.log)
        settings = recorder_settings(folder, flight_dir=folder / "flight", **overrides)
        self.part = RecorderPart(settings, make_headers(self.log), lambda: self.observatory.mirror)
        self.observatory = Observatory(
            self.log,
            self.engine,
            EngineIdentity("test"),
            metrics_listen="127.0.0.1:0",
            parts=[self.part],
            view_interval_seconds=0,
            render_interval_seconds=0,
        )

    def wait_until_recorded(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            with Recording(self.ring) as recording:
                if recording.span is not None and recording.span.end_seq == self.log.head:
                    return
            assert time.monotonic() < deadline, "the recorder does not catch up"
            time.sleep(0.02)

    @property
    def ring(self) -> Path:
        path = self.part.ring_path
        assert path is not None
        return path


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.observatory.stop()


def test_what_the_engine_does_is_in_ring_and_file(stage: Stage) -> None:
    stage.observatory.start()
    for act in range(12):
        stage.engine.step([(0, 0), (1, act), (act, 1)])
    stage.wait_until_recorded()

    with Recording(stage.ring) as recording:
        assert ledger_at(recording).differences(stage.engine.snapshot()) == []
    stage.observatory.stop()

    (path,) = record_files(stage.folder)
    with Recording(path) as recording:
        assert recording.is_complete
        assert ledger_at(recording).differences(stage.engine.snapshot()) == []


def test_a_trigger_from_another_thread_is_answered_with_the_file(stage: Stage) -> None:
    stage.observatory.start()
    stage.engine.step([(0, 0), (1, 0)])
    stage.wait_until_recorded()

    path = stage.part.trigger("admin/../call").result(timeout=10)

    assert path.parent == stage.folder / "flight"
    with Recording(path) as recording:
        assert recording.header.reason == "admin/../call"
        assert ledger_at(recording).differences(stage.engine.snapshot()) == []


def test_what_is_lost_behind_the_cursor_is_on_the_page_beside_what_is_lost_before_it(stage: Stage) -> None:
    stage.observatory.start()
    stage.engine.step([(0, 0)])
    stage.wait_until_recorded()
    host, port = stage.observatory.metrics_address or ("", 0)

    page = httpx.get(f"http://{host}:{port}/metrics", timeout=5, trust_env=False).text

    for subscriber in ("recorder", "recorder-files", "recorder-flight"):
        lines = [
            line
            for line in page.splitlines()
            if "telemetry_dropped_total{" in line and f'subscriber="{subscriber}"' in line
        ]
        assert len(lines) == 1
        assert lines[0].endswith(" 0.0")


def test_a_folder_that_cannot_be_used_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    stage = Stage(tmp_path / "file" / "recordings")

    with pytest.raises(ExporterError, match="--record-dir or its permissions"):
        stage.observatory.start()
    assert not stage.observatory.is_running


def test_a_trigger_that_comes_at_the_end_is_still_answered(stage: Stage) -> None:
    stage.observatory.start()
    stage.engine.step([(0, 0)])
    stage.wait_until_recorded()
    answer = stage.part.trigger("last words")

    stage.observatory.stop()

    assert answer.result(timeout=1).exists()

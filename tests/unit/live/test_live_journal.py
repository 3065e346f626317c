"""What was changed live and ended with the process is said at the next start."""

from pathlib import Path

import structlog
from builders import NullModel, make_settings
from live_stage import ASK

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.engine import Engine
from kvwatch_engine.live import LiveEngine, LiveJournal


def test_what_is_live_and_not_declared_outlives_the_process_as_a_line_of_the_log(tmp_path: Path) -> None:
    journal = LiveJournal(tmp_path / "cache", "a/b c.1.[::1]:8000")
    model = NullModel()
    model.block_size = 4
    engine = Engine(make_settings(), model, EventLog(), lambda _outputs: None, memory=model)
    control = LiveEngine(engine, journal=journal)
    engine.start()
    try:
        control.apply({"max_num_seqs": 4, "prefix_cache": False}, **ASK)
        control.apply({"prefix_cache": True}, **ASK)
    finally:
        engine.stop()  # as little as a kill does it write anything

    with structlog.testing.capture_logs() as lines:
        assert LiveJournal(tmp_path / "cache", "a/b c.1.[::1]:8000").take() == {"max_num_seqs": 4}
        assert LiveJournal(tmp_path / "cache", "a/b c.1.[::1]:8000").take() == {}, "it is said once"

    (line,) = lines
    assert line["live"] == {"max_num_seqs": 4}
    assert "what is declared wins" in line["event"]


def test_declaring_or_reverting_everything_leaves_nothing_to_say(tmp_path: Path) -> None:
    journal = LiveJournal(tmp_path, "a")
    journal.write({"watermark": "0.1", "max_prefill_chunk": None})
    assert [path.name for path in tmp_path.iterdir()] == ["live-a.json"]

    journal.write({})

    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_read_or_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "live-a.json").write_text("no JSON")
    assert LiveJournal(tmp_path, "a").take() == {}
    (tmp_path / "file").write_text("in the way")

    with structlog.testing.capture_logs() as lines:
        LiveJournal(tmp_path / "file", "a").write({"watermark": "8"})

    assert [line["event"] for line in lines] == ["live settings could not be noted"]

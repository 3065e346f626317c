from pathlib import Path

import msgspec
import pytest

from kvwatch.bench.errors import SavedRunError
from kvwatch.bench.outcome import RequestOutcome
from kvwatch.bench.saved import SavedRun, compare, read_run, saved_requests, write_run
from kvwatch.bench.scenarios import Scale, Variation
from kvwatch.bench.words import TextScale

SCALE = Scale(
    limit_tokens=640, pressure_tokens=80, text=TextScale(1.25, 1), variations=(Variation("salt one", salt="one"),)
)


def outcome(number: int, *texts: str, **more: object) -> RequestOutcome:
    fields: dict[str, object] = {
        "index": number,
        "scenario": "short",
        "fingerprint": f"asks {number}",
        "temperature": 0.0,
        "intended_seconds": 1.0,
        "sent_seconds": 1.0,
        "first_token_seconds": 2.0,
        "end_seconds": 4.0,
        "texts": list(texts),
        "status": "ok",
    }
    return msgspec.convert({**fields, **more}, RequestOutcome)


def saved(*outcomes: RequestOutcome, has_texts: bool = True) -> SavedRun:
    return SavedRun(seed=7, scale=SCALE, requests=saved_requests(outcomes, 0.25, has_texts=has_texts))


def test_a_run_survives_its_file(tmp_path: Path) -> None:
    run = saved(outcome(1, "b", "ü\n"), outcome(0, "a", prompt_tokens=5))
    write_run(tmp_path / "run.json", run)
    assert read_run(tmp_path / "run.json") == run
    assert [request.index for request in run.requests] == [0, 1]
    assert (run.requests[0].waiting_seconds, run.requests[0].service_seconds) == (1.0, 2.0)


def test_equal_answers_are_identical_with_texts_or_with_hashes() -> None:
    ours = [outcome(0, "same"), outcome(1, "one", "two")]
    for has_texts in (True, False):
        found = compare(ours, saved(*ours, has_texts=has_texts), "f")
        assert (found.compared, found.identical, found.differing, found.not_comparable) == (2, 2, [], 0)


def test_a_difference_says_where_the_texts_part() -> None:
    found = compare([outcome(3, "x", "abcdef")], saved(outcome(3, "x", "abcXYZ")), "f")
    (difference,) = found.differing
    assert (difference.index, difference.choice, difference.character) == (3, 1, 3)
    assert (difference.here, difference.there) == ("def", "XYZ")


def test_a_text_that_is_the_beginning_of_the_other_differs_at_its_end() -> None:
    (difference,) = compare([outcome(0, "abc")], saved(outcome(0, "ab")), "f").differing
    assert (difference.character, difference.here, difference.there) == (2, "c", "")


def test_hashes_alone_say_that_but_not_where() -> None:
    (difference,) = compare([outcome(0, "abc")], saved(outcome(0, "abX"), has_texts=False), "f").differing
    assert (difference.character, difference.here, difference.there) == (None, None, None)


@pytest.mark.parametrize(
    "more", [{"fingerprint": "other"}, {"temperature": 0.8}, {"status": "failed"}, {"status": "hung_up"}, {"index": 9}]
)
def test_what_cannot_be_compared_is_counted_and_not_compared(more: dict[str, object]) -> None:
    found = compare([outcome(0, "a"), outcome(1, "b", **more)], saved(outcome(0, "a"), outcome(1, "c")), "f")
    assert (found.compared, found.identical) == (1, 1)
    assert found.not_comparable == (2 if "index" in more else 1)


@pytest.mark.parametrize(
    "content", [None, b"", b"{}", b"[1]", b"\xff", b'{"format": "other", "seed": 1}', b'{"x": ' + b"[" * 100_000]
)
def test_what_is_no_saved_run_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SavedRunError, match="--save"):
        read_run(path)


def test_a_folder_that_does_not_exist_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(SavedRunError, match="nowhere"):
        write_run(tmp_path / "nowhere" / "run.json", saved(outcome(0, "a")))

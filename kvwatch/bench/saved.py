"""Runs as files: every request with its times and its texts, or their hashes; and how two runs differ."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from kvwatch.bench.errors import SavedRunError
from kvwatch.bench.outcome import RequestOutcome
from kvwatch.bench.scenarios import Scale
from kvwatch.bench.statistics import waiting_seconds

_EXCERPT_CHARS = 60
_MAX_LISTED = 100


class SavedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a run."""

    index: int
    scenario: str
    fingerprint: str
    status: str
    error_kind: str
    temperature: float
    intended_seconds: float
    sent_seconds: float
    ttft_seconds: float | None
    e2e_seconds: float
    waiting_seconds: float
    service_seconds: float
    prompt_tokens: int | None
    output_tokens: int
    cached_tokens: int | None
    finish_reasons: list[str | None]
    hashes: list[str]
    """sha256 of each choice's text."""
    texts: list[str] | None
    """None unless they were asked for."""
    answer_id: str = ""
    """What the server calls its answer."""


class SavedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run."""

    format: Literal["kvwatch-bench-run"] = "kvwatch-bench-run"
    version: Literal[1] = 1
    seed: int
    scale: Scale
    """Lengths and tokens per word that the requests were made with; `--compare` makes the same ones."""
    requests: list[SavedRequest]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was answered differently."""

    index: int
    scenario: str
    choice: int
    """First choice that differs."""
    character: int | None
    """Where the texts part; None if one of the runs kept hashes only."""
    here: str | None
    """This run's text from there on, its beginning."""
    there: str | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two runs' answers."""

    file: str
    compared: int
    """Greedy requests that both runs asked and that both were answered whole."""
    identical: int
    differing: list[Difference]
    """The first hundred, by number."""
    not_comparable: int
    """Requests that only one run asked, or that one was not answered, or that were sampled or broken off."""


def saved_requests(
    outcomes: Sequence[RequestOutcome], threshold_seconds: float, *, has_texts: bool
) -> list[SavedRequest]:
    """Return the requests in the order of their numbers."""
    return [
        _saved(outcome, waiting_seconds(outcome, threshold_seconds), has_texts=has_texts)
        for outcome in sorted(outcomes, key=lambda outcome: outcome.index)
    ]


def write_run(path: Path, run: SavedRun) -> None:
    """Write a run as JSON.

    Raises:
        SavedRunError: it cannot be written.
    """
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n")
    except OSError as error:
        raise SavedRunError(f"--save: {path} cannot be written ({error.strerror}); name another file") from error


def read_run(path: Path) -> SavedRun:
    """Read a run.

    Raises:
        SavedRunError: there is none, or it is of another version.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=SavedRun)
    except OSError as error:
        raise SavedRunError(f"--compare: {path} cannot be read ({error.strerror}); name a file of --save") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SavedRunError(f"--compare: {path} is no file that --save of this version wrote ({error})") from error


def compare(outcomes: Sequence[RequestOutcome], earlier: SavedRun, file: str) -> Comparison:
    """Return which greedy requests were answered differently from an earlier run."""
    theirs = {request.index: request for request in earlier.requests}
    pairs = [(ours, theirs[ours.index]) for ours in outcomes if _is_comparable(ours, theirs)]
    differing = [(ours, there) for ours, there in pairs if _hashes(ours.texts) != there.hashes]
    differing.sort(key=lambda pair: pair[0].index)
    num_asked = len({outcome.index for outcome in outcomes} | theirs.keys())
    return Comparison(
        file=file,
        compared=len(pairs),
        identical=len(pairs) - len(differing),
        differing=[_difference(ours, there) for ours, there in differing[:_MAX_LISTED]],
        not_comparable=num_asked - len(pairs),
    )


def _is_comparable(ours: RequestOutcome, theirs: Mapping[int, SavedRequest]) -> bool:
    there = theirs.get(ours.index)
    return (
        there is not None
        and ours.fingerprint == there.fingerprint
        and ours.temperature == 0
        and ours.status == there.status == "ok"
    )


def _difference(ours: RequestOutcome, there: SavedRequest) -> Difference:
    hashes = _hashes(ours.texts)
    choice = next((i for i, (a, b) in enumerate(zip(hashes, there.hashes, strict=False)) if a != b), 0)
    if there.texts is None:
        return Difference(
            index=ours.index, scenario=ours.scenario, choice=choice, character=None, here=None, there=None
        )  # fmt: skip
    here, other = ours.texts[choice], there.texts[choice]
    pairs = enumerate(zip(here, other, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(here), len(other)))
    return Difference(
        index=ours.index, scenario=ours.scenario, choice=choice, character=place,
        here=here[place : place + _EXCERPT_CHARS], there=other[place : place + _EXCERPT_CHARS],
    )  # fmt: skip


def _saved(outcome: RequestOutcome, waiting: float, *, has_texts: bool) -> SavedRequest:
    return SavedRequest(
        index=outcome.index,
        scenario=outcome.scenario,
        fingerprint=outcome.fingerprint,
        status=outcome.status,
        error_kind=outcome.error_kind,
        temperature=outcome.temperature,
        intended_seconds=outcome.intended_seconds,
        sent_seconds=outcome.sent_seconds,
        ttft_seconds=outcome.ttft_seconds,
        e2e_seconds=outcome.e2e_seconds,
        waiting_seconds=waiting,
        service_seconds=outcome.e2e_seconds - waiting,
        prompt_tokens=outcome.prompt_tokens,
        output_tokens=outcome.num_output_tokens,
        cached_tokens=outcome.cached_tokens,
        finish_reasons=outcome.finish_reasons,
        hashes=_hashes(outcome.texts),
        texts=outcome.texts if has_texts else None,
        answer_id=outcome.answer_id,
    )


def _hashes(texts: Sequence[str]) -> list[str]:
    return [hashlib.sha256(text.encode()).hexdigest() for text in texts]

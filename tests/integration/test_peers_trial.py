"""`make bench-peers` with one side, on a real server in a process of its own."""

import dataclasses
from pathlib import Path

import pytest
from peers.loads import LOADS, Words
from peers.sides import kvwatch_side
from peers.stage import running
from peers.trial import run_trial, warm_up
from tiny_models import make_shallow_model

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_load_is_asked_whole_and_shared_prefixes_are_found(tmp_path: Path) -> None:
    model = make_shallow_model(tmp_path / "model")
    words = Words(model)
    burst = dataclasses.replace(LOADS["burst"], num_requests=6, concurrency=3, num_output_tokens=8)
    shared = dataclasses.replace(LOADS["shared-prefix"], num_requests=4, concurrency=1, num_output_tokens=4)

    with running([kvwatch_side(model, tmp_path / "flight")], tmp_path) as (side,):
        warm_up(side, burst, words)
        first, second = (run_trial(side, burst, words, number) for number in (0, 1))
        found = run_trial(side, shared, words, 0)

    assert first.output_tokens == second.output_tokens == 6 * 8
    assert first.ttft.count == 6
    assert 0 < first.itl.count <= 6 * 7
    assert first.seconds > 0
    assert not first.cached_tokens, "no text is asked twice"
    assert not second.cached_tokens
    assert found.cached_tokens is not None
    assert 3 * 900 < found.cached_tokens <= 3 * 922

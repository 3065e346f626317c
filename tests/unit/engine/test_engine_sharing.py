"""Parallel samples share the prompt: computed once, held once, copied only where two would write."""

from dataclasses import replace

import pytest
from builders import Recorder, make_core, make_request, run_until_idle

from kvwatch.telemetry.events import (
    BlocksAllocated,
    BlocksCopied,
    BlocksReleased,
    FirstToken,
    RequestAdmitted,
    RequestFinished,
    SequenceForked,
    StepScheduled,
)
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.core import EngineCore


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
@pytest.mark.parametrize("max_batch_tokens", [8, 64])
def test_three_samples_compute_the_prompt_once_and_copy_the_partial_block_twice(
    enable_prefix_cache: bool, max_batch_tokens: int
) -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, enable_prefix_cache=enable_prefix_cache, max_batch_tokens=max_batch_tokens)
    prompt = list(range(4, 14))  # 10 tokens at block size 4: two full blocks and a half

    core.add(make_request("r", prompt, n=3, max_tokens=6, ignore_eos=True, temperature=1.0), 0)
    tokens = run_until_idle(core)

    events = recorder.drain()
    computed = sum(sum(e.num_tokens) for e in events if isinstance(e, StepScheduled))
    assert computed == len(prompt) + 3 * (6 - 1), "the newest token of each sequence is never computed"
    prefill_blocks = [e for e in events if isinstance(e, BlocksAllocated) and e.reason == "prefill"]
    assert [len(e.block_ids) for e in prefill_blocks] == [3], "full blocks are held once"
    copies = [e for e in events if isinstance(e, BlocksCopied)]
    assert [len(e.sources) for e in copies] == [1, 1], "the last owner writes in place"
    assert {e.sources[0] for e in copies} == {prefill_blocks[0].block_ids[2]}
    forks = [e for e in events if isinstance(e, SequenceForked)]
    assert [(e.parent, e.child, e.num_blocks) for e in forks] == [(0, 1, 3), (0, 2, 3)]
    assert len([e for e in events if isinstance(e, FirstToken)]) == 1
    finished = [e for e in events if isinstance(e, RequestFinished)]
    assert [(e.generated_tokens, e.peak_blocks) for e in finished] == [(18, 2 + 3 * 2)]
    assert {key: len(value) for key, value in tokens.items()} == {("r", 0): 6, ("r", 1): 6, ("r", 2): 6}
    assert core.manager.pool.num_used == 0


def test_a_prompt_of_whole_blocks_needs_no_copy() -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log)

    core.add(make_request("r", list(range(4, 12)), n=3, max_tokens=3, ignore_eos=True), 0)
    run_until_idle(core)

    assert not [e for e in recorder.drain() if isinstance(e, BlocksCopied)]


def test_a_stopped_leader_leaves_its_part_of_the_prompt_to_the_next_sequence() -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, max_batch_tokens=8)
    prompt = list(range(4, 30))
    core.add(make_request("r", prompt, n=2, max_tokens=3, ignore_eos=True), 0)
    core.step()

    core.stop_sequence("r", 0)
    tokens = run_until_idle(core)

    computed = sum(sum(e.num_tokens) for e in recorder.drain() if isinstance(e, StepScheduled))
    assert computed == len(prompt) + 2
    assert len(tokens["r", 1]) == 3
    assert core.manager.pool.num_used == 0


@pytest.mark.parametrize(
    ("num_tokens", "expected_hits"),
    [
        (7, 4),
        (8, 4),
        (9, 8),
    ],  # O05: a prompt of exactly n blocks loses the last one, since its last token is recomputed
)
def test_a_repeated_prompt_hits_all_full_blocks_but_never_its_last_token(num_tokens: int, expected_hits: int) -> None:
    """vllm-ascend#7965 reported as a fault what is right: 1024 tokens hit one block less than 1025."""
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log)
    prompt = list(range(10, 10 + num_tokens))

    for request_id in ("first", "second"):
        core.add(make_request(request_id, prompt, ignore_eos=True), 0)
        run_until_idle(core)

    first, second = (e for e in recorder.drain() if isinstance(e, RequestAdmitted))
    assert (first.queried_tokens, first.hit_tokens) == (num_tokens, 0)
    assert (second.queried_tokens, second.hit_tokens) == (num_tokens, expected_hits)
    assert first.granularity_lost_tokens == second.granularity_lost_tokens == num_tokens - expected_hits


def test_an_abort_in_prefill_frees_blocks_at_once() -> None:
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log, max_batch_tokens=8)
    core.add(make_request("r", list(range(4, 30))), 0)
    core.step()
    assert core.manager.pool.num_used == 7

    outputs = core.abort("r")

    assert [output.finish_reason for output in outputs] == ["abort"]
    assert core.manager.pool.num_used == 0
    assert [e.reason for e in recorder.drain() if isinstance(e, BlocksReleased)] == ["aborted"]


def cached_hashes(core: EngineCore) -> set[bytes]:
    return {content for content in core.manager.pool.hashes if content is not None}


def test_different_weights_and_block_sizes_never_share_a_hash() -> None:
    seen: set[bytes] = set()
    for settings in ({}, {"weights_fingerprint": "b"}, {"block_size": 8}):
        core = make_core(None, None, **settings)
        core.add(make_request("r", list(range(4, 24))), 0)
        run_until_idle(core)
        assert cached_hashes(core)
        assert seen.isdisjoint(cached_hashes(core))
        seen |= cached_hashes(core)


def test_different_salts_never_share_a_block_and_equal_ones_do() -> None:
    """CVE-2025-46570: the time to the first token tells whether somebody else sent the same prefix."""
    log = EventLog()
    recorder = Recorder(log)
    core = make_core(log=log)
    for request_id, salt in (("none", ""), ("a", "a"), ("b", "b"), ("a again", "a")):
        request = make_request(request_id, list(range(4, 24)), max_tokens=1)
        core.add(replace(request, cache_salt=salt), 0)
        run_until_idle(core)

    hits = {e.request: e.hit_tokens for e in recorder.drain() if isinstance(e, RequestAdmitted)}
    assert hits == {"none": 0, "a": 0, "b": 0, "a again": 16}

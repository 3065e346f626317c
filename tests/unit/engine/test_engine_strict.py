"""Strict prefix cache: what is found is compared; duplicates that nobody can find are counted."""

import pytest
from builders import Recorder, make_core, make_groups, make_request, run_until_idle

from kvwatch.telemetry.events import BlocksDuplicated, PrefixMismatched, RequestAdmitted
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.block_hash import HashChain, root_hash
from kvwatch_engine.memory.strict import StoredContents

PROMPT = list(range(4, 24))
"""20 tokens: five blocks of 4, of which four can be found."""


def hits(recorder: Recorder) -> list[int]:
    return [event.hit_tokens for event in recorder.drain() if isinstance(event, RequestAdmitted)]


def ask(core: EngineCore, name: str, prompt: list[int], max_tokens: int = 4) -> dict[tuple[str, int], list[int]]:
    core.add(make_request(name, prompt, max_tokens=max_tokens, ignore_eos=True), 0)
    return run_until_idle(core)


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_what_is_equal_is_hit_as_without_strict_mode(windows: tuple[int | None, ...]) -> None:
    found = []
    for is_strict in (False, True):
        log = EventLog()
        core, recorder = (
            make_core(log=log, is_prefix_cache_strict=is_strict, groups=make_groups(*windows)),
            Recorder(log),
        )
        answers = [ask(core, f"r{number}", [*PROMPT[:10], *PROMPT[number:]]) for number in (0, 0, 1, 5, 0)]
        found.append((answers, hits(recorder)))
        assert not [event for event in recorder.events if isinstance(event, PrefixMismatched)]
    assert found[0] == found[1]
    assert sum(found[0][1]) > 0


def test_a_block_that_holds_something_else_is_a_miss_that_is_counted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Somebody else's tokens are put under the hash of the third block, as a collision would."""
    log = EventLog()
    core, recorder = make_core(log=log, is_prefix_cache_strict=True), Recorder(log)
    right = ask(core, "a", PROMPT)["a", 0]
    contents = core.manager.contents
    assert contents is not None
    (content,) = [each for each, held in contents._contents.items() if held[1] == tuple(PROMPT[8:12])]
    root, _ = contents._contents[content]
    contents._contents[content] = (root, (1, 2, 3, 4))

    assert ask(core, "b", PROMPT)["b", 0] == right
    assert hits(recorder) == [0, 8]
    (mismatch,) = [event for event in recorder.events if isinstance(event, PrefixMismatched)]
    assert (mismatch.request, mismatch.block_hash, mismatch.index) == ("b", content, 2)
    assert "holds other tokens than its hash says" in caplog.text
    core.check_integrity()


def test_a_mismatch_is_counted_once_though_its_request_waits_for_many_steps() -> None:
    log = EventLog()
    core, recorder = make_core(log=log, is_prefix_cache_strict=True, max_num_seqs=1), Recorder(log)
    ask(core, "a", PROMPT)
    contents = core.manager.contents
    assert contents is not None
    contents._contents.clear()
    core.add(make_request("long", [30], max_tokens=20, ignore_eos=True), 0)
    core.add(make_request("b", PROMPT), 0)
    run_until_idle(core)
    assert len([event for event in recorder.drain() if isinstance(event, PrefixMismatched)]) == 1


def test_contents_of_other_roots_and_those_that_nobody_saw_are_not_equal() -> None:
    contents, tokens = StoredContents(4), lambda start, end: PROMPT[start:end]
    chain = HashChain(root_hash([]), 4)
    hashes = chain.upto(5, tokens)
    contents.note(chain.root, hashes[:4], 0, tokens)
    assert contents.num_equal(chain.root, hashes, tokens) == 4
    assert contents.num_equal(chain.root, hashes, lambda start, end: [0] * (end - start)) == 0
    lonely = HashChain(chain.root, 4)
    lonely.move_to(root_hash([]))
    assert contents.num_equal(chain.root, hashes[4:], tokens) == 0


def test_what_is_remembered_is_bounded_by_the_pool() -> None:
    core = make_core(is_prefix_cache_strict=True, num_blocks=13)
    for number in range(60):
        ask(core, f"r{number}", [number % 50, (7 * number) % 50, *PROMPT])
    contents = core.manager.contents
    assert contents is not None
    assert 0 < len(contents) <= 2 * 13 + 12


def test_content_that_two_computed_at_the_same_time_is_found_once_and_counted_once_more() -> None:
    log = EventLog()
    core, recorder = make_core(log=log), Recorder(log)
    for name in ("a", "b"):
        core.add(make_request(name, PROMPT[:9], max_tokens=1), 0)
    run_until_idle(core)
    (duplicated,) = [event for event in recorder.drain() if isinstance(event, BlocksDuplicated)]
    assert (duplicated.request, len(duplicated.block_ids)) == ("b", 2)
    pool = core.manager.pool
    assert [pool.hashes[block] for block in duplicated.block_ids] == [None, None]
    assert all(pool.hashes[block] is not None for block in duplicated.originals)
    assert (pool.num_used, pool.num_cached) == (0, 2)
    assert ask(core, "c", PROMPT[:9])
    assert hits(recorder) == [0, 0, 8]

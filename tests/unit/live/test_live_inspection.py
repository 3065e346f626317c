"""What can be looked up in an engine equals what its pool and its queue hold."""

from dataclasses import replace

import pytest
from builders import FakeClock, make_core, make_groups, make_request, run_until_idle

from kvwatch.control import BlockInfo, BlockOwner, BlockQuery, RequestQuery
from kvwatch.errors import ChangeRefused
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.request import RequestOrigin
from kvwatch_engine.core import EngineCore
from kvwatch_engine.live import inspection
from kvwatch_engine.live.inspection import inspect_blocks, inspect_prefixes, inspect_requests

SHARED = list(range(4, 16))
CLOCK = FakeClock()


def loaded_core(num_blocks: int = 21) -> EngineCore:
    """`first` has ended and left its prefix of 3 blocks; `second` and `twins` share it and run; `third` waits."""
    CLOCK.now_ns = 1_000_000_000
    core = make_core(log=EventLog(clock=CLOCK), num_blocks=num_blocks)

    def submit(name: str, prompt: list[int], **sampling: object) -> None:
        request = make_request(name, prompt, ignore_eos=True, **sampling)
        core.add(replace(request, origin=RequestOrigin(tenant="blue")), CLOCK.monotonic_ns())

    submit("first", [*SHARED, 20], max_tokens=4)
    submit("gone", [40, 41, 42, 43, 44], max_tokens=1)
    run_until_idle(core)
    CLOCK.advance(10)
    submit("second", [*SHARED, 21], max_tokens=20)
    submit("twins", [*SHARED, 22, 23], max_tokens=20, n=2)
    for _ in range(3):
        CLOCK.advance(1)
        core.step()
    core.scheduler.admission.pause.begin(600, "test", "")
    submit("third", [30] * 5)
    CLOCK.advance(1)
    core.step()
    return core


def test_blocks_come_with_state_owners_and_history() -> None:
    core = loaded_core()
    pool = core.manager.pool

    page = inspect_blocks(core, BlockQuery(limit=100))

    assert page.next_cursor is None
    assert [each.block_id for each in page.blocks] == list(range(1, 21))
    assert [each.ref_count for each in page.blocks] == pool.ref_counts[1:]
    assert [len(each.owners) for each in page.blocks] == pool.ref_counts[1:]
    by_state = {name: sum(each.state == name for each in page.blocks) for name in ("used", "cached", "empty")}
    assert by_state == {"used": pool.num_used, "cached": pool.num_cached, "empty": pool.num_empty}
    head = next(each for each in page.blocks if each.ref_count == 3)
    assert sorted(head.owners, key=lambda owner: (owner.request, owner.sequence)) == [
        BlockOwner("second", 0, 0), BlockOwner("twins", 0, 0), BlockOwner("twins", 1, 0),
    ]  # fmt: skip
    assert (head.num_hits, head.filled_slots, head.idle_seconds) == (2, 4, None)
    assert head.age_seconds == pytest.approx(14)
    cached = next(each for each in page.blocks if each.state == "cached")
    assert cached.idle_seconds == pytest.approx(14)
    empty = next(each for each in page.blocks if each.state == "empty")
    assert (empty.owners, empty.hash, empty.age_seconds, empty.filled_slots) == ([], None, None, 0)


@pytest.mark.parametrize("limit", [1, 3, 20])
def test_pages_together_hold_every_block_once(limit: int) -> None:
    core = loaded_core()
    seen: list[int] = []
    cursor: int | None = 0

    while cursor is not None:
        page = inspect_blocks(core, BlockQuery(cursor=cursor, limit=limit))
        seen += [each.block_id for each in page.blocks]
        assert len(page.blocks) <= limit
        cursor = page.next_cursor

    assert seen == list(range(1, 21))


def test_a_filter_that_matches_little_looks_at_so_many_blocks_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "MAX_SCAN", 8)
    core = loaded_core()
    found: list[BlockInfo] = []
    cursor: int | None = 0
    num_pages = 0

    while cursor is not None and num_pages < 10:
        page = inspect_blocks(core, BlockQuery(state="cached", cursor=cursor))
        found += page.blocks
        cursor, num_pages = page.next_cursor, num_pages + 1

    assert num_pages == 3
    assert len(found) == core.manager.pool.num_cached


def test_blocks_are_filtered_by_state_request_hash_and_age() -> None:
    core = loaded_core()
    table = core.manager.table(next(owner for owner in core.manager.owners() if owner.request == "second"))
    every = {each.block_id: each for each in inspect_blocks(core, BlockQuery()).blocks}

    of_request = inspect_blocks(core, BlockQuery(request="second")).blocks
    content = every[table[0]].hash
    assert content is not None
    of_hash = inspect_blocks(core, BlockQuery(hash_prefix=content[:12].upper())).blocks
    old = inspect_blocks(core, BlockQuery(min_age_seconds=12)).blocks

    assert {each.block_id for each in of_request} == set(table)
    assert [each.block_id for each in of_hash] == [table[0]]
    assert {each.block_id for each in old} == {
        block for block, each in every.items() if each.age_seconds is not None and each.age_seconds >= 12
    }
    assert inspect_blocks(core, BlockQuery(request="nobody")).blocks == []


def test_requests_say_where_they_are_and_why_they_wait_and_since_when() -> None:
    core = loaded_core()
    CLOCK.advance(5)

    page = inspect_requests(core, RequestQuery())

    second, twins, third = page.requests
    assert (second.request, second.state, second.wait_reason, second.waiting_seconds) == ("second", "running", "", None)
    assert (second.num_prompt_tokens, second.num_cached_tokens, second.tenant) == (13, 12, "blue")
    assert second.num_blocks == len(core.manager.table(next(iter(core.manager.owners()))))
    assert (second.num_shared_blocks, twins.num_shared_blocks, twins.num_sequences) == (3, 3, 2)
    assert second.num_generated_tokens == 4
    assert second.first_token_seconds is not None
    assert (third.state, third.wait_reason, third.queue_seconds) == ("waiting", "paused", None)
    assert third.waiting_seconds == pytest.approx(5)
    assert third.age_seconds == pytest.approx(6)
    assert [each.request for each in inspect_requests(core, RequestQuery(state="waiting")).requests] == ["third"]
    first_page = inspect_requests(core, RequestQuery(limit=2))
    assert first_page.next_cursor == third.arrival
    rest = inspect_requests(core, RequestQuery(limit=2, cursor=third.arrival))
    assert [each.request for each in rest.requests] == ["third"]


def test_a_preempted_request_says_in_whose_favour() -> None:
    core = make_core(num_blocks=9)
    for name in ("a", "b"):
        core.add(make_request(name, [5] * 9, max_tokens=12, ignore_eos=True), 0)
    while not any(each.num_preemptions for each in core.scheduler.lifecycle.requests()):
        core.step()

    (victim,) = [each for each in inspect_requests(core, RequestQuery()).requests if each.num_preemptions]

    assert (victim.request, victim.preempted_for, victim.state) == ("b", ["a"], "waiting")
    assert victim.num_blocks == 0


def test_the_tree_of_prefixes_names_its_largest_branches() -> None:
    core = loaded_core()

    top = inspect_prefixes(core, "blocks", 10)

    head, other = top.prefixes
    assert top.num_prefixes == 2
    assert top.is_complete
    assert (head.depth, head.num_used_blocks > other.num_used_blocks) == (4, True)
    assert head.num_blocks + other.num_blocks == sum(each is not None for each in core.manager.pool.hashes)
    assert head.num_tokens == head.num_blocks * 4
    assert (head.num_hits, other.num_hits) == (6, 0)
    assert inspect_prefixes(core, "hits", 1).prefixes == [head]


def test_blocks_and_prefixes_say_to_which_kv_group_they_belong() -> None:
    core = make_core(num_blocks=41, groups=make_groups(None, 8))
    core.add(make_request("a", list(range(4, 40)), max_tokens=2, ignore_eos=True), 0)
    run_until_idle(core)
    pool = core.manager.pool

    top = inspect_prefixes(core, "blocks", 10).prefixes
    found = inspect_blocks(core, BlockQuery()).blocks

    assert [each.group for each in top] == ["0", "1"]
    for group, branch in enumerate(top):
        held = [block for block in range(1, 41) if pool.hashes[block] is not None and pool.groups[block] == group]
        assert branch.num_blocks == len(held) > 0
    for each in found:
        assert each.group == (None if each.state == "empty" else str(pool.groups[each.block_id]))
    assert {each.group for each in found} == {None, "0", "1"}


def test_a_page_has_bounds() -> None:
    core = loaded_core()

    for limit in (0, -1, 1001):
        with pytest.raises(ChangeRefused, match="ask for 1 to 1000"):
            inspect_blocks(core, BlockQuery(limit=limit))
        with pytest.raises(ChangeRefused, match="ask for 1 to 1000"):
            inspect_requests(core, RequestQuery(limit=limit))
        with pytest.raises(ChangeRefused, match="ask for 1 to 1000"):
            inspect_prefixes(core, "blocks", limit)
    with pytest.raises(ChangeRefused, match="cursor -1"):
        inspect_blocks(core, BlockQuery(cursor=-1))

"""Several KV groups over one pool in the ledger: totals of each, blocks that change their group, contradictions."""

from builders import LedgerFollower, NullModel, make_core, make_groups, make_request, run_until_idle

from kvwatch.ledger.ledger import Ledger
from kvwatch.telemetry import events as ev
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import EngineSnapshot, GroupState, SequenceState, TierState


def snapshot(**changes: object) -> EngineSnapshot:
    values: dict[str, object] = {
        "seq": 0, "step": 0, "time_ns": 0, "block_size_tokens": 4, "block_bytes": 1, "watermark_blocks": 0,
        "max_queued_requests": 1, "max_queued_tokens": 1, "requests": [], "sequences": [],
        "tiers": [TierState("device", 8, [0] * 8, [None] * 8, [0] * 8)],
        "groups": [GroupState("0", 2), GroupState("1", 2, 8)],
        **changes,
    }  # fmt: skip
    return EngineSnapshot(**values)  # type: ignore[arg-type]


def loaded(**changes: object) -> Ledger:
    ledger = Ledger()
    ledger.load(snapshot(**changes))
    return ledger


def counts(ledger: Ledger) -> dict[str, tuple[int, int]]:
    return {name: (group.num_used, group.num_cached) for name, group in ledger.pool("device").groups.items()}


def completed(used: int, cached: int, empty: int, entries: int) -> ev.StepCompleted:
    return ev.StepCompleted(0, 0, 0, 0, 0, 0, [], [], used, cached, empty, entries, 0, 0, {})


def test_each_group_counts_its_own_blocks_and_a_block_may_change_its_group() -> None:
    ledger = loaded()
    for event in (
        ev.BlocksAllocated("a", 0, [1, 2], "prefill", group="0"),
        ev.BlocksAllocated("a", 0, [3, 4, 5], "prefill", group="1"),
        ev.BlocksStored([b"x", b"y"], [3, 4], None, group="1"),
        ev.BlocksReleased("a", 0, [4, 3], "window", group="1"),
    ):
        ledger.apply(event)
    assert counts(ledger) == {"0": (2, 0), "1": (1, 2)}
    assert ledger.check(completed(3, 2, 2, 3)) == []

    ledger.apply(ev.BlocksEvicted([b"x"], [3], [0], [0], [0], "pressure", "b", group="1"))
    ledger.apply(ev.BlocksAllocated("b", 0, [3], "prefill", group="0"))

    assert counts(ledger) == {"0": (3, 0), "1": (1, 1)}
    assert ledger.check(completed(4, 1, 2, 4)) == []
    assert ledger.pool("device").to_state().block_groups[1:6] == [0, 0, 0, 1, 1]
    assert ledger.pool("device").tables == {("a", 0): [1, 2, 5], ("b", 0): [3]}


def test_filled_slots_written_in_one_step_are_those_of_each_group() -> None:
    ledger = loaded()
    ledger.apply(ev.BlocksAllocated("a", 0, [1], "prefill", group="0"))
    ledger.apply(ev.BlocksAllocated("a", 0, [2], "prefill", group="1"))

    ledger.apply(ev.StepScheduled(["a"], [3], 3, 1, [1, 2], [3, 3]))

    pool = ledger.pool("device")
    assert (pool.num_filled_slots_of("0"), pool.num_filled_slots_of("1"), pool.num_filled_slots) == (3, 3, 6)
    ledger.apply(ev.BlocksReleased("a", 0, [2], "aborted", group="1"))
    assert (pool.num_filled_slots_of("0"), pool.num_filled_slots_of("1")) == (3, 0)


def test_a_block_that_two_groups_claim_is_a_fault() -> None:
    ledger = loaded()
    ledger.apply(ev.BlocksAllocated("a", 0, [1], "prefill", group="0"))

    ledger.apply(ev.BlocksAllocated("b", 0, [1], "prefill", group="1"))

    wrong = ledger.check(completed(1, 0, 6, 2))
    assert "block 1 was allocated to b though it was not empty" in wrong
    assert any(equation.startswith("device: capacity 7 != empty") for equation in wrong)


def test_a_fork_shares_in_each_group_what_the_event_says() -> None:
    tables = [SequenceState("a", 0, [1, 2, 3], group="0"), SequenceState("a", 0, [5, 6], group="1")]
    tier = TierState("device", 8, [0, 1, 1, 1, 0, 1, 1, 0], [None] * 8, [0] * 8, {}, [0, 0, 0, 0, 0, 1, 1, 0])
    ledger = loaded(tiers=[tier], sequences=tables)

    ledger.apply(ev.SequenceForked("a", 0, 1, 2, [1]))

    assert [group.num_shared for group in ledger.pool("device").groups.values()] == [2, 1]
    assert ledger.pool("device").tables["a", 1] == [1, 2, 5]


def test_a_group_that_nobody_told_of_exists_from_its_first_event_on() -> None:
    ledger = loaded(groups=[])
    ledger.pool("device").group("0").allocate(ev.BlocksAllocated("a", 0, [1], "prefill"))

    ledger.pool("device").group("3").allocate(ev.BlocksAllocated("a", 0, [2], "prefill", group="3"))

    assert counts(ledger) == {"0": (1, 0), "3": (1, 0)}
    assert ledger.pool("device").to_state().block_groups == [0, 0, 3, 0, 0, 0, 0, 0]


def test_a_sliding_group_tells_what_left_its_window_and_a_late_reader_sees_the_same() -> None:
    log = EventLog()
    core = make_core(NullModel(), log, num_blocks=60, groups=make_groups(None, 6))
    early = LedgerFollower(log, core.snapshot)
    core.add(make_request("a", [1] * 20, max_tokens=12, ignore_eos=True), 0)
    for _ in range(6):
        core.step()
        early.catch_up()

    late = LedgerFollower(log, core.snapshot)
    assert counts(late.ledger) == counts(early.ledger)
    assert counts(early.ledger)["0"][0] > counts(early.ledger)["1"][0] == 2
    run_until_idle(core)
    early.catch_up()
    assert early.ledger.differences(core.snapshot()) == []


def test_the_oldest_of_a_sequences_tables_is_given_back_first_and_whole() -> None:
    """Two tables of one sequence are still held by transfers, and the one that it has now has blocks of both."""
    first, second, now = [5, 1, 2], [5, 3, 1, 2], [5, 3, 1, 2, 4]
    ledger = loaded(groups=[GroupState("0", 2)])
    ledger.apply(ev.BlocksAllocated("a", 0, first, "prefill"))
    ledger.apply(ev.BlocksReused("a", 0, second[:1], []))
    ledger.apply(ev.BlocksAllocated("a", 0, second[1:2], "prefill"))
    ledger.apply(ev.BlocksReused("a", 0, second[2:], []))
    ledger.apply(ev.BlocksReused("a", 0, now[:4], []))
    ledger.apply(ev.BlocksAllocated("a", 0, now[4:], "decode"))

    ledger.apply(ev.BlocksReleased("a", 0, first[::-1], "preempted"))
    assert ledger.pool("device").tables == {("a", 0): second + now}
    ledger.apply(ev.BlocksReleased("a", 0, [3, 5], "window"))
    assert ledger.pool("device").tables == {("a", 0): [*second, 1, 2, 4]}
    ledger.apply(ev.BlocksReleased("a", 0, second[::-1], "preempted"))
    assert ledger.pool("device").tables == {("a", 0): [1, 2, 4]}

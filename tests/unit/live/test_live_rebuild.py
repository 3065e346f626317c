"""The cache of a serving engine is laid out anew: every token is read back from where it went, nothing else is kept."""

from typing import Any

import pytest
from builders import LedgerFollower, NullModel, Recorder, make_core, make_request
from builders import run_until_idle as run

from kvwatch.errors import ChangeFailed, ChangeRefused
from kvwatch.ledger.mirror import Mirror
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.events import BlocksLaidOut, BlocksStored, ConfigChanged, PoolRebuilt
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.cache import BlockLayout, KVGroup
from kvwatch_engine.contracts.step import Int64Array
from kvwatch_engine.core import EngineCore
from kvwatch_engine.live.changer import Changer, RebuildLimits
from kvwatch_engine.prefixes import PrefixDesk

PROMPTS = {f"r{i}": [4 + (i * 7 + j) % 40 for j in range(5 + 3 * i)] for i in range(4)}
NO_COOLDOWN = RebuildLimits(cooldown_seconds=0.0)
WINDOWED = (KVGroup(), KVGroup(window=6))


def loaded_core(model: NullModel | None = None, log: EventLog | None = None, **settings: Any) -> EngineCore:
    core = make_core(model, log, **{"num_blocks": 81, **settings})
    for request_id, prompt in PROMPTS.items():
        core.add(make_request(request_id, prompt, max_tokens=12, ignore_eos=True, n=2 if request_id == "r1" else 1), 0)
    core.add(make_request("like r3", PROMPTS["r3"], max_tokens=9, ignore_eos=True), 0)
    return core


def change(changer: Changer, changes: dict[str, Any]) -> Any:
    _, carry_out = changer.prepare(changes, [], actor="test", reason="to see", version=None)
    return carry_out()


@pytest.mark.parametrize("groups", [(KVGroup(),), WINDOWED])
def test_answers_are_the_same_whatever_the_block_size_becomes_meanwhile(groups: tuple[KVGroup, ...]) -> None:
    """The null model reads every token back through the block tables, at every step."""
    expected = run(loaded_core(groups=groups, num_blocks=200))
    log = EventLog()
    core = loaded_core(log=log, groups=groups, num_blocks=200)
    changer = Changer(core, NO_COOLDOWN)
    follower, recorder = LedgerFollower(log, core.snapshot), Recorder(log)
    seen: dict[tuple[str, int], list[int]] = {}
    sizes = [8, 1, 3, 16, 2, 5, 4]

    for number in range(1000):
        if not core.has_work:
            break
        for output in core.step():
            seen.setdefault((output.request_id, output.sequence), []).extend(output.token_ids)
        held = {sequence.owner: sequence.num_computed for each in core.scheduler.lifecycle.running
                for sequence in each.active_sequences()}  # fmt: skip
        change(changer, {"block_size": sizes[number % len(sizes)]})
        core.check_integrity()
        follower.catch_up()
        assert follower.ledger.limits.block_size_tokens == core.manager.block_size == core.settings.block_size
        assert follower.ledger.config == core.snapshot().config
        for owner, num_computed in held.items():
            assert len(core.manager.table(owner)) >= core.manager.blocks_for(num_computed)

    assert seen == expected
    assert core.manager.pool.num_used == 0
    laid_out = [event for event in recorder.drain() if isinstance(event, BlocksLaidOut)]
    assert any(len(set(event.block_ids)) < len(event.block_ids) for event in laid_out), "sharing survives"
    assert not [e for e in recorder.events if getattr(e, "reason", "") == "rebuild"], "nobody was computed again"


def test_running_requests_are_found_as_prefixes_again_and_the_others_are_not() -> None:
    core = make_core(num_blocks=41)
    core.add(make_request("gone", [5] * 12, max_tokens=1, ignore_eos=True), 0)
    run(core)
    core.add(make_request("runs", [6] * 17, max_tokens=30, ignore_eos=True), 0)
    core.step()
    recorder = Recorder(core.log)

    outcome = change(Changer(core, NO_COOLDOWN), {"block_size": 8})
    core.add(make_request("like gone", [5] * 12, max_tokens=1, ignore_eos=True), 0)
    core.add(make_request("like runs", [6] * 17, max_tokens=1, ignore_eos=True), 0)
    core.step()

    assert outcome.num_cached_blocks_lost == 3
    stored = next(event for event in recorder.drain() if isinstance(event, BlocksStored))
    assert (stored.request, len(stored.hashes)) == ("runs", 2)
    run(core)


def test_the_pool_keeps_its_memory_unless_told_otherwise() -> None:
    core = make_core(num_blocks=41, watermark_blocks=4, watermark_ratio=0.1)
    changer = Changer(core, NO_COOLDOWN)

    outcome = change(changer, {"block_size": 8})

    assert [(c.key, c.old, c.new) for c in outcome.changes] == [("num_blocks", 41, 21), ("block_size", 4, 8)]
    assert (core.settings.watermark_blocks, outcome.is_rebuild) == (2, True)
    assert change(changer, {"block_size": 4}).changes[0].new == 41
    both = change(changer, {"block_size": 2, "num_blocks": 30, "max_num_seqs": 4})
    assert {c.key for c in both.changes} == {"block_size", "num_blocks", "max_num_seqs"}
    assert (core.settings.num_blocks, core.manager.pool.num_blocks, core.block_bytes) == (30, 30, 32)
    assert change(changer, {"block_size": 4, "kv_dtype": "int8"}).is_rebuild
    for size in (3, 7, 1, 2):  # whatever is rounded on the way, the way back leads back
        change(changer, {"block_size": size})
    change(changer, {"kv_dtype": "auto"})
    assert core.settings.num_blocks == 30


def test_another_type_has_everything_computed_again() -> None:
    expected = run(loaded_core())
    log = EventLog()
    core = loaded_core(log=log)
    changer, follower = Changer(core, NO_COOLDOWN), LedgerFollower(log, core.snapshot)
    seen: dict[tuple[str, int], list[int]] = {}
    for number in range(1000):
        if not core.has_work:
            break
        for output in core.step():
            seen.setdefault((output.request_id, output.sequence), []).extend(output.token_ids)
        if number % 5 == 4:
            running = {each.request_id for each in core.scheduler.lifecycle.running}
            preview = changer.preview({"kv_dtype": ["int8", "auto"][number % 2]}, [])
            outcome = change(changer, {"kv_dtype": ["int8", "auto"][number % 2]})
            if outcome.changes:
                assert set(outcome.preempted_requests) == running == set(preview.preempted_requests)
                assert any("texts may change" in note for note in preview.notes)
        core.check_integrity()
        follower.catch_up()

    assert seen == expected


def test_with_too_little_memory_for_both_caches_running_requests_are_computed_again() -> None:
    model = NullModel()
    core = loaded_core(model)
    for _ in range(4):
        core.step()
    model.spare_bytes = 100
    changer = Changer(core, NO_COOLDOWN)

    preview = changer.preview({"block_size": 8}, [])
    outcome = change(changer, {"block_size": 8})

    assert any("does not suffice for both" in note for note in preview.notes)
    assert (preview.extra_memory_bytes, len(outcome.preempted_requests)) == (0, 5)
    assert run(core).keys() == run(loaded_core()).keys()
    with pytest.raises(ChangeRefused, match="ask for fewer blocks"):
        change(changer, {"block_size": 4, "num_blocks": 1000})


def test_larger_blocks_hold_fewer_requests_and_who_yields_is_computed_again() -> None:
    """Half-filled blocks of 16 take more room than full ones of 1."""
    expected = run(loaded_core())
    core = loaded_core(block_size=1, num_blocks=200)
    for _ in range(6):
        core.step()
    changer = Changer(core, NO_COOLDOWN)

    preview = changer.preview({"block_size": 16, "num_blocks": 6}, [])
    outcome = change(changer, {"block_size": 16, "num_blocks": 6})

    assert 0 < len(outcome.preempted_requests) < 5
    assert outcome.preempted_requests == preview.preempted_requests
    core.check_integrity()
    left = run(core)
    assert all(expected[key][-len(tokens) :] == tokens for key, tokens in left.items())


def test_what_never_fits_is_refused_before_anything_changes() -> None:
    log = EventLog()
    core = loaded_core(log=log)
    for _ in range(3):
        core.step()
    before, changer = core.snapshot(), Changer(core, NO_COOLDOWN)

    for changes, said in (
        ({"block_size": 16, "num_blocks": 2}, "may need"),
        ({"block_size": 0}, "less than 1"),
        ({"block_size": 2048}, "more than 1024"),
        ({"kv_dtype": "int4"}, "none of|not one of"),
    ):
        assert not changer.preview(changes, []).is_possible
        with pytest.raises(ChangeRefused, match=said):
            change(changer, changes)

    after = core.snapshot()
    assert (after.tiers, after.sequences, after.config) == (before.tiers, before.sequences, before.config)


def test_a_rebuild_must_be_allowed_and_wait_for_the_last_one_and_be_short() -> None:
    core = loaded_core()
    with pytest.raises(ChangeRefused, match="start it with --allow-rebuild"):
        change(Changer(core), {"block_size": 8})
    changer = Changer(core, RebuildLimits(cooldown_seconds=3600.0))
    change(changer, {"block_size": 8})
    with pytest.raises(ChangeRefused, match=r"rebuilt 0\.\d s ago, and --rebuild-cooldown is 3600 s"):
        change(changer, {"block_size": 4})
    for _ in range(3):
        core.step()
    with pytest.raises(ChangeRefused, match="--max-rebuild-pause allows 1e-09 s"):
        change(Changer(core, RebuildLimits(max_pause_seconds=1e-9)), {"block_size": 4})


class BrokenMemory(NullModel):
    def relay(self, layout: BlockLayout, num_blocks: int, sources: Int64Array, destinations: Int64Array) -> None:  # noqa: ARG002
        raise MemoryError("there is none")

    def replace(self, layout: BlockLayout, num_blocks: int) -> None:  # noqa: ARG002
        self.slots = {}
        raise MemoryError("there is none")


@pytest.mark.parametrize("changes", [{"block_size": 8}, {"kv_dtype": "int8"}])
def test_memory_that_cannot_be_had_leaves_the_old_layout_and_every_answer(changes: dict[str, Any]) -> None:
    expected = run(loaded_core())
    log = EventLog()
    core = loaded_core(BrokenMemory(), log)
    recorder, follower = Recorder(log), LedgerFollower(log, core.snapshot)
    changer = Changer(core, NO_COOLDOWN)
    seen: dict[tuple[str, int], list[int]] = {}
    for _ in range(5):
        for output in core.step():
            seen.setdefault((output.request_id, output.sequence), []).extend(output.token_ids)
    config, version = core.snapshot().config, changer.state().version

    with pytest.raises(ChangeFailed, match=r"MemoryError\); it is as it was"):
        change(changer, changes)

    assert (core.snapshot().config, changer.state().version) == (config, version)
    core.check_integrity()
    follower.catch_up()
    for key, tokens in run(core).items():
        seen.setdefault(key, []).extend(tokens)
    assert seen == expected
    (event,) = [event for event in recorder.drain() if isinstance(event, PoolRebuilt)]
    assert (event.outcome, event.error) == ("failed", "MemoryError")
    assert not [event for event in recorder.events if isinstance(event, ConfigChanged)]


def test_metrics_of_a_rebuilt_pool_are_those_of_the_new_one() -> None:
    log = EventLog()
    core = loaded_core(log=log)
    mirror, cursor = Mirror(log.clock, 0), log.subscribe("test")
    mirror.load(core.snapshot())
    for _ in range(3):
        core.step()

    change(Changer(core, NO_COOLDOWN), {"block_size": 8})
    core.step()
    mirror.apply(cursor.read(10_000))
    mirror.publish()

    view = mirror.view
    assert view.value(m.POOL_REBUILDS, "rebuilt") == 1
    assert view.value(m.KV_BLOCK_SIZE_TOKENS) == 8
    assert view.value(m.KV_BLOCK_BYTES) == 128
    assert view.value(m.KV_BLOCK_CAPACITY, "device") == 40
    assert view.value(m.CONFIG_VALUE, "block_size") == 8
    assert view.value(m.CONFIG_CHANGES, "block_size") == 1
    assert mirror.num_violations == 0
    assert mirror.ledger.differences(core.snapshot()) == []


@pytest.mark.parametrize("changes", [{"block_size": 8}, {"kv_dtype": "int8"}])
@pytest.mark.parametrize("fails", [False, True])
def test_pins_end_with_the_blocks_that_they_name(changes: dict[str, Any], fails: bool) -> None:
    log = EventLog()
    core = make_core(BrokenMemory() if fails else NullModel(), log, num_blocks=41)
    core.add(make_request("done", [5] * 12, max_tokens=1, ignore_eos=True), 0)
    run(core)
    follower = LedgerFollower(log, core.snapshot)
    changer = Changer(core, NO_COOLDOWN)
    hashes = [content for content in core.manager.pool.hashes if content is not None]
    core.pins.add(hashes, 12, "test", "")

    preview = changer.preview(changes, [])
    if fails:
        with pytest.raises(ChangeFailed):
            change(changer, changes)
    else:
        change(changer, changes)

    assert any("1 pins end" in note for note in preview.notes)
    keeps_content = fails and "block_size" in changes
    assert len(core.pins) == int(keeps_content)
    assert core.manager.pool.num_idle_pinned == (3 if keeps_content else 0)
    core.check_integrity()
    follower.catch_up()


def test_a_block_whose_beginning_has_left_the_window_is_no_prefix() -> None:
    """With blocks of 4 and a window of 6, tokens from 8 on are left of 15; in a block of 16 the first 8 are missing."""
    core = make_core(groups=WINDOWED, num_blocks=81)
    core.add(make_request("long", [5] * 15, max_tokens=20, ignore_eos=True), 0)
    core.step()
    sliding = core.manager.groups[1]
    (owner,) = sliding.tables
    assert sliding.num_passed[owner] == 2

    change(Changer(core, NO_COOLDOWN), {"block_size": 16})
    for _ in range(3):
        core.step()

    assert sliding.first_token(owner) == 8
    table = sliding.tables[owner]
    assert core.manager.pool.hashes[table[0]] is None, "it became full, and is not whole"
    assert core.manager.pool.hashes[core.manager.table(owner)[0]] is not None, "that of the other group is"
    run(core)


def test_what_a_reset_took_out_of_sight_stays_so_in_blocks_of_another_size() -> None:
    """Requests that shared a block before the reset have roots of their own since: it can have only one name."""
    core = make_core(num_blocks=60, block_size=3)
    for name in ("one", "other"):
        core.add(make_request(name, [*range(4, 16), len(name)], max_tokens=12, ignore_eos=True), 0)
        core.step()
        core.step()
    assert any(count > 1 for count in core.manager.pool.ref_counts), "they share their prompts"

    PrefixDesk(core).reset(unpin=True, actor="test", reason="")
    change(Changer(core, RebuildLimits(cooldown_seconds=0.0)), {"block_size": 2})

    core.check_integrity()
    while core.has_work:
        core.step()
        core.check_integrity()

"""The pool of a serving engine gets another size: what is refused, what goes on, what is told."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import FakeClock, LedgerFollower, NullModel, Recorder, make_core, make_request, make_settings
from builders import run_until_idle as run

from kvwatch.control import LiveControl
from kvwatch.errors import ChangeFailed, ChangeRefused
from kvwatch.ledger.mirror import Mirror
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.events import BlocksRelocated, PoolRebuilt
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.contracts.request import FinishReason
from kvwatch_engine.contracts.step import Int64Array
from kvwatch_engine.core import EngineCore
from kvwatch_engine.engine import Engine
from kvwatch_engine.live import LiveEngine
from kvwatch_engine.resize import with_num_blocks
from kvwatch_engine.scheduling.request import RequestState, WaitReason

PROMPTS = {f"r{i}": [4 + (i * 7 + j) % 40 for j in range(5 + 3 * i)] for i in range(4)}


def resize(core: EngineCore, num_blocks: int, reason: str = "") -> None:
    core.resize(core.prepare_resize(num_blocks, reason))


def loaded_core(model: NullModel | None = None, log: EventLog | None = None, **settings: Any) -> EngineCore:
    core = make_core(model, log, **settings)
    for request_id, prompt in PROMPTS.items():
        core.add(make_request(request_id, prompt, max_tokens=12, ignore_eos=True, n=2 if request_id == "r1" else 1), 0)
    return core


def test_answers_are_the_same_whatever_happens_to_the_pool_meanwhile() -> None:
    """The null model reads every token back through the block tables, at every step."""
    expected = run(loaded_core())
    log = EventLog()
    core = loaded_core(log=log)
    follower, recorder = LedgerFollower(log, core.snapshot), Recorder(log)
    seen: dict[tuple[str, int], list[int]] = {}
    sizes = [60, 12, 90, 12]  # 12: as small as it can be, since a request may need so many

    for number in range(1000):
        if not core.has_work:
            break
        for output in core.step():
            seen.setdefault((output.request_id, output.sequence), []).extend(output.token_ids)
        resize(core, max(sizes[number % len(sizes)], core.manager.pool.num_used + 1))
        core.check_integrity()
        follower.catch_up()

    assert seen == expected
    assert core.manager.pool.num_used == 0
    assert any(isinstance(event, BlocksRelocated) for event in recorder.drain()), "else nothing was shown"


def test_a_pool_that_running_requests_cannot_fit_is_refused_and_nothing_changes() -> None:
    core = loaded_core()
    for _ in range(6):
        core.step()
    before = core.snapshot()
    used = core.manager.pool.num_used

    with pytest.raises(ChangeRefused, match=rf"hold {used} blocks, but a pool of {used} has {used - 1}.*at least"):
        resize(core, used)

    after = core.snapshot()
    assert (after.tiers, after.sequences, after.config) == (before.tiers, before.sequences, before.config)
    run(core)


def test_a_pool_in_which_a_waiting_request_could_never_end_is_refused() -> None:
    core = make_core()
    core.add(make_request("long", [5] * 20, max_tokens=21), 0)

    with pytest.raises(ChangeRefused, match=r"request long may need 10 blocks.*ask for at least 11"):
        resize(core, 10)

    resize(core, 11)
    assert len(run(core)["long", 0]) > 0


def test_too_few_blocks_for_anything_are_refused() -> None:
    with pytest.raises(ChangeRefused, match="at least 2"):
        resize(make_core(), 1)
    with pytest.raises(ChangeRefused, match=r"watermark keeps 5 .* at least 7"):
        resize(make_core(watermark_blocks=5), 6)


def test_a_watermark_that_was_given_as_a_ratio_follows_the_pool() -> None:
    settings = make_settings(num_blocks=101, watermark_blocks=10, watermark_ratio=0.1)

    assert with_num_blocks(settings, 51).watermark_blocks == 5
    assert with_num_blocks(replace(settings, watermark_ratio=None), 51).watermark_blocks == 10


def test_the_scheduler_keeps_to_the_new_watermark() -> None:
    core = make_core(num_blocks=11, watermark_blocks=1, watermark_ratio=0.1)
    resize(core, 21)
    core.add(make_request("first", [5] * 8, max_tokens=8, ignore_eos=True), 0)
    core.step()
    core.add(make_request("second", [6] * 61, max_tokens=1, ignore_eos=True), 0)  # 16 blocks; 17 are free, 2 are kept

    core.step()

    second = core.scheduler.lifecycle.find("second")
    assert second is not None
    assert (second.state, second.wait_reason) == (RequestState.WAITING, WaitReason.BLOCKS)


def test_a_pool_that_memory_has_no_room_for_is_refused() -> None:
    """Memory is had when it is used: the process would be killed hours later, when the pool fills."""
    model = NullModel()
    model.spare_bytes = 10 * model.slot_bytes * 4
    core = loaded_core(model)

    with pytest.raises(
        ChangeRefused, match=r"a pool of 52 blocks of 64 bytes takes 3328 bytes, but 3264 are there.*51"
    ):
        resize(core, 52)

    resize(core, 51)
    model.spare_bytes = 0
    resize(core, 45)
    run(core)


class BrokenMemory(NullModel):
    def rebuild(self, num_blocks: int, sources: Int64Array, destinations: Int64Array) -> None:  # noqa: ARG002
        raise MemoryError("there is none")


def test_memory_that_cannot_be_had_leaves_everything_as_it_was() -> None:
    log = EventLog()
    core = loaded_core(BrokenMemory(), log)
    recorder = Recorder(log)
    for _ in range(4):
        core.step()
    before = core.snapshot()

    with pytest.raises(ChangeFailed, match=r"100 blocks could not be built \(MemoryError\); it still has 41"):
        resize(core, 100)

    (event,) = [event for event in recorder.drain() if isinstance(event, PoolRebuilt)]
    assert (event.outcome, event.error, event.watermark_blocks) == ("failed", "MemoryError", 0)
    after = core.snapshot()
    assert (after.tiers, after.sequences, after.config) == (before.tiers, before.sequences, before.config)
    assert run(core).keys() == run(loaded_core()).keys()


def test_every_outcome_is_told_and_counted_and_extremes_begin_anew() -> None:
    clock = FakeClock()
    log = EventLog(clock=clock)
    core = loaded_core(log=log)
    mirror, cursor = Mirror(clock, 0), log.subscribe("test")
    mirror.load(core.snapshot())
    run(core)
    clock.advance(100)
    mirror.apply(cursor.read(10_000))
    mirror.publish(clock.now_ns)
    assert mirror.view.value(m.KV_FREE_BLOCKS_MIN, "device", "60s") is not None

    log.begin(core.num_steps)
    resize(core, 12, "nights are quiet")
    with pytest.raises(ChangeRefused):
        resize(core, 0)
    mirror.apply(cursor.read(10_000))
    mirror.publish(clock.now_ns)

    view = mirror.view
    assert view.value(m.POOL_REBUILDS, "resized") == 1
    assert view.value(m.POOL_REBUILDS, "refused") == 1
    histogram = view.histogram(m.POOL_REBUILD_SECONDS)
    assert histogram is not None
    assert histogram.count == 1, "a refusal takes no time from anybody"
    assert view.value(m.KV_BLOCK_CAPACITY, "device") == 11
    assert view.value(m.CONFIG_VALUE, "num_blocks") == 12
    assert view.value(m.KV_FREE_BLOCKS_MIN, "device", "60s") is None
    assert mirror.ledger.differences(core.snapshot()) == []


def test_an_engine_resizes_on_its_thread_and_refuses_by_the_new_size() -> None:
    model, log = NullModel(), EventLog()
    reasons: dict[str, FinishReason | None] = {}
    settings = make_settings(num_blocks=41)
    model.block_size = settings.block_size
    engine = Engine(
        settings, model, log, lambda outputs: reasons.update((o.request_id, o.finish_reason) for o in outputs),
        block_bytes=64, memory_bytes={"kv": 41 * 64}, memory=model,
    )  # fmt: skip
    control: LiveControl = LiveEngine(engine)  # all that the observatory needs of it
    engine.start()
    try:
        assert engine.max_model_len == 64
        control.apply({"num_blocks": 9}, actor="test", reason="less memory is left")
        snapshot = engine.snapshot()
        assert snapshot.tiers[0].num_blocks == 9
        assert snapshot.config["num_blocks"] == 9
        assert snapshot.memory_bytes["kv"] == 9 * 64
        assert engine.max_model_len == 32
        assert engine.max_new_tokens(20, 1) == 12
        with pytest.raises(RequestInvalid, match="the longest possible sequence has 32"):
            engine.submit(make_request("long", [5] * 30, max_tokens=20))
        with pytest.raises(ChangeRefused, match="less than 2; give at least that"):
            control.apply({"num_blocks": 1}, actor="test", reason="")
        control.apply({"num_blocks": 50}, actor="test", reason="")
        engine.submit(make_request("long", [5] * 30, max_tokens=20))
        engine.check_integrity()
    finally:
        engine.stop()


def test_an_engine_without_memory_of_its_own_says_how_to_change_the_pool() -> None:
    core = EngineCore(make_settings(), NullModel(), EventLog())

    with pytest.raises(ChangeRefused, match="restart it with another --num-blocks"):
        core.prepare_resize(9)


def test_the_null_model_forgets_what_is_not_kept() -> None:
    """Else the tests above could not fail."""
    model = NullModel()
    model.block_size = 2
    model.slots = {2: 7, 3: 8, 8: 9}

    model.rebuild(3, np.array([1]), np.array([2]))

    assert model.slots == {4: 7, 5: 8}

"""Settings of a running engine change between two steps: all that are asked for, or none, and everybody is told."""

import threading
from typing import Any

import pytest
from builders import LedgerFollower, NullModel, Recorder, make_request, make_settings, run_until_idle
from live_stage import ASK, LiveStage, live_stage
from openai_server import wait_until

from kvwatch.control import LIVE_SETTINGS, LiveControl, SettingValue
from kvwatch.errors import ChangeConflict, ChangeRefused
from kvwatch.telemetry.events import ConfigChanged, PoolRebuilt, RequestPreempted
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.core import EngineCore
from kvwatch_engine.live.changer import Changer


class Dial:
    """A setting that is not the engine's."""

    def __init__(self, value: SettingValue) -> None:
        self.value = value

    def get(self) -> SettingValue:
        return self.value

    def set(self, value: SettingValue) -> None:
        self.value = value


def live(stage: LiveStage) -> dict[str, SettingValue]:
    return {str(each.key): each.live for each in stage.control.settings().settings}


def drifted(stage: LiveStage) -> set[str]:
    return {str(each.key) for each in stage.control.settings().settings if each.has_drifted}


def test_all_settings_that_can_change_have_a_live_and_a_declared_value() -> None:
    stage = LiveStage(watermark_blocks=2, watermark_ratio=0.05, max_prefill_chunk=None)
    stage.control.attach("log_level", Dial("info"))
    stage.control.attach("trace_ratio", Dial(1.0))
    control: LiveControl = stage.control
    stage.engine.start()
    try:
        state = control.settings()
    finally:
        stage.engine.stop()

    assert [each.key for each in state.settings][:3] == ["num_blocks", "watermark", "max_num_seqs"]
    assert {each.key for each in state.settings} == set(LIVE_SETTINGS)
    assert not any(each.has_drifted for each in state.settings)
    values = {each.key: each.live for each in state.settings}
    assert (values["watermark"], values["max_prefill_chunk"], values["log_level"]) == ("0.05", None, "info")


CHANGES: list[tuple[str, SettingValue, str, float | None]] = [
    ("max_num_seqs", 4, "max_num_seqs", 4),
    ("max_batch_tokens", 16, "max_batch_tokens", 16),
    ("max_prefill_chunk", 3, "max_prefill_chunk", 3),
    ("max_queued_requests", 7, "max_queued_requests", 7),
    ("max_queued_tokens", 99, "max_queued_tokens", 99),
    ("reserve_prompt", False, "reserve_prompt", 0),
    ("preemption_mode", "recompute", "preemption_mode", None),
    ("victim_policy", "least-computed", "victim_policy", None),
    ("protect_after_preemptions", 9, "protect_after_preemptions", 9),
    ("prefix_cache", False, "prefix_cache", 0),
    ("num_speculative_tokens", 3, "num_speculative_tokens", 3),
    ("watermark", "0.1", "watermark_blocks", 4),
    ("num_blocks", 60, "num_blocks", 60),
]


@pytest.mark.parametrize(("key", "value", "number_key", "number"), CHANGES)
def test_each_setting_changes_while_requests_run_and_goes_back(
    key: str, value: SettingValue, number_key: str, number: float | None
) -> None:
    with live_stage() as stage:
        follower = LedgerFollower(stage.log, stage.engine.snapshot)
        for each in range(6):
            stage.submit(f"r{each}", [5 + each] * (5 + each), max_tokens=20)
        stage.wait_begun(2)
        before = live(stage)

        outcome = stage.control.apply({key: value}, **ASK)

        assert [(str(change.key), change.old, change.new) for change in outcome.changes] == [(key, before[key], value)]
        assert live(stage) == before | {key: value}
        assert drifted(stage) == {key}
        snapshot = stage.engine.snapshot()
        assert snapshot.config_drift[key] == 1
        assert snapshot.config.get(number_key) == number
        stage.wait_idle()
        follower.catch_up()
        assert follower.ledger.config == stage.engine.snapshot().config
        assert follower.ledger.config_drift[key] == 1

        stage.control.apply({key: before[key]}, **ASK)

        assert live(stage) == before
        assert drifted(stage) == set()
        told = [event for event in stage.recorder.drain() if isinstance(event, ConfigChanged)]
        assert [event.key for event in told] == [key, key]
        assert (told[0].actor, told[0].reason, told[0].is_drift) == ("night shift", "to see what happens", True)
        assert told[1].is_drift is False
        assert len(stage.reasons) == 6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_num_seq": 4}, "did you mean max_num_seqs"),
        ({"model": "other"}, "unknown, or cannot change live; known: num_blocks"),
        ({"max_num_seqs": 0}, "less than 1"),
        ({"max_num_seqs": 8, "max_batch_tokens": 4}, "max_batch_tokens 4 is less than max_num_seqs 8"),
        ({"preemption_mode": "swap"}, "needs room to swap to"),
        ({"watermark": "40"}, "neither a ratio .* nor a number of blocks below 40"),
        ({"watermark": "much"}, "watermark: 'much'"),
        ({"num_blocks": 3, "watermark": "0"}, "request long may need 10 blocks"),
        ({"max_num_seqs": 4, "num_blocks": 1}, "less than 2"),
        ({"max_num_seqs": 1}, "request twins has 2 sequences"),
        ({"log_level": "debug"}, "nobody here"),
        ({"block_size": 8}, "rebuild of the cache"),
    ],
)
def test_a_change_that_cannot_be_is_refused_whole_and_changes_nothing(changes: dict[str, Any], said: str) -> None:
    with live_stage() as stage:
        stage.control.pause_admission(3600, **ASK)  # whatever the machine does, they are there
        stage.submit("long", [5] * 20, max_tokens=20)
        stage.submit("twins", [6] * 3, n=2)
        version, before = stage.control.settings().version, live(stage)

        preview = stage.control.preview(changes)
        with pytest.raises(ChangeRefused, match=said):
            stage.control.apply(changes, **ASK)

        assert not preview.is_possible
        assert preview.problem
        assert live(stage) == before
        assert stage.control.settings().version == version
        stage.control.resume_admission(**ASK)
        stage.wait_idle()
        assert not [event for event in stage.recorder.drain() if isinstance(event, ConfigChanged)]


def test_what_is_in_force_already_is_no_change() -> None:
    with live_stage() as stage:
        version = stage.control.settings().version

        outcome = stage.control.apply({"max_num_seqs": 8, "prefix_cache": True}, **ASK)

        assert (outcome.changes, outcome.version) == ([], version)
        assert stage.control.preview({"max_num_seqs": 8}).changes == []


def test_of_two_changes_to_one_version_one_wins() -> None:
    with live_stage() as stage:
        version = stage.control.settings().version
        results: list[str] = []

        def ask(number: int) -> None:
            try:
                stage.control.apply({"max_num_seqs": number}, expected_version=version, **ASK)
            except ChangeConflict as error:
                results.append("lost" if "read them again" in str(error) else str(error))
            else:
                results.append("won")

        threads = [threading.Thread(target=ask, args=(number,)) for number in (2, 3, 4, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert sorted(results) == ["lost", "lost", "lost", "won"]
        assert stage.control.settings().version == version + 1


def test_declaring_ends_the_drift_and_a_later_change_differs_from_that() -> None:
    with live_stage() as stage:
        stage.control.apply({"max_num_seqs": 4, "reserve_prompt": False}, **ASK)

        state = stage.control.declare(["max_num_seqs"], **ASK)

        assert {str(each.key) for each in state.settings if each.has_drifted} == {"reserve_prompt"}
        assert stage.engine.snapshot().config_drift["max_num_seqs"] == 0
        told = [event for event in stage.recorder.drain() if isinstance(event, ConfigChanged)][-1]
        assert (told.key, told.old, told.new, told.declared) == ("max_num_seqs", "4", "4", "4")
        with pytest.raises(ChangeRefused, match="did you mean"):
            stage.control.declare(["max_num_seq"], **ASK)


def test_a_setting_that_is_not_the_engines_changes_with_the_others_or_not_at_all() -> None:
    stage = LiveStage()
    dial = Dial("info")
    stage.control.attach("log_level", dial)
    stage.engine.start()
    try:
        with pytest.raises(ChangeRefused):
            stage.control.apply({"log_level": "debug", "max_num_seqs": 0}, **ASK)
        assert dial.value == "info"
        outcome = stage.control.apply({"log_level": "debug", "max_num_seqs": 4}, **ASK)
        assert {str(change.key) for change in outcome.changes} == {"log_level", "max_num_seqs"}
        assert dial.value == "debug"
        assert stage.engine.snapshot().config_drift["log_level"] == 1
    finally:
        stage.engine.stop()


def test_a_smaller_pool_takes_blocks_from_running_requests_which_are_computed_again() -> None:
    log = EventLog()
    model = NullModel()
    core = EngineCore(make_settings(num_blocks=41), model, log, block_bytes=64, memory=model)
    model.block_size = core.settings.block_size
    changer, follower, recorder = Changer(core), LedgerFollower(log, core.snapshot), Recorder(log)
    for each in range(5):
        core.add(make_request(f"r{each}", [5 + each] * 12, max_tokens=12, ignore_eos=True), 0)
    seen: dict[tuple[str, int], list[int]] = {}
    for _ in range(6):
        for output in core.step():
            seen.setdefault((output.request_id, output.sequence), []).extend(output.token_ids)
    used = core.manager.pool.num_used

    preview = changer.preview({"num_blocks": 12}, [])
    _, carry_out = changer.prepare({"num_blocks": 12}, [], actor="test", reason="", version=None)
    outcome = carry_out()

    assert preview.is_possible
    assert (preview.memory_bytes, preview.preempted_requests) == (12 * 64, outcome.preempted_requests)
    assert preview.num_blocks_freed >= used - 11
    assert preview.num_recomputed_tokens >= 12 * len(preview.preempted_requests)
    for key, tokens in run_until_idle(core).items():
        seen.setdefault(key, []).extend(tokens)
    follower.catch_up()
    assert seen == {(f"r{i}", 0): [model.next_token([5 + i] * 12, 0, at) for at in range(12)] for i in range(5)}
    told = [event for event in recorder.drain() if isinstance(event, RequestPreempted)]
    assert {event.request for event in told if event.reason == "rebuild"} == set(outcome.preempted_requests)


def test_a_refused_size_is_counted() -> None:
    with live_stage() as stage:
        stage.control.pause_admission(3600, **ASK)
        stage.submit("long", [5] * 20, max_tokens=20)
        with pytest.raises(ChangeRefused):
            stage.control.apply({"num_blocks": 4}, **ASK)

        (event,) = [event for event in stage.recorder.drain() if isinstance(event, PoolRebuilt)]
        assert (event.outcome, event.reason) == ("refused", "to see what happens")


def test_who_is_let_in_meanwhile_fits_before_and_after() -> None:
    """A request that arrives while the change is carried out must not wait for ever afterwards."""
    with live_stage(num_blocks=41, max_model_len=200) as stage:
        refused: list[str] = []
        resize = stage.engine._core.resizer.carry_out

        def slow(*args: Any) -> Any:
            for name, prompt in (("fits", [5] * 8), ("too long", [5] * 100)):
                try:
                    stage.submit(name, prompt)
                except RequestInvalid:
                    refused.append(name)
            return resize(*args)

        stage.engine._core.resizer.carry_out = slow  # type: ignore[method-assign, assignment]

        stage.control.apply({"num_blocks": 12}, **ASK)

        assert refused == ["too long"]
        wait_until(lambda: ("fits", 0) in stage.reasons, 60)

"""Pins and the reset of the prefix cache of an engine that serves: what is kept, what is refused, what is answered."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from builders import LedgerFollower, NullModel, make_request
from live_stage import ASK, LiveStage, live_stage
from openai_server import wait_until

from kvwatch.control import PinnedPrefix, PrefixControl, PrefixScope
from kvwatch.errors import ChangeRefused
from kvwatch.telemetry.events import BlocksEvicted, CacheCleared, PrefixPinned, PrefixUnpinned
from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.contracts.tenant import tenant_salt

PROMPT = list(range(4, 29))
"""25 tokens: six full blocks of 4."""


def compute(stage: LiveStage, request_id: str, prompt: list[int]) -> None:
    """Have a prompt computed, so that its full blocks are cached."""
    stage.submit(request_id, prompt, max_tokens=1)
    stage.wait_idle()


def num_hits(stage: LiveStage, request_id: str, prompt: list[int]) -> int:
    """Return how many tokens of a prompt are found."""
    compute(stage, request_id, prompt)
    (cached,) = {each.cached_tokens for each in stage.recorder.drain() if getattr(each, "request", "") == request_id
                 and hasattr(each, "cached_tokens")}  # fmt: skip
    return int(cached)


def flood(stage: LiveStage, name: str, count: int = 12) -> None:
    """Send prompts that have nothing in common, until everything that can be evicted was."""
    for number in range(count):
        compute(stage, f"{name}{number}", [number + 5, *range(29, 45), number])


def test_a_pinned_prefix_outlives_any_flood_and_an_unpinned_one_does_not() -> None:
    with live_stage(num_blocks=21, pace_seconds=0) as stage:
        control: PrefixControl = stage.control
        compute(stage, "first", PROMPT)
        pin = control.pin_prefix(PROMPT, **ASK)
        assert (pin.num_tokens, pin.num_blocks, pin.actor) == (24, 6, ASK["actor"])
        assert control.pinned_prefixes() == [pin]

        flood(stage, "a")
        assert num_hits(stage, "again", PROMPT) == 24
        assert control.unpin_prefix(pin.pin, **ASK) == pin
        assert control.pinned_prefixes() == []
        flood(stage, "b")
        assert num_hits(stage, "later", PROMPT) == 0

        events = stage.recorder.drain()
        pinned = next(each for each in events if isinstance(each, PrefixPinned))
        unpinned = next(each for each in events if isinstance(each, PrefixUnpinned))
        assert (pinned.pin, pinned.actor, pinned.reason) == (pin.pin, ASK["actor"], ASK["reason"])
        assert (unpinned.pin, unpinned.cause, unpinned.hashes) == (pin.pin, "asked", pinned.hashes)
        while_pinned = [each for each in events if pinned.seq < each.seq < unpinned.seq]
        evicted = {h for each in while_pinned if isinstance(each, BlocksEvicted) for h in each.hashes}
        assert evicted
        assert not evicted & set(pinned.hashes)


def test_pinned_blocks_are_cached_and_not_free_and_a_snapshot_says_so() -> None:
    with live_stage(num_blocks=21, pace_seconds=0) as stage:
        follower = LedgerFollower(stage.log, stage.control.snapshot)
        compute(stage, "first", PROMPT)
        follower.catch_up()
        pool = follower.ledger.pool("device")
        before = (pool.num_used, pool.num_cached, pool.num_free)
        assert before == (0, 6, 20)
        pin = stage.control.pin_prefix(PROMPT, **ASK)
        follower.catch_up()
        assert (pool.num_used, pool.num_cached, pool.num_free, pool.num_pinned) == (0, 6, 14, 6)

        late = LedgerFollower(stage.log, stage.control.snapshot).ledger.pool("device")
        assert (late.num_used, late.num_cached, late.num_free, late.num_pinned) == (0, 6, 14, 6)

        stage.control.unpin_prefix(pin.pin, **ASK)
        follower.catch_up()
        assert (pool.num_used, pool.num_cached, pool.num_free, pool.num_pinned) == (0, 6, 20, 0)


def test_what_two_pins_name_stays_until_both_have_ended_and_counts_once() -> None:
    with live_stage(num_blocks=21, pace_seconds=0) as stage:
        compute(stage, "first", PROMPT)
        long, short = stage.control.pin_prefix(PROMPT, **ASK), stage.control.pin_prefix(PROMPT[:9], **ASK)
        assert (long.num_blocks, short.num_blocks, short.num_tokens) == (6, 2, 8)
        assert stage.engine.settings.num_pinned_blocks == 6
        stage.control.unpin_prefix(long.pin, **ASK)
        assert stage.engine.settings.num_pinned_blocks == 2
        flood(stage, "a")
        assert num_hits(stage, "again", PROMPT) == 8


def test_a_request_is_measured_by_what_pins_leave() -> None:
    """A request that could never end beside the pins is refused at once, in words that name them."""
    with live_stage(num_blocks=21, pace_seconds=0, max_model_len=200) as stage:
        assert stage.engine.max_model_len == 80
        compute(stage, "first", PROMPT)
        pin = stage.control.pin_prefix(PROMPT, **ASK)
        assert stage.engine.max_model_len == 56
        with pytest.raises(RequestInvalid, match="longest possible sequence has 56"):
            stage.submit("large", PROMPT, max_tokens=40)
        with pytest.raises(RequestInvalid, match="beside 6 pinned ones"):
            stage.submit("wide", PROMPT[:5], max_tokens=20, n=3)
        stage.submit("fits", PROMPT[:20], max_tokens=36)
        stage.wait_idle()
        stage.control.unpin_prefix(pin.pin, **ASK)
        stage.submit("large", PROMPT, max_tokens=40)
        stage.wait_idle()


def test_a_pin_that_a_live_request_could_not_live_with_is_refused() -> None:
    with live_stage(num_blocks=21, max_model_len=200) as stage:
        compute(stage, "first", PROMPT)
        stage.submit("large", [7, 8, 9], max_tokens=60)
        stage.wait_steps(2)
        with pytest.raises(ChangeRefused, match="request large may need 16 blocks, but a pool of 21 has 14"):
            stage.control.pin_prefix(PROMPT, **ASK)
        assert stage.control.pinned_prefixes() == []
        assert stage.control.pin_prefix(PROMPT[:16], **ASK).num_blocks == 4
        stage.wait_idle()


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda control: control.pin_prefix(PROMPT[:3], **ASK), "fills no block of 4"),
        (lambda control: control.pin_prefix([], **ASK), "fills no block of 4"),
        (lambda control: control.pin_prefix([*PROMPT[:8], 49, 49, 49, 49], **ASK), "2 of the 3 full blocks"),
        (lambda control: control.pin_prefix(PROMPT, PrefixScope(cache_salt="other"), **ASK), "0 of the 6"),
        (lambda control: control.pin_prefix(PROMPT, PrefixScope(tenant="blue"), **ASK), "0 of the 6"),
        (lambda control: control.pin_request("first", **ASK), "no request 'first' is live"),
        (lambda control: control.unpin_prefix("pin-0", **ASK), "there is no pin 'pin-0'"),
    ],
)
def test_what_cannot_be_pinned_is_refused_with_the_remedy(
    ask: Callable[[PrefixControl], PinnedPrefix], said: str
) -> None:
    with live_stage(num_blocks=41, pace_seconds=0) as stage:
        compute(stage, "first", PROMPT)
        before = stage.control.snapshot()
        with pytest.raises(ChangeRefused, match=said):
            ask(stage.control)
        after = stage.control.snapshot()
        assert (after.pins, after.tiers, after.config) == (before.pins, before.tiers, before.config)


def test_at_most_a_part_of_the_pool_is_pinned() -> None:
    with live_stage(num_blocks=21, pace_seconds=0, max_pinned_ratio=0.3) as stage:
        compute(stage, "first", PROMPT)
        stage.control.pin_prefix(PROMPT, **ASK)
        other = [45, *PROMPT]
        compute(stage, "other", other)
        with pytest.raises(ChangeRefused, match="12 blocks would be pinned, but at most 6 of 20"):
            stage.control.pin_prefix(other, **ASK)


def test_the_watermark_stays_free_beside_pins() -> None:
    with live_stage(num_blocks=21, pace_seconds=0, watermark_blocks=15) as stage:
        compute(stage, "first", PROMPT)
        with pytest.raises(ChangeRefused, match="the watermark keeps 15 free"):
            stage.control.pin_prefix(PROMPT, **ASK)


def test_pins_are_of_a_scope_and_that_of_a_tenant_is_found_by_its_name() -> None:
    with live_stage(num_blocks=41, pace_seconds=0) as stage:
        request = make_request("first", PROMPT, max_tokens=1)
        stage.engine.submit(replace(request, tenant_salt=tenant_salt("blue"), cache_salt="deep"))
        stage.wait_idle()
        pin = stage.control.pin_prefix(PROMPT, PrefixScope(cache_salt="deep", tenant="blue"), **ASK)
        assert pin.num_blocks == 6


def test_the_prompt_of_a_live_request_can_be_pinned_whatever_its_keys() -> None:
    with live_stage(num_blocks=41) as stage:
        request = make_request("salty", PROMPT, max_tokens=35, ignore_eos=True)
        stage.engine.submit(replace(request, cache_salt="nobody knows"))
        stage.wait_steps(3)
        pin = stage.control.pin_request("salty", **ASK)
        part = stage.control.pin_request("salty", 10, **ASK)
        assert (pin.num_blocks, part.num_blocks) == (6, 2)
        with pytest.raises(ChangeRefused, match="has 25 tokens, not 26"):
            stage.control.pin_request("salty", 26, **ASK)
        stage.wait_idle()
        assert stage.control.snapshot().tiers[0].ref_counts == [0] * 41


def test_a_pool_is_resized_around_its_pins_and_not_below_them() -> None:
    with live_stage(num_blocks=41, pace_seconds=0) as stage:
        compute(stage, "first", [45, *PROMPT])
        compute(stage, "second", PROMPT)
        stage.control.pin_prefix(PROMPT, **ASK)
        stage.control.apply({"num_blocks": 15}, **ASK)
        assert num_hits(stage, "again", PROMPT) == 24
        with pytest.raises(ChangeRefused, match="6 blocks are pinned, but a pool of 12"):
            stage.control.apply({"num_blocks": 12}, **ASK)
        stage.control.apply({"num_blocks": 41}, **ASK)
        assert num_hits(stage, "at last", PROMPT) == 24
        stage.engine.check_integrity()


# ---------------------------------------------------------------- reset


def test_a_reset_answers_how_much_it_cleared_and_nothing_is_found_afterwards() -> None:
    with live_stage(num_blocks=41, pace_seconds=0) as stage:
        compute(stage, "first", PROMPT)
        reset = stage.control.reset_prefix_cache(**ASK)
        assert (reset.num_cleared, reset.num_in_use, reset.num_unpinned) == ({"device": 6}, 0, 0)
        assert reset.is_complete
        cleared = next(each for each in stage.recorder.drain() if isinstance(each, CacheCleared))
        assert (cleared.actor, cleared.reason) == (ASK["actor"], ASK["reason"])
        assert num_hits(stage, "again", PROMPT) == 0


def test_a_reset_ends_pins_only_when_it_is_told_to() -> None:
    with live_stage(num_blocks=41, pace_seconds=0) as stage:
        compute(stage, "first", PROMPT)
        stage.control.pin_prefix(PROMPT, **ASK)
        with pytest.raises(ChangeRefused, match="1 prefixes are pinned and would be lost"):
            stage.control.reset_prefix_cache(**ASK)
        assert num_hits(stage, "again", PROMPT) == 24
        reset = stage.control.reset_prefix_cache(unpin=True, **ASK)
        assert (reset.num_cleared, reset.num_unpinned) == ({"device": 6}, 1)
        assert stage.engine.settings.num_pinned_blocks == 0
        assert [each.cause for each in stage.recorder.drain() if isinstance(each, PrefixUnpinned)] == ["reset"]


def test_a_reset_says_what_is_still_in_use_and_what_goes_on_is_never_found_again() -> None:
    """A request that runs across the reset computes and stores on: nobody may find any of it, new parts included."""
    with live_stage(num_blocks=41, pace_seconds=0.02) as stage:
        stage.submit("runs", PROMPT, max_tokens=35)
        stage.wait_steps(4)
        reset = stage.control.reset_prefix_cache(**ASK)
        assert reset.num_in_use >= 7
        assert not reset.is_complete
        waited = stage.control.reset_prefix_cache(wait_seconds=60, **ASK)
        assert (waited.num_in_use, waited.is_complete) == (0, True)
        stage.wait_idle()
        whole = [*PROMPT, *stage.tokens["runs", 0]]
        assert num_hits(stage, "again", whole[:45]) == 0
        assert num_hits(stage, "whole", whole[:58]) == 44, "what was computed anew, and no block behind it"


def test_a_preempted_request_finds_its_own_blocks_after_a_reset_and_answers_right() -> None:
    """What it stored after the reset is its own to reuse; everybody is answered as if nothing had happened."""
    with live_stage(NullModel(), num_blocks=24, max_num_seqs=4, pace_seconds=0.001) as stage:
        for number in range(4):
            stage.submit(f"r{number}", [number + 4, *PROMPT[:12]], max_tokens=40)
        for _ in range(6):
            stage.wait_steps(5)
            stage.control.reset_prefix_cache(**ASK)
        wait_until(lambda: stage.engine.num_live_requests == 0, 60)
        stage.wait_idle()

"""Deliberate faults of what is in a step: its pace, the error budget of long gaps, who counts as a queue."""

from mutate.fault import Fault

BOUND = "tests/unit/engine/test_engine_step_bound.py"
SCHEDULING = "engine/kvwatch_engine/scheduling"

PACE = (
    Fault(
        name="the-pace-learns-nothing",
        stands_for="Prompts beside decoding sequences are computed in chunks as large as before the first step.",
        file=f"{SCHEDULING}/step_bound.py",
        old="        self._pace.note_step(num_tokens, seconds, has_prefill=has_prefill)\n",
        new="",
        tests=(f"{BOUND}::test_a_few_prompts_are_cut_so_that_those_who_decode_get_their_tokens_in_time",),
    ),
    Fault(
        name="steps-that-decode-wash-prefill-out",
        stands_for="After many steps without a prompt nothing is known of what a prompt costs.",
        file=f"{SCHEDULING}/prefill_pace.py",
        old="self._prefill if has_prefill else self._decoding",
        new="self._prefill",
        tests=(
            "tests/unit/engine/test_engine_prefill_pace.py"
            "::test_what_a_prompt_costs_is_known_after_a_long_time_without_one",
        ),
    ),
    Fault(
        name="long-gaps-cost-nothing",
        stands_for="The error budget is looked at, and never spent.",
        file=f"{SCHEDULING}/step_bound.py",
        old="        self.num_long_gaps_left = left - num_gaps if is_long else left\n",
        new="        self.num_long_gaps_left = left\n",
        tests=(f"{BOUND}::test_no_gap_is_longer_than_promised_but_those_that_the_error_budget_has",),
    ),
    Fault(
        name="a-long-gap-for-some-is-one-for-all",
        stands_for="A long step is taken as soon as one gap is left, however many decode.",
        file=f"{SCHEDULING}/step_bound.py",
        old="num_sequences <= self.num_long_gaps_left else",
        new="self.num_long_gaps_left >= 1 else",
        tests=(f"{BOUND}::test_no_gap_is_longer_than_promised_but_those_that_the_error_budget_has",),
    ),
    Fault(
        name="who-cannot-start-is-a-queue",
        stands_for="Requests that the number of sequences keeps out make steps long that do nothing for them.",
        file=f"{SCHEDULING}/admission.py",
        old="        return 0 if is_full else waiting.num_tokens\n",
        new="        return waiting.num_tokens\n",
        tests=(f"{BOUND}::test_who_cannot_start_is_no_queue",),
    ),
)

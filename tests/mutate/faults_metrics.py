"""Deliberate faults of what events and metrics say: windows, stalls, reasons, regrets, refusals.

O numbers are those of the list of known faults of systems like this one.
"""

from mutate.fault import Fault

MIRROR = "tests/unit/ledger/test_ledger_mirror.py"
WINDOW = "tests/unit/ledger/test_ledger_window.py"
EVENTS = "tests/unit/engine/test_engine_events.py"
THREAD = "tests/unit/engine/test_engine_thread.py"
FIDELITY = (
    "tests/property/test_metrics_fidelity.py::test_every_metric_equals_the_engines_own_structures_after_every_step"
)
TIERED = (
    "tests/property/test_metrics_fidelity.py::"
    "test_every_metric_of_an_engine_with_tiers_equals_the_engines_own_structures"
)
LOAD = "tests/integration/test_reference_load.py"

METRICS = (
    Fault(
        name="extremes-of-what-a-step-left",
        stands_for="O62: the minimum is taken of what is free after a step, and bursts within one are not seen.",
        file="kvwatch/ledger/mirror.py",
        old="        actions[BlocksReleased] = (self._end_low, *actions[BlocksReleased])\n",
        new="        actions[BlocksReleased] = (*actions[BlocksReleased], self._end_low)\n",
        tests=(WINDOW,),
    ),
    Fault(
        name="extremes-of-a-tier-that-is-gone",
        stands_for="O62: the fewest free blocks of a tier that was laid out anew are those of the blocks before.",
        file="kvwatch/ledger/mirror.py",
        old="        actions[BlocksLaidOut] += (self._restart_extremes_behind,)\n",
        new="",
        tests=(MIRROR,),
    ),
    Fault(
        name="extremes-that-never-leave",
        stands_for="O16: an idle engine shows the extreme of an hour ago, since nothing publishes a view.",
        file="kvwatch/ledger/mirror.py",
        old="            if any(self.view.time_ns < changes <= now for changes in self._changes_ns()):",
        new="            if False:",
        tests=(WINDOW,),
    ),
    Fault(
        name="a-stall-until-the-next-step",
        stands_for="The last request that waited was aborted, and the hours until the next step count as a stall.",
        file="kvwatch/ledger/mirror.py",
        old="        actions[RequestFinished] += (self._end_stall,)\n",
        new="",
        tests=(MIRROR,),
    ),
    Fault(
        name="waiting-for-something-though-gone",
        stands_for="O19: a request that was aborted in the queue still waits for blocks, says the gauge.",
        file="kvwatch/ledger/ledger.py",
        old="        else:\n            self._leave_queue(request)\n",
        new="",
        tests=(MIRROR,),
    ),
    Fault(
        name="stalled-for-ever",
        stands_for="A step that took long is over, and the engine still counts as stalled.",
        file="kvwatch/ledger/ledger.py",
        old="        self.last_step_ns = event.time_ns\n        self._is_stalled = False\n",
        new="        self.last_step_ns = event.time_ns\n",
        tests=(MIRROR,),
    ),
    Fault(
        name="a-shrunken-pool-is-regretted",
        stands_for="What went when the pool shrank counts as evicted for want of room, since it was that once before.",
        file="engine/kvwatch_engine/memory/block_pool.py",
        old='        if reason != "pressure":\n            self._evicted.discard(hashes)\n',
        new="",
        tests=(EVENTS,),
    ),
    Fault(
        name="first-blocks-are-never-regretted",
        stands_for="A prompt of which everything was evicted counts as one that nobody has seen before.",
        file="engine/kvwatch_engine/memory/block_pool.py",
        old="            self._evicted.note_first(hashes[0], self._index)\n",
        new="            pass\n",
        tests=(EVENTS, FIDELITY),
    ),
    Fault(
        name="a-reset-is-regretted",
        stands_for="Whoever cleared the cache is told that a larger pool would have hit.",
        file="engine/kvwatch_engine/memory/block_pool.py",
        old="        self._evicted.clear()\n",
        new="",
        tests=(EVENTS, FIDELITY),
    ),
    Fault(
        name="recovered-at-the-first-chunk",
        stands_for="A resumed request has recovered as soon as it computes anything.",
        file="engine/kvwatch_engine/scheduling/request.py",
        old="sequence.num_computed >= sequence.num_lost for",
        new="sequence.num_computed > 0 for",
        tests=(EVENTS,),
    ),
    Fault(
        name="an-id-in-use-is-refused-unseen",
        stands_for="A refusal that nobody counts.",
        file="engine/kvwatch_engine/engine.py",
        old="        except RequestRejected as error:\n            self.note_rejection",
        new="        except EngineOverloaded as error:\n            self.note_rejection",
        tests=(THREAD,),
    ),
    Fault(
        name="out-of-memory-is-any-failure",
        stands_for="A step that failed for want of memory looks like any other.",
        file="engine/kvwatch_engine/core.py",
        old="        if is_out_of_memory(error):\n",
        new="        if False:\n",
        tests=(EVENTS, LOAD),
    ),
    Fault(
        name="token-ids-for-everybody",
        stands_for="What users wrote goes to whoever follows the log, without having been asked for.",
        file="engine/kvwatch_engine/memory/full_blocks.py",
        old=" group.block_size) if self.emits_token_ids else None\n",
        new=" group.block_size)\n",
        tests=(EVENTS,),
    ),
    Fault(
        name="stored-at-the-place-of-the-first",
        stands_for="O46: after a block that was known already, blocks are told at the wrong place of their sequence.",
        file="engine/kvwatch_engine/memory/block_events.py",
        old="            first_index + first,\n",
        new="            first_index,\n",
        tests=(EVENTS,),
    ),
    Fault(
        name="a-silent-stall",
        stands_for="The engine is stuck, and no event says so.",
        file="engine/kvwatch_engine/stall_watch.py",
        old="        self._lease.give()\n        try:\n            return self._inner",
        new="        try:\n            return self._inner",
        tests=(f"{THREAD}::test_a_stall_is_told_while_it_lasts_once_and_is_over_with_the_step",),
    ),
    Fault(
        name="recomputed-tokens-of-the-whole-chunk",
        stands_for="O64: all tokens of a resumed request count as computed again, new ones too.",
        file="engine/kvwatch_engine/scheduling/step_builder.py",
        old="max(0, min(chunk.end, chunk.sequence.num_lost) - chunk.start)",
        new="(chunk.end - chunk.start if chunk.sequence.num_lost else 0)",
        tests=(TIERED,),
    ),
)

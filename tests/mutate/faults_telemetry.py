"""Deliberate faults of telemetry: engine, log, ledger, exporters.

O and R numbers are those of the list of known faults of systems like this one.
"""

from mutate.fault import Fault

POOL = "tests/unit/ledger/test_ledger_pool.py"
MIRROR = "tests/unit/ledger/test_ledger_mirror.py"
STORE = "tests/unit/ledger/test_ledger_store.py"
COLLECTOR = "tests/unit/ledger/test_ledger_collector.py"
PRESSURE = "tests/unit/engine/test_engine_pressure.py"
SHARING = "tests/unit/engine/test_engine_sharing.py"
THREAD = "tests/unit/engine/test_engine_thread.py"
EVENTS = "tests/unit/engine/test_engine_events.py"
FIDELITY = (
    "tests/property/test_metrics_fidelity.py::test_every_metric_equals_the_engines_own_structures_after_every_step"
)

TELEMETRY = (
    Fault(
        name="hits-of-a-resumed-request",
        stands_for="O01, R46: what a preempted request finds again of its own is counted as prefix hits.",
        file="engine/kvwatch_engine/scheduling/lifecycle.py",
        old="        if request.preempted_ns is not None:\n            self._note_resumed",
        new="        if request.preempted_ns is not None:\n            self._note_admitted(request)\n"
        "            self._note_resumed",
        tests=(f"{PRESSURE}::test_a_resumed_request_computes_again_only_what_it_does_not_find",),
    ),
    Fault(
        name="last-token-found-too",
        stands_for="O05, R49: a prompt of exactly n blocks hits all n, and nothing is left to compute.",
        file="engine/kvwatch_engine/scheduling/admission.py",
        old="(num_tokens - 1) // self._manager.block_size",
        new="num_tokens // self._manager.block_size",
        tests=(f"{SHARING}::test_a_repeated_prompt_hits_all_full_blocks_but_never_its_last_token",),
    ),
    Fault(
        name="queried-tokens-are-those-found",
        stands_for="O07: the denominator of the hit rate is what will be found, so that it is always 1.",
        file="engine/kvwatch_engine/scheduling/request_events.py",
        old="        0 if block_size is None else num_tokens,\n",
        new="        0 if block_size is None else hits.total,\n",
        tests=(f"{SHARING}::test_a_repeated_prompt_hits_all_full_blocks_but_never_its_last_token",),
    ),
    Fault(
        name="cached-blocks-counted-as-used",
        stands_for="O22, O23: a block that is only cached counts as used: a full cache looks like a leak.",
        file="kvwatch/ledger/group.py",
        old="            if left == 0:\n                self.num_used -= 1\n",
        new="            if left == 0:\n                self.num_used -= hashes[block] is None\n",
        tests=(f"{POOL}::test_a_ledger_rebuilt_from_events_equals_the_engine_down_to_the_single_block",),
    ),
    Fault(
        name="eviction-of-what-was-asked-for",
        stands_for="O13: evicted blocks are counted before it is known how many there are.",
        file="kvwatch/ledger/group.py",
        old="            self._hashes[block] = None\n            self.num_cached -= 1\n",
        new="            self._hashes[block] = None\n        self.num_cached -= 1\n",
        tests=(FIDELITY,),
    ),
    Fault(
        name="filled-slots-taken-for-held-ones",
        stands_for="O62: usage counts blocks where it should count tokens: no waste is ever shown.",
        file="kvwatch/ledger/gauges.py",
        old="1 - filled / held if held else 0.0",
        new="1 - held / held if held else 0.0",
        tests=(f"{MIRROR}::test_waste_is_the_part_of_held_slots_without_tokens",),
    ),
    Fault(
        name="copies-do-not-carry-their-fill",
        stands_for="R30: after copy-on-write the copy counts as empty.",
        file="kvwatch/ledger/group.py",
        old="            filled_slots[destination] = filled_slots[source]\n",
        new="            filled_slots[destination] = 0\n",
        tests=(f"{POOL}::test_a_copied_block_holds_what_its_source_holds_and_the_source_loses_one_owner",),
    ),
    Fault(
        name="idle-is-not-shown",
        stands_for="O16, O19, O20: after the last request the gauges stay at what they were while it ran.",
        file="kvwatch/ledger/mirror.py",
        old="        is_idle = is_newest and not self.ledger.num_running",
        new="        is_idle = False",
        tests=(f"{MIRROR}::test_the_end_of_the_last_running_request_is_shown_at_once",),
    ),
    Fault(
        name="pauses-that-are-over-are-shown",
        stands_for="O16: a pause in the middle of what is new is shown, and hides that the engine runs.",
        file="kvwatch/ledger/mirror.py",
        old="        is_idle = is_newest and not self.ledger.num_running",
        new="        is_idle = not self.ledger.num_running",
        tests=(f"{MIRROR}::test_a_pause_that_is_over_already_does_not_hide_what_followed",),
    ),
    Fault(
        name="the-oldest-news-is-shown",
        stands_for="O16: gauges of a busy engine are a second old: the first of the new steps is shown, not the last.",
        file="kvwatch/ledger/mirror.py",
        old="        is_newest = event.seq == self._newest_step_seq\n",
        new="        is_newest = True\n",
        tests=(f"{MIRROR}::test_a_view_shows_the_newest_step_however_seldom_somebody_looks",),
    ),
    Fault(
        name="aborts-while-idle-are-not-shown",
        stands_for="O16: a request that is aborted between two steps stays on the gauges until the next step.",
        file="kvwatch/ledger/mirror.py",
        old="        if is_due or not self.ledger.requests or now - self._applied_ns >= QUIET_NS:",
        new="        if is_due:",
        tests=(f"{MIRROR}::test_a_request_that_ends_while_no_step_runs_is_shown_when_the_log_is_drained",),
    ),
    Fault(
        name="aborts-are-not-told",
        stands_for='O17: a request that is aborted leaves without a trace: finished{reason="abort"} stays 0.',
        file="engine/kvwatch_engine/scheduling/lifecycle.py",
        old="        del self._requests[request.request_id]\n        if self._log.active:\n",
        new="        del self._requests[request.request_id]\n"
        "        if self._log.active and request.state is not RequestState.FINISHED:\n",
        tests=(f"{EVENTS}::test_an_aborted_request_holds_nothing_whatever_its_state_and_is_counted_once",),
    ),
    Fault(
        name="latency-of-what-never-happened",
        stands_for="O32: a request that ends before it was admitted is observed with a latency since the host started.",
        file="engine/kvwatch_engine/scheduling/request_events.py",
        old="None if first is None or admitted is None else first - admitted,",
        new="(first or 0) - (admitted or 0),",
        tests=(FIDELITY,),
    ),
    Fault(
        name="unmeasured-is-zero",
        stands_for="O32: what was never measured is observed as 0.",
        file="kvwatch/ledger/feeds.py",
        old="[value for value in map(quantity, events) if value is not None]",
        new="[value or 0 for value in map(quantity, events)]",
        tests=(f"{STORE}::test_what_was_never_measured_is_observed_nowhere",),
    ),
    Fault(
        name="a-follower-raises-into-the-loop",
        stands_for="O31: a defect of telemetry ends what it only watches.",
        file="kvwatch/ledger/collector.py",
        old='            self.num_errors += 1\n            self._report("a follower',
        new='            raise\n            self._report("a follower',
        tests=(f"{COLLECTOR}::test_an_event_that_breaks_the_ledger_is_counted_logged_once_and_healed",),
    ),
    Fault(
        name="violations-are-clamped",
        stands_for="O31: a count that disagrees with the engine is put right silently instead of being counted.",
        file="kvwatch/ledger/mirror.py",
        old="            self._violations[()] += 1\n",
        new="",
        tests=(
            f"{MIRROR}::test_a_violation_is_counted_each_time_logged_with_its_equation_once_a_minute_and_stops_nothing",
        ),
    ),
    Fault(
        name="a-gap-passes-unnoticed",
        stands_for="O41, O43: a reader that was lapped goes on with what it finds.",
        file="kvwatch/telemetry/log.py",
        old="        if start < head - capacity:\n            raise GapError(start, head - capacity)\n",
        new="        start = max(start, head - capacity)\n",
        tests=(
            "tests/unit/telemetry/test_telemetry_log.py::test_a_cursor_reads_every_event_once_or_is_told_of_the_gap",
        ),
    ),
    Fault(
        name="lost-events-are-not-counted",
        stands_for="O41: events were lost, and nobody can tell how many.",
        file="kvwatch/telemetry/log.py",
        old="            self.num_lost += seq - self.position\n",
        new="",
        tests=("tests/unit/telemetry/test_telemetry_log.py::test_resuming_counts_the_gap_and_what_was_lost",),
    ),
    Fault(
        name="a-shared-block-is-gone-with-its-first-owner",
        stands_for="O44: a block that another request still holds is reported as free.",
        file="kvwatch/ledger/group.py",
        old="            left = ref_counts[block] - 1\n",
        new="            left = 0 if ref_counts[block] else -1\n",
        tests=(
            f"{POOL}::test_a_ledger_rebuilt_from_events_equals_the_engine_down_to_the_single_block",
            f"{POOL}::test_a_copied_block_holds_what_its_source_holds_and_the_source_loses_one_owner",
        ),
    ),
    Fault(
        name="clearing-is-ignored",
        stands_for="O49: the cache was cleared, and its blocks are still shown as cached.",
        file="kvwatch/ledger/pool.py",
        old="        self._columns.hashes[:] = [None] * len(self._columns.hashes)\n",
        new="        return\n",
        tests=(
            f"{POOL}::test_a_cached_block_is_neither_used_nor_empty_and_clearing_the_cache_empties_it",
            f"{POOL}::test_a_used_block_that_loses_its_hash_goes_on_and_is_empty_when_released",
        ),
    ),
    Fault(
        name="leaks-are-not-shown",
        stands_for="O58: blocks of requests that are gone are held, and no gauge tells.",
        file="kvwatch/ledger/pool.py",
        old="        return int(((self.ref_counts > 0) & ~is_held).sum())\n",
        new="        return 0\n",
        tests=(f"{POOL}::test_a_leak_shows_as_orphaned_blocks",),
    ),
    Fault(
        name="the-youngest-waits-longest",
        stands_for="O64: the age of the queue is that of its youngest request.",
        file="kvwatch/ledger/gauges.py",
        old="m.OLDEST_WAITING_TIMESTAMP: min(\n",
        new="m.OLDEST_WAITING_TIMESTAMP: max(\n",
        tests=(f"{MIRROR}::test_times_are_shown_as_unix_timestamps_and_the_longest_wait_is_that_of_the_first_in_line",),
    ),
    Fault(
        name="victim-instead-of-beneficiary",
        stands_for="O64: a preemption names the request that had to go as the one in whose favour it went.",
        file="engine/kvwatch_engine/scheduling/lifecycle.py",
        old='name = "" if beneficiary is None else beneficiary.request_id',
        new="name = victim.request_id",
        tests=(f"{PRESSURE}::test_the_newest_request_yields_and_says_in_whose_favour",),
    ),
    Fault(
        name="age-of-a-hit-block-since-its-release",
        stands_for="O65: the lifetime of an evicted block is counted from its release.",
        file="engine/kvwatch_engine/memory/block_events.py",
        old="[now - allocated[block]], [now - released[block]]",
        new="[now - released[block]], [now - released[block]]",
        tests=(f"{PRESSURE}::test_evictions_tell_ages_idle_times_and_hits_by_the_clock",),
    ),
    Fault(
        name="evictions-of-the-newest-first",
        stands_for="R51: the head of a chain is evicted before its tail.",
        file="engine/kvwatch_engine/memory/group_tables.py",
        old="        table.reverse()\n",
        new="",
        tests=(f"{PRESSURE}::test_blocks_are_evicted_only_on_demand_oldest_first_and_the_tail_before_the_head",),
    ),
    Fault(
        name="a-growth-that-fails-keeps-blocks",
        stands_for="R09: an allocation that finds too few blocks keeps those it found.",
        file="engine/kvwatch_engine/memory/table_write.py",
        old="        if sum(len(each.shared) + each.num_missing for each in planned) > self._pool.num_free:\n",
        new="        if sum(len(each.shared) + each.num_missing for each in planned) > self._pool.num_free:\n"
        "            self._pool.allocate(self._pool.num_free, owner, reason)\n",
        tests=("tests/property/test_state_machines.py::test_it_never_gets_into_a_wrong_state",),
    ),
    Fault(
        name="salts-are-ignored",
        stands_for="R13: tenants with different salts share blocks, and times to the first token tell.",
        file="engine/kvwatch_engine/memory/block_hash.py",
        old="    if cache_salt:\n",
        new="    if not cache_salt:\n",
        tests=(f"{SHARING}::test_different_salts_never_share_a_block_and_equal_ones_do",),
    ),
    Fault(
        name="lookups-counted-at-every-attempt",
        stands_for="O02: a request that waits for blocks is counted as a lookup in every step.",
        file="engine/kvwatch_engine/scheduling/admission.py",
        old="        self._head_reason = WaitReason.BLOCKS\n",
        new="        self._head_reason = WaitReason.BLOCKS\n        self._lifecycle._note_admitted(request)\n",
        tests=(f"{EVENTS}::test_a_request_that_waits_for_many_steps_is_looked_up_once",),
    ),
    Fault(
        name="granularity-taken-for-a-miss",
        stands_for="O04: tokens that no block could hold are counted as misses like any others.",
        file="engine/kvwatch_engine/scheduling/request_events.py",
        old="0 if block_size is None else num_tokens - can_hit,",
        new="0,",
        tests=(f"{EVENTS}::test_tokens_that_no_block_could_hold_are_told_apart_from_misses",),
    ),
    Fault(
        name="minimum-of-the-window-only",
        stands_for="O16, O59: what was reached before the window and still held in it is not seen as its extreme.",
        file="kvwatch/ledger/window.py",
        old="self._ended[0][1] <= begin_ns:",
        new="self._ended[0][1] <= self._now_ns:",
        tests=(
            "tests/unit/ledger/test_ledger_window.py"
            "::test_a_value_that_was_reached_before_the_window_and_still_held_in_it_counts",
        ),
    ),
    Fault(
        name="a-damaged-frame-is-believed",
        stands_for="O52: what was damaged on its way is taken for something that was said.",
        file="kvwatch/recorder/frames.py",
        old="    return checksum == zlib.crc32(",
        new="    return checksum is not None or checksum == zlib.crc32(",
        tests=("tests/unit/recorder/test_recorder_frames.py::test_no_changed_byte_goes_unnoticed",),
    ),
    Fault(
        name="hits-of-another-lookup",
        stands_for="O68: what was found on the host is told as found on the disk.",
        file="engine/kvwatch_engine/scheduling/request_events.py",
        old='host_hit_tokens=hits.of("host"),',
        new='host_hit_tokens=hits.of("disk"),',
        tests=("tests/unit/engine/test_engine_swap.py::test_hits_in_other_tiers_are_restored_first_and_told_by_tier",),
    ),
    Fault(
        name="the-page-waits-for-a-step",
        stands_for="O71: while the engine is in a long step, nobody gets a page.",
        file="kvwatch/ledger/collector.py",
        old="self._adopt(await asyncio.to_thread(self._take_snapshot, SNAPSHOT_TIMEOUT_SECONDS))",
        new="self._adopt(self._take_snapshot(SNAPSHOT_TIMEOUT_SECONDS))",
        tests=(
            "tests/unit/observatory/test_observatory_thread.py"
            "::test_the_page_answers_while_the_engine_is_in_a_long_step",
        ),
    ),
    Fault(
        name="a-transfer-is-waste",
        stands_for="A host is wasted to the last block while the first request is on its way there.",
        file="kvwatch/ledger/gauges.py",
        old="    held = (used - _num_arriving(pool, ledger)) * block_size\n",
        new="    held = used * block_size\n",
        tests=(f"{MIRROR}::test_a_block_that_a_transfer_writes_is_used_and_no_waste",),
    ),
)

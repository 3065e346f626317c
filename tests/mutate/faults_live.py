"""Deliberate faults of live changes: something half changed, something lost on the way, something not said."""

from mutate.fault import Fault

CHANGES = "tests/unit/live/test_live_changes.py"
REBUILD = "tests/unit/live/test_live_rebuild.py"
FAULTS = "tests/integration/test_live_rebuild_faults.py"
ANSWERS = f"{REBUILD}::test_answers_are_the_same_whatever_the_block_size_becomes_meanwhile"
LIVE = "engine/kvwatch_engine/live"

LIVE_CHANGES = (
    Fault(
        name="who-is-let-in-fits-the-old-pool-only",
        stands_for="A request is accepted while the pool shrinks, and waits for ever.",
        file="engine/kvwatch_engine/acceptance.py",
        old="self._in_force = (self._in_force[0], wanted)",
        new="self._in_force = (self._in_force[0],)",
        tests=(f"{CHANGES}::test_who_is_let_in_meanwhile_fits_before_and_after",),
    ),
    Fault(
        name="two-changes-win",
        stands_for="The version is looked at and not raised.",
        file=f"{LIVE}/changer.py",
        old="        self._version += 1\n",
        new="",
        tests=(f"{CHANGES}::test_of_two_changes_to_one_version_one_wins",),
    ),
    Fault(
        name="drift-is-not-said",
        stands_for="A change is an event that says it was declared.",
        file=f"{LIVE}/changer.py",
        old="text_of(self._declared[each.key])",
        new="text_of(each.new)",
        tests=(f"{CHANGES}::test_each_setting_changes_while_requests_run_and_goes_back",),
    ),
    Fault(
        name="worst-case-forgotten",
        stands_for="The new pool is too small for what a request may become.",
        file=f"{LIVE}/rebuild.py",
        old="        check_worst_cases(wanted, accepted)\n",
        new="",
        tests=(f"{REBUILD}::test_what_never_fits_is_refused_before_anything_changes",),
    ),
    Fault(
        name="sharing-lost",
        stands_for="Every sequence gets a copy of what it shared.",
        file="engine/kvwatch_engine/memory/layout.py",
        old="    if block is not None:\n        layout.ref_counts[block] += 1\n        return block\n",
        new="",
        tests=(ANSWERS,),
    ),
    Fault(
        name="slots-off-by-one",
        stands_for="A token goes to the slot beside its own.",
        file="engine/kvwatch_engine/memory/layout.py",
        old="begin = block * layout.block_size + offset",
        new="begin = block * layout.block_size + offset + 1",
        tests=(ANSWERS,),
    ),
    Fault(
        name="chains-of-the-old-size",
        stands_for="Hashes are still those of blocks of the old size.",
        file=f"{LIVE}/rebuild.py",
        old="                sequence.chain = chain.fork(0)\n",
        new="                pass\n",
        tests=(ANSWERS, f"{REBUILD}::test_running_requests_are_found_as_prefixes_again_and_the_others_are_not"),
    ),
    Fault(
        name="half-a-block-is-found",
        stands_for="A block whose first tokens left the window is entered into the prefix index.",
        file="engine/kvwatch_engine/memory/group_tables.py",
        old="-(-each.first_held // block_size)  # what is not whole must not be found",
        new="each.first_held // block_size",
        tests=(f"{REBUILD}::test_a_block_whose_beginning_has_left_the_window_is_no_prefix",),
    ),
    Fault(
        name="tiers-stay-as-they-were-to-be",
        stands_for="After the memory could not be had, the tiers keep the new layout.",
        file=f"{LIVE}/rebuild.py",
        old="                core.tiers.lay_out(old)\n",
        new="                pass\n",
        tests=(f"{FAULTS}::test_whatever_fails_leaves_the_old_configuration_and_every_text[memory]",),
    ),
    Fault(
        name="runner-half-bound",
        stands_for="A cache that could not be bound is kept.",
        file="engine/kvwatch_engine/model/runner.py",
        old=(
            "            self._warm_up_layout(cache)\n            self.rebind(cache)\n"
            "        except BaseException:\n            self._kv_cache, self._device = before\n"
        ),
        new=(
            "            self.rebind(cache)\n            self._warm_up_layout(cache)\n"
            "        except BaseException:\n            del before\n"
        ),
        tests=(f"{FAULTS}::test_whatever_fails_leaves_the_old_configuration_and_every_text[compiling for it]",),
    ),
    Fault(
        name="scales-left-behind",
        stands_for="Quantised keys and values move without their scales.",
        file="engine/kvwatch_engine/memory/kv_cache.py",
        old="cache._scales[to_blocks, :, :, :, to_offsets] = self._scales[from_blocks, :, :, :, from_offsets]",
        new="pass",
        tests=("tests/integration/test_model_rebuild.py::test_slots_keep_every_bit_in_blocks_of_another_size",),
    ),
    Fault(
        name="pause-without-end",
        stands_for="Nobody looks whether the time of a pause is over.",
        file="engine/kvwatch_engine/scheduling/pause.py",
        old="self._log.clock.monotonic_ns() >= self._until_ns",
        new="self._log.clock.monotonic_ns() < 0",
        tests=("tests/unit/live/test_live_admission.py::test_a_pause_ends_by_itself_and_says_so",),
    ),
)

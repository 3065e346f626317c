"""Deliberate faults of KV groups: windows that give back too early or never, hits that are none, groups that share."""

from mutate.fault import Fault

UNIT = "tests/unit/memory/test_memory_groups.py"
WINDOW = f"{UNIT}::test_a_block_is_given_back_when_no_later_token_sees_it_and_not_before"
MOST = f"{UNIT}::test_the_most_that_a_window_holds_is_held_at_some_place_and_never_more"
MEASURE = f"{UNIT}::test_a_request_is_measured_with_all_its_groups"
HITS = f"{UNIT}::test_the_hit_is_the_longest_prefix_of_which_every_group_has_what_it_sees"
NAMES = f"{UNIT}::test_no_block_and_no_name_belongs_to_two_groups"
ATOMIC = f"{UNIT}::test_a_write_gets_blocks_in_all_groups_or_in_none"
FEW = f"{UNIT}::test_too_few_free_blocks_for_all_groups_change_nothing"
FORKS = f"{UNIT}::test_a_fork_shares_in_every_group_what_it_sees_and_nothing_that_is_gone"
JOINS = f"{UNIT}::test_who_joins_another_gives_up_its_own_in_every_group"
MOVES = f"{UNIT}::test_blocks_that_are_evicted_or_move_keep_their_groups"
HASHES = "tests/unit/memory/test_memory_block_hash.py"
DIVISION = "tests/unit/model/test_model_kv_groups.py"
GENERAL = "tests/integration/test_model_families.py::test_greedy_text_alone_and_batched_is_transformers[Gemma 2]"
TEXTS = "tests/integration/test_kv_groups.py::test_text_is_transformers_cold_and_warm[gemma3-True-4]"
SERVED = "tests/integration/test_kv_groups_serve.py"
TABLES = "engine/kvwatch_engine/memory/group_tables.py"
MANAGER = "engine/kvwatch_engine/memory/block_manager.py"
WRITER = "engine/kvwatch_engine/memory/table_write.py"
PREFIX = "engine/kvwatch_engine/memory/prefix.py"

GROUPS = (
    Fault(
        name="a-window-ends-a-token-early",
        stands_for="The last token of a window is not counted: its block is given back while a query still reads it.",
        file=TABLES,
        old="max(0, num_computed - window + 1) // self.block_size",
        new="max(0, num_computed - window + 2) // self.block_size",
        tests=(WINDOW,),
    ),
    Fault(
        name="a-block-goes-with-its-first-token",
        stands_for="A block is given back when its first token has left the window instead of its last.",
        file=TABLES,
        old="max(0, num_computed - window + 1) // self.block_size",
        new="-(-max(0, num_computed - window + 1) // self.block_size)",
        tests=(WINDOW,),
    ),
    Fault(
        name="a-window-ends-a-token-late",
        stands_for="A window is taken for one token more: a block is kept for a step in which nobody can see it.",
        file=TABLES,
        old="max(0, num_computed - window + 1) // self.block_size",
        new="max(0, num_computed - window) // self.block_size",
        tests=(WINDOW,),
    ),
    Fault(
        name="windows-give-nothing-back",
        stands_for="Layers with a window hold all blocks of a sequence, as if they had none.",
        file=MANAGER,
        old="                group.pass_window(owner, num_computed)\n",
        new="                pass\n",
        tests=(WINDOW,),
    ),
    Fault(
        name="passed-entries-are-forgotten",
        stands_for="A second step gives the same blocks of a window back again.",
        file=TABLES,
        old="        self.num_passed[owner] = passed + len(blocks)\n",
        new="        self.num_passed[owner] = len(blocks)\n",
        tests=(WINDOW,),
    ),
    Fault(
        name="the-end-of-a-sequence-gives-back-null-blocks",
        stands_for="What left the window is given back once more when the sequence ends.",
        file=TABLES,
        old="            del table[-passed:]\n",
        new="            pass\n",
        tests=(WINDOW,),
    ),
    Fault(
        name="a-window-begins-at-a-border",
        stands_for="The most that a window holds is counted as if it always began where a block does.",
        file="engine/kvwatch_engine/contracts/cache.py",
        old="    return (window + max_chunk - 3) // block_size + 2\n",
        new="    return (window + max_chunk - 3) // block_size + 1\n",
        tests=(MOST,),
    ),
    Fault(
        name="a-chunk-needs-no-room",
        stands_for="A window's worst case forgets the chunk that is being computed: a prompt is let in and never ends.",
        file=TABLES,
        old="most_window_blocks(self.window, max_chunk, self.block_size)",
        new="most_window_blocks(self.window, 1, self.block_size)",
        tests=(MEASURE,),
    ),
    Fault(
        name="one-group-stands-for-all",
        stands_for="A request is let in with the blocks of its first group alone.",
        file=MANAGER,
        old="            for group in self.groups\n        )\n\n    def table(",
        new="            for group in self.groups[:1]\n        )\n\n    def table(",
        tests=(MEASURE,),
    ),
    Fault(
        name="a-window-wants-the-whole-prefix",
        stands_for="A group with a window hits only while everything since the first token is there: it seldom is.",
        file=PREFIX,
        old="    while index > group.first_seen(length * group.block_size):\n",
        new="    while index > 0:\n",
        tests=(HITS,),
    ),
    Fault(
        name="a-window-is-not-asked",
        stands_for="A prefix counts as a hit although the window before its end is gone.",
        file=PREFIX,
        old="    sliding = [group for group in groups if group.window is not None]\n",
        new="    sliding = [group for group in groups if group.window is not None][:0]\n",
        tests=(HITS,),
    ),
    Fault(
        name="windows-are-asked-once",
        stands_for="A second window cuts the prefix shorter, and the first one is not asked whether it has that end.",
        file=PREFIX,
        old="        settled = length\n",
        new="        settled = length\n        sliding, again = [], sliding\n        for group in again:\n"
        "            length = _last_whole_window(hashes, length, group, knows)\n",
        tests=(HITS,),
    ),
    Fault(
        name="groups-share-a-name",
        stands_for="Blocks of two groups have one name: a layer reads what another kind of layer has written.",
        file="engine/kvwatch_engine/memory/block_hash.py",
        old="    return content if group == 0 else BlockHash(",
        new="    return content if group >= 0 else BlockHash(",
        tests=(NAMES,),
    ),
    Fault(
        name="two-kinds-of-key-with-one-number",
        stands_for="A kind of key is given the number of another one, and Python makes it a second name for that.",
        file="engine/kvwatch_engine/memory/block_hash.py",
        old="@unique\nclass KeyTag(IntEnum):",
        new="class KeyTag(IntEnum):\n    AGAIN = 1",
        tests=(HASHES,),
    ),
    Fault(
        name="some-groups-are-served",
        stands_for="The pool refuses one group's blocks, and those of the groups before it stay taken.",
        file=WRITER,
        old="            self._take_back(planned, owner)\n",
        new="            pass\n",
        tests=(ATOMIC,),
    ),
    Fault(
        name="each-group-looks-for-itself",
        stands_for="Room is looked for group by group: what was cached is evicted for a write that then finds none.",
        file=WRITER,
        old="        if sum(len(each.shared) + each.num_missing for each in planned) > self._pool.num_free:\n",
        new="        if max(len(each.shared) + each.num_missing for each in planned) > self._pool.num_free:\n",
        tests=(FEW,),
    ),
    Fault(
        name="forks-in-the-first-group-only",
        stands_for="Copy-on-write looks for other owners in the first group: in others samples write over each other.",
        file=WRITER,
        old="            if num_missing > 0 or shared:\n",
        new="            if num_missing > 0 or (shared and not group.number):\n",
        tests=(FORKS,),
    ),
    Fault(
        name="a-fork-behind-the-window",
        stands_for="A child begins where its parent has given back what it sees, and reads the null block.",
        file=TABLES,
        old="        return self.num_passed.get(parent, 0) <= self.first_seen(num_tokens)\n",
        new="        return self.num_passed.get(parent, 0) >= 0\n",
        tests=(FORKS,),
    ),
    Fault(
        name="a-child-knows-no-window",
        stands_for="A child takes the null blocks of its parent's table for its own, and gives them back at its end.",
        file=TABLES,
        old="            self.num_passed[child] = passed\n",
        new="            pass\n",
        tests=(FORKS,),
    ),
    Fault(
        name="a-beam-joins-the-first-group",
        stands_for="A beam takes over another one's table in the first group, and keeps its own in the others.",
        file=MANAGER,
        old="            shared = group.join(parent, child, num_tokens)\n",
        new="            shared = group.join(parent, child, num_tokens) if not group.number else []\n",
        tests=(JOINS,),
    ),
    Fault(
        name="what-moves-forgets-its-group",
        stands_for="A pool is resized, and blocks that move are counted with the group of whoever was there before.",
        file="engine/kvwatch_engine/memory/block_columns.py",
        old="            columns.append(self.groups)\n",
        new="            pass\n",
        tests=(MOVES,),
    ),
    Fault(
        name="all-that-is-evicted-was-the-first-groups",
        stands_for="Telemetry takes every evicted block from the first group: its count falls below what is there.",
        file="engine/kvwatch_engine/memory/block_events.py",
        old="by_group.setdefault(self._groups[block], ([], []))",
        new="by_group.setdefault(0 * block, ([], []))",
        tests=(MOVES,),
    ),
    Fault(
        name="a-window-is-released-in-the-first-group",
        stands_for="Telemetry is told that what leaves a window was the first group's.",
        file=TABLES,
        old='        self._pool.release(blocks[::-1], owner, "window", self.number)\n',
        new='        self._pool.release(blocks[::-1], owner, "window")\n',
        tests=(WINDOW,),
    ),
    Fault(
        name="layers-read-the-first-groups-table",
        stands_for="All layers attend through the block table of the first group.",
        file="engine/kvwatch_engine/model/attention.py",
        old="            self._batches[group]\n",
        new="            self._batches[0 * group]\n",
        tests=(GENERAL,),
    ),
    Fault(
        name="layers-write-to-the-first-groups-slots",
        stands_for="Keys and values of all layers go where the first group's table says.",
        file="engine/kvwatch_engine/model/attention.py",
        old="kv_store(key, value, *cache, self._slots[group], **scales)",
        new="kv_store(key, value, *cache, self._slots[0 * group], **scales)",
        tests=(GENERAL,),
    ),
    Fault(
        name="all-layers-are-of-the-first-group",
        stands_for="All layers read and write through the table and the slots of the first group, whichever way.",
        file="engine/kvwatch_engine/model/layer_caches.py",
        old="        return group, self._cache.layer(place), ",
        new="        return 0 * group, self._cache.layer(place), ",
        tests=(TEXTS,),
    ),
    Fault(
        name="layers-of-a-group-share-a-place",
        stands_for="Two layers of one group write to the same part of a block.",
        file="engine/kvwatch_engine/model/kv_groups.py",
        old="            layer: (number, place) for number, group in enumerate(groups)",
        new="            layer: (number, place // 2) for number, group in enumerate(groups)",
        tests=(DIVISION, TEXTS),
    ),
    Fault(
        name="tiers-take-any-model",
        stands_for="A tier is accepted beside several groups, whose blocks it would mix up.",
        file="engine/kvwatch_engine/serve/tiers.py",
        old="    if len(model.groups) > 1:\n",
        new="    if len(model.groups) > 1000:\n",
        tests=(f"{SERVED}::test_tiers_are_refused_for_models_with_several_groups_and_take_one_window_for_none",),
    ),
)

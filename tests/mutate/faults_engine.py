"""Deliberate faults of beam search: what goes on, what ends, what is shared, what a group must fit into."""

from mutate.fault import Fault

BEAMS = "tests/unit/engine/test_engine_beams.py"
EQUALITY = "tests/integration/test_beam_equality.py"
EVERY_WAY = f"{EQUALITY}::test_every_way_of_searching_finds_what_transformers_finds"
NEVER = f"{EQUALITY}::test_never_searches_on_where_false_stops_as_in_transformers"
SHARING = "tests/unit/engine/test_engine_sharing.py"
GROUPS = "tests/unit/memory/test_memory_groups.py"
SEARCH = "engine/kvwatch_engine/scheduling/beam_search.py"
PROMPTS = "tests/unit/engine/test_engine_prompt_logprobs.py"

ENGINE = (
    Fault(
        name="beams-that-stand-by-may-end",
        stands_for="An end token that ranks below the width counts as a sequence that was found.",
        file=SEARCH,
        old="            elif rank < self.params.width:  # what",
        new="            elif True:  # what",
        tests=(EVERY_WAY,),
    ),
    Fault(
        name="never-is-like-false",
        stands_for="`early_stopping: never` looks at the length so far instead of the longest possible one.",
        file=SEARCH,
        old='        is_longest_best = params.early_stopping == "never" and params.length_penalty > 0\n',
        new="        is_longest_best = False\n",
        tests=(NEVER,),
    ),
    Fault(
        name="a-beam-keeps-its-own-blocks",
        stands_for="A beam takes over another one's tokens and goes on reading the keys and values of its own.",
        file="engine/kvwatch_engine/scheduling/lifecycle.py",
        old="        self._manager.join(parent.owner, sequence.owner, parent.num_computed)\n",
        new="",
        tests=(EVERY_WAY,),
    ),
    Fault(
        name="candidates-survive-a-recomputation",
        stands_for="A group that is preempted between two of its beams goes on with candidates of blocks that it lost.",
        file="engine/kvwatch_engine/scheduling/lifecycle.py",
        old="            request.search.forget_candidates()\n",
        new="            pass\n",
        tests=(BEAMS,),
    ),
    Fault(
        name="beams-share-only-the-prompt-again",
        stands_for="After a recomputation each beam computes what it has in common with the others.",
        file="engine/kvwatch_engine/core.py",
        old="            forks_late=sampling.beams is not None and not self.manager.has_windows,\n",
        new="            forks_late=False,\n",
        tests=(BEAMS,),
    ),
    Fault(
        name="only-what-is-returned-must-fit",
        stands_for="A search of many beams that returns one is let in where one sequence fits, and never ends.",
        file="engine/kvwatch_engine/scheduling/limits.py",
        old="number, limit = _name_of_number(sampling), sampling.num_sequences, settings.max_num_seqs\n",
        new="number, limit = _name_of_number(sampling), sampling.n, settings.max_num_seqs\n",
        tests=(BEAMS,),
    ),
    Fault(
        name="scores-are-sums",
        stands_for="`length_penalty` is read and forgotten: short sequences win.",
        file=SEARCH,
        old="        return sum_logprob / math.pow(num_tokens, self.params.length_penalty)\n",
        new="        return sum_logprob / math.pow(max(num_tokens, 1), 0)\n",
        tests=(EVERY_WAY,),
    ),
    Fault(
        name="end-tokens-take-the-place-of-beams",
        stands_for="Only as many candidates are asked for as beams go on: those that end a sequence leave too few.",
        file=SEARCH,
        old="        return self.params.width + len(self._end_token_ids)\n",
        new="        return self.params.width\n",
        tests=(EVERY_WAY,),
    ),
    Fault(
        name="a-beam-forgets-its-past",
        stands_for="A beam is ranked by its last token alone instead of by all of them.",
        file=SEARCH,
        old="yield _Continuation(place, token_id, beam.sum_logprob + score, logprobs)",
        new="yield _Continuation(place, token_id, score, logprobs)",
        tests=(EVERY_WAY,),
    ),
    Fault(
        name="a-beam-is-stopped-alone",
        stands_for="One beam is ended from outside, and the search waits for its candidates for ever.",
        file="engine/kvwatch_engine/core.py",
        old="        if request is not None and request.search is None and 0 <= sequence",
        new="        if request is not None and 0 <= sequence",
        tests=(f"{BEAMS}::test_no_beam_can_be_stopped_alone",),
    ),
    Fault(
        name="two-write-to-one-block",
        stands_for="A partial block of two owners is written to without a copy: samples overwrite each other's tokens.",
        file="engine/kvwatch_engine/memory/table_write.py",
        old="                shared = [first] if ref_counts[table[first]] > 1 else []\n",
        new="                shared = [first] if ref_counts[table[first]] > 2 else []\n",
        tests=(SHARING,),
    ),
    Fault(
        name="the-last-owner-copies-too",
        stands_for="Every sample copies the partial block, the last one as well, which could write in place.",
        file="engine/kvwatch_engine/memory/table_write.py",
        old="                shared = [first] if ref_counts[table[first]] > 1 else []\n",
        new="                shared = [first] if ref_counts[table[first]] > 0 else []\n",
        tests=(SHARING,),
    ),
    Fault(
        name="joined-without-a-reference",
        stands_for="A beam goes on over another one's blocks that are not counted as its own, and are freed under it.",
        file="engine/kvwatch_engine/memory/group_tables.py",
        old="goal[num_kept:]\n        self._pool.share(shared)\n",
        new="goal[num_kept:]\n",
        tests=(f"{GROUPS}::test_who_joins_another_gives_up_its_own_in_every_group",),
    ),
    Fault(
        name="a-beam-stores-under-its-old-names",
        stands_for="A beam that goes on elsewhere enters blocks under the hashes of what it said before.",
        file="engine/kvwatch_engine/scheduling/lifecycle.py",
        old="        sequence.chain = parent.chain.fork(parent.num_computed // self._manager.block_size)\n",
        new="",
        tests=(f"{BEAMS}::test_a_beam_stores_blocks_under_the_names_of_the_way_that_it_goes_now",),
    ),
    Fault(
        name="prompts-are-found-before-they-are-scored",
        stands_for="Of a known prefix no logits are computed, and its log-probabilities are missing.",
        file="engine/kvwatch_engine/scheduling/admission.py",
        old="        num_tokens = leader.num_tokens if leader.request.is_scored else leader.request.num_scored\n",
        new="        num_tokens = leader.num_tokens\n",
        tests=(f"{PROMPTS}::test_a_known_prefix_is_computed_all_the_same_and_others_still_find_it",),
    ),
    Fault(
        name="log-probabilities-are-told-twice",
        stands_for="A request that is preempted in its prompt tells the beginning of it again.",
        file="engine/kvwatch_engine/scheduling/step_builder.py",
        old="    start, end = max(chunk.start + 1, request.num_scored), ",
        new="    start, end = chunk.start + 1, ",
        tests=(f"{PROMPTS}::test_a_request_that_lost_its_blocks_on_the_way_tells_nothing_twice",),
    ),
    Fault(
        name="log-probabilities-of-the-token-before",
        stands_for="A token's own logits are taken for those that tell of it.",
        file="engine/kvwatch_engine/scheduling/step_builder.py",
        old="ScoredSpan(first + start - 1 - chunk.start, ",
        new="ScoredSpan(first + start - 2 - chunk.start if start > chunk.start + 1 else first, ",
        tests=(f"{PROMPTS}::test_a_request_that_lost_its_blocks_on_the_way_tells_nothing_twice",),
    ),
)

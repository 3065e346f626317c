"""Deliberate faults of beam search: what goes on, what ends, what is shared, what a group must fit into."""

from mutate.fault import Fault

BEAMS = "tests/unit/engine/test_engine_beams.py"
EQUALITY = "tests/integration/test_beam_equality.py"
EVERY_WAY = f"{EQUALITY}::test_every_way_of_searching_finds_what_transformers_finds"
NEVER = f"{EQUALITY}::test_never_searches_on_where_false_stops_as_in_transformers"
SEARCH = "engine/kvwatch_engine/scheduling/beam_search.py"

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
)

"""Deliberate faults of grammars and tool calls: texts that are not what was asked for, hostile grammars let through."""

from mutate.fault import Fault

COMPILER = "tests/unit/guidance/test_guidance_compiler.py"
ENGINE = "tests/unit/engine/test_engine_guidance.py"
READER = "tests/unit/server/test_server_tool_reader.py"
TOOLS = "tests/integration/test_tools.py"
GUIDANCE = "engine/kvwatch_engine/guidance"
READING = "engine/kvwatch_engine/server/tools"

GUIDED = (
    Fault(
        name="masks-are-not-applied",
        stands_for="The sampler asks what is allowed, and chooses what it likes.",
        file="engine/kvwatch_engine/model/logit_changes.py",
        old="        np.copyto(changed, -np.inf, where=~row.guide.allowed())\n",
        new="        row.guide.allowed()\n",
        tests=(f"{ENGINE}::test_the_sampler_chooses_within_the_grammar_by_the_models_own_probabilities",),
    ),
    Fault(
        name="sequences-share-a-matcher",
        stands_for="Several samples, or two requests with one cached grammar, follow one state.",
        file=f"{GUIDANCE}/matching.py",
        old="MatcherGuide(self._matcher.deep_copy(), ",
        new="MatcherGuide(self._matcher, ",
        tests=(f"{COMPILER}::test_two_sequences_of_one_guide_do_not_know_each_other",),
    ),
    Fault(
        name="a-step-that-is-composed-twice-moves-on-twice",
        stands_for="After a step without memory the guide waits for nothing, or takes its tokens again.",
        file=f"{GUIDANCE}/matching.py",
        old="        new = list(output_token_ids[self._num_tokens : num_tokens])\n",
        new="        new = list(output_token_ids[:num_tokens])\n",
        tests=(f"{ENGINE}::test_guided_requests_keep_to_their_grammar_and_their_neighbours_say_what_they_say_alone",),
    ),
    Fault(
        name="terminals-of-any-size",
        stands_for="A grammar of a few lines names a terminal that takes minutes at a later token.",
        file=f"{GUIDANCE}/attempt.py",
        old="        if size > untried.max_terminal_size:\n",
        new="        if size < 0:\n",
        tests=(f"{COMPILER}::test_a_terminal_that_would_take_long_at_a_later_token_only_is_refused_by_its_size",),
    ),
    Fault(
        name="schemas-say-what-is-ignored-of-them",
        stands_for="A schema brings options along, and what it asks for is not kept.",
        file=f"{GUIDANCE}/attempt.py",
        old='    "lenient": False,\n',
        new="",
        tests=(f"{COMPILER}::test_a_schema_cannot_ask_for_being_taken_less_seriously",),
    ),
    Fault(
        name="a-processor-for-as-long-as-they-like",
        stands_for="Hostile grammars are tried until their time is over, with all of a processor.",
        file=f"{GUIDANCE}/turns.py",
        old="        if worker.used_seconds > worker.allowance.cpu_seconds:\n",
        new="        if worker.used_seconds > 1e9:\n",
        tests=(f"{COMPILER}::test_what_takes_more_of_a_processor_than_it_may_is_refused",),
    ),
    Fault(
        name="grammars-compete-with-the-model",
        stands_for="Who compiles a grammar goes on for as long as the system lets it, some milliseconds at a time.",
        file=f"{GUIDANCE}/turns.py",
        old="            worker.stop()\n",
        new="            pass\n",
        tests=(
            f"{COMPILER}::test_a_process_that_compiles_stands_still_between_its_turns_and_is_ended_for_what_it_has_used",
        ),
    ),
    Fault(
        name="first-come-first-served",
        stands_for="What people write waits until hostile grammars have used up their time.",
        file=f"{GUIDANCE}/turns.py",
        old="min(busy, key=_used_seconds)",
        new="busy[0]",
        tests=(f"{COMPILER}::test_a_grammar_that_needs_little_is_done_before_those_that_came_earlier_and_take_long",),
    ),
    Fault(
        name="stopped-for-ever",
        stands_for="A stopped process stays behind when the one ends that would have let it go on.",
        file=f"{GUIDANCE}/worker.py",
        old="        end_with_parent()\n",
        new="",
        tests=(f"{COMPILER}::test_workers_end_with_the_process_that_gives_them_turns",),
    ),
    Fault(
        name="a-busy-machine-is-remembered",
        stands_for="A good grammar that came at a bad moment is refused for ever.",
        file=f"{GUIDANCE}/trials.py",
        old="        raise TrialStarved\n",
        new='        return grammar.refusal("it takes too long")\n',
        tests=(f"{COMPILER}::test_who_gets_nothing_of_a_processor_in_time_is_told_to_come_back_and_may_do_so",),
    ),
    Fault(
        name="refusals-are-forgotten",
        stands_for="Who sends a hostile grammar again and again has it tried again and again.",
        file=f"{GUIDANCE}/compiler.py",
        old="            self._refusals.note(grammar, error)\n",
        new="",
        tests=(f"{COMPILER}::test_a_refusal_is_remembered_with_the_field_that_it_names_and_costs_nothing_again",),
    ),
    Fault(
        name="strict-only-when-it-is-required",
        stands_for="A strict function is called with arguments that its schema forbids.",
        file=f"{READING}/prompting.py",
        old="        if is_free and (self.family.is_bare or not any(tool.is_strict for tool in offer.callable)):\n",
        new="        if is_free:\n",
        tests=(f"{TOOLS}::test_a_strict_function_is_called_with_arguments_that_fit_once_the_model_calls_it",),
    ),
    Fault(
        name="calls-of-what-was-not-offered",
        stands_for="A function that nobody offered is called.",
        file=f"{READING}/reader.py",
        old="            if call.name not in self._names:\n",
        new="            if False:\n",
        tests=(f"{READER}::test_texts_are_read_as_their_family_writes_them",),
    ),
    Fault(
        name="markers-are-sent-in-halves",
        stands_for="A stream shows the beginning of a marker as content.",
        file=f"{READING}/reader.py",
        old="            keep = _overlap(self._held, family.begin)\n",
        new="            keep = 0\n",
        tests=(f"{READER}::test_texts_are_read_as_their_family_writes_them",),
    ),
    Fault(
        name="special-markers-have-no-text",
        stands_for="A family's marker is a special token, and the reader never sees it.",
        file="engine/kvwatch_engine/server/conversation_planning.py",
        old="shown_tokens=self._shown_tokens() if offer is not None else {},",
        new="shown_tokens={},",
        tests=(f"{TOOLS}::test_a_call_that_the_model_writes_becomes_a_tool_call",),
    ),
)

"""Grammars are compiled off the loop, bounded, once; a bad one fails alone, whatever it does to its process."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import msgspec
import psutil
import pytest
from guided_stage import VOCAB_SIZE, allowed_after, compile_all, compile_one, make_compiler
from openai_server import PATIENT, byte_fallback_tokenizer, byte_level_tokenizer, wait_until

from kvwatch_engine.contracts.errors import EngineOverloaded, GuideFailed, RequestInvalid
from kvwatch_engine.guidance import Grammar, GuidanceLimits, GuideCompiler
from kvwatch_engine.guidance.grammar import GrammarKind, check_schema
from kvwatch_engine.guidance.trials import Trials
from kvwatch_engine.guidance.vocabulary import VocabularySource

T = TypeVar("T")

TOKENIZER = byte_level_tokenizer(VOCAB_SIZE)
END_TOKEN = 3
NUMBER = Grammar("regex", "[0-9]{2}", "guided_regex")


def with_compiler(use: Callable[[GuideCompiler], Awaitable[T]], limits: GuidanceLimits | None = None) -> T:
    async def run() -> T:
        compiler = make_compiler(TOKENIZER, limits)
        try:
            return await use(compiler)
        finally:
            await compiler.close()

    return asyncio.run(run())


def refusal(kind: GrammarKind, text: str, limits: GuidanceLimits | None = None) -> str:
    """Return why a grammar is refused; another one must work after it."""

    async def refused(compiler: GuideCompiler) -> str:
        with pytest.raises(RequestInvalid) as error:
            await compiler.compile(Grammar(kind, text, "there"))
        assert error.value.param == "there"
        assert error.value.code == "invalid_grammar"
        assert (await compiler.compile(NUMBER)).start() is not None
        return str(error.value)

    return with_compiler(refused, limits)


def token_of(character: str) -> int:
    token = TOKENIZER.token_to_id(character)
    assert token is not None
    return token


def written(tokens: set[int]) -> set[str]:
    return {TOKENIZER.decode([token], skip_special_tokens=False) for token in tokens}


@pytest.mark.parametrize(
    ("kind", "text", "first"),
    [
        ("regex", "[ab]x", {"a", "b"}),
        ("choice", json.dumps(["yes", "no"]), {"y", "n"}),
        ("choice", json.dumps(['"\n\\', "é"]), {'"', "é"[0]}),
        ("grammar", 'start: "a" | b\nb: "c" b | "d"\n', {"a", "c", "d"}),
        ("grammar", 'root ::= "a" [0-9]+ | "z"\n', {"a", "z"}),
        ("json_schema", '{"type": "boolean"}', {"t", "f"}),
    ],
)  # fmt: skip
def test_every_kind_allows_first_what_it_says(kind: GrammarKind, text: str, first: set[str]) -> None:
    tokens = allowed_after(compile_one(kind, text), [])

    begins = {name[0] for name in written(tokens)}
    assert begins <= first | {"\ufffd"}
    assert len(begins) == len(first)
    assert END_TOKEN not in tokens


def test_the_end_token_is_allowed_exactly_where_the_grammar_may_end() -> None:
    guide = compile_one("regex", "a(bc)?")
    a, b, c = map(token_of, "abc")

    assert END_TOKEN not in allowed_after(guide, [])
    assert END_TOKEN in allowed_after(guide, [a])
    assert END_TOKEN not in allowed_after(guide, [a, b])
    assert allowed_after(guide, [a, b, c]) == {END_TOKEN}


def test_two_sequences_of_one_guide_do_not_know_each_other() -> None:
    guide = compile_one("regex", "ab|cd")
    one, other = guide.start(), guide.start()
    a, c = token_of("a"), token_of("c")
    for sequence, token in ((one, a), (other, c)):
        sequence.prepare([], 0)
        assert sequence.allowed()[token]
        sequence.prepare([token], 1)

    assert written({int(t) for t in one.allowed().nonzero()[0]}) == {"b"}
    assert written({int(t) for t in other.allowed().nonzero()[0]}) == {"d"}


def test_a_step_that_is_composed_twice_finds_the_same() -> None:
    sequence = compile_one("regex", "[a-c]+").start()
    tokens = [token_of("a")]
    sequence.prepare(tokens, 1)
    sequence.prepare(tokens, 1)

    first = sequence.allowed()
    sequence.prepare(tokens, 1)

    assert (sequence.allowed() == first).all()


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_tokens_are_to_a_grammar_the_bytes_that_the_text_gets(make: Callable[[], object]) -> None:
    from kvwatch_engine.server.chat_template import ChatTemplate
    from kvwatch_engine.server.tokenizer import Tokenizer

    rust = make()
    tokenizer = Tokenizer(rust, ChatTemplate(None))  # type: ignore[arg-type]
    num_tokens = rust.get_vocab_size()  # type: ignore[attr-defined]
    vocabulary = VocabularySource(tokenizer.to_json(), num_tokens + 5, (2,)).build()

    assert vocabulary.vocab_size == num_tokens + 5
    for token in range(num_tokens):
        if not vocabulary.is_special_token(token):
            assert vocabulary.decode_bytes([token]) == tokenizer.token_bytes(token), token


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "[0-9", "regex"),
        ("regex", "(?<!a)b", "regex"),
        ("json_schema", '{"type": "textual"}', "textual"),
        ("json_schema", '{"$ref": "#/$defs/none"}', "none"),
        ("json_schema", '{"$ref": "http://127.0.0.1:9/schema.json"}', "127.0.0.1"),
        ("json_schema", '{"type": "object", "unevaluatedProperties": false}', "unevaluatedProperties"),
        ("json_schema", '{"type": "string", "minLength": 3, "maxLength": 2}', ""),
        ("grammar", "start: nothing\n", "nothing"),
        ("grammar", "hello world", ""),
        ("grammar", '{"grammars": [{"regex": "a"}]}', "begins with a rule"),
        ("grammar", 'root ::= "a" (', ""),
    ],
)  # fmt: skip
def test_a_wrong_grammar_is_refused_with_the_reason(kind: GrammarKind, text: str, reason: str) -> None:
    message = refusal(kind, text)

    assert message.startswith("there: ")
    assert reason in message
    assert len(message) < 400


def test_a_schema_cannot_ask_for_being_taken_less_seriously() -> None:
    """`x-guidance` would let the library ignore what it does not know."""
    schema = {"type": "object", "unevaluatedProperties": False, "x-guidance": {"lenient": True}}

    assert "unevaluatedProperties" in refusal("json_schema", json.dumps(schema))


DOUBLING = (
    "start: A\nA: B B\n" + "".join(f"{chr(66 + i)}: {chr(67 + i)} {chr(67 + i)}\n" for i in range(22)) + 'X: "x"\n'
)
MANY_NAMES = msgspec.json.encode(
    {"allOf": [{"properties": {f"{i + j:x}": {} for i in range(600)}} for j in range(0, 6000, 600)]}
).decode()
CHAIN = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"\n'


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("grammar", DOUBLING),
        ("grammar", CHAIN),
        ("grammar", CHAIN.replace("r", "R").replace("staRt", "start")),
        ("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000 + "\n"),
        ("regex", "(" * 2_000 + "a" + ")" * 2_000),
        ("regex", "a" * 4_097),
        ("json_schema", json.dumps({"enum": ["x" * 70_000]})),
        ("json_schema", json.dumps({"$ref": "#/$defs/d0", "$defs": {"d2000": {}} | {
            f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2000)}})),
        ("json_schema", MANY_NAMES),
        ("json_schema", json.dumps({"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}, "required": [f"p{i}{j}"]}
                                                         for j in range(8)]} for i in range(8)]})),
    ],
)  # fmt: skip
def test_a_hostile_grammar_is_refused_and_the_next_one_compiles(kind: GrammarKind, text: str) -> None:
    """One of these takes all of the stack, one seconds; the process that tries them may die of it, and nothing else."""
    assert refusal(kind, text)


def test_a_terminal_that_would_take_long_at_a_later_token_only_is_refused_by_its_size() -> None:
    later = DOUBLING.replace("start: A", 'start: "go" A')

    assert "stands for more than" in refusal("grammar", later)


def trial_processes() -> list[psutil.Process]:
    """Return the trial processes that this one has started and that live."""
    children = psutil.Process().children()
    return [
        each for each in children if each.status() != psutil.STATUS_ZOMBIE and "guidance.trial" in str(each.cmdline())
    ]


def status_of(process: psutil.Process) -> str:
    """Return the status of a process that may end meanwhile."""
    with suppress(psutil.Error, OSError):
        return str(process.status())
    return psutil.STATUS_DEAD


def processor_seconds(process: psutil.Process) -> float:
    """Return the time of a processor that a process has taken, which may end meanwhile."""
    with suppress(psutil.Error, OSError):
        return float(sum(process.cpu_times()[:2]))
    return 0.0


def names_of_properties(count: int) -> Grammar:
    """Return a schema that takes a tenth of a millisecond of a processor for each of its names, or more."""
    names = json.dumps({"type": "object", "properties": {f"{i:x}": {} for i in range(count)}})
    return Grammar("json_schema", names, "there")


def test_what_takes_more_of_a_processor_than_it_may_is_refused() -> None:
    async def use(compiler: GuideCompiler) -> None:
        with pytest.raises(RequestInvalid, match=r"0\.05 s of a processor"):
            await compiler.compile(names_of_properties(3000))

    with_compiler(use, replace(PATIENT, compile_cpu_seconds=0.05))


def test_who_gets_nothing_of_a_processor_in_time_is_told_to_come_back_and_may_do_so() -> None:
    grammar = names_of_properties(3000)

    async def use(compiler: GuideCompiler) -> None:
        await compiler.compile(NUMBER)  # the process is there
        compiler.limits = replace(PATIENT, compile_seconds=0.01, answer_seconds=0.01)
        with pytest.raises(EngineOverloaded, match="too busy") as error:
            await compiler.compile(grammar)
        assert "there" in str(error.value)
        compiler.limits = PATIENT
        assert (await compiler.compile(grammar)).start() is not None, "that was no refusal"

    with_compiler(use, replace(PATIENT, compile_cpu_seconds=60))


def test_while_all_threads_wait_for_long_ones_others_are_told_so_and_their_own_time_is_not_used_up() -> None:
    long = [names_of_properties(3000 + number) for number in range(PATIENT.max_trials)]

    async def use(compiler: GuideCompiler) -> None:
        assert (await compiler.compile(NUMBER)).start() is not None
        waiting = [asyncio.create_task(compiler.compile(grammar)) for grammar in long]
        for _ in range(20):  # until all have their threads
            await asyncio.sleep(0)
        compiler.limits = replace(compiler.limits, compile_seconds=0.05, answer_seconds=0.05)
        with pytest.raises(EngineOverloaded, match="too busy"):
            await compiler.compile(Grammar("regex", "[a-f]{4}", "other"))
        assert not any(task.done() for task in waiting)
        for task in waiting:
            with pytest.raises(RequestInvalid, match="of a processor"):
                await task
        compiler.limits = PATIENT
        assert (await compiler.compile(Grammar("regex", "[a-f]{4}", "other"))).start() is not None

    with_compiler(use, replace(PATIENT, compile_cpu_seconds=0.3))


def test_each_grammar_gets_an_answer_of_its_own_whatever_becomes_of_those_beside_it() -> None:
    trials = Trials(VocabularySource(TOKENIZER.to_str(), VOCAB_SIZE, (END_TOKEN,)), PATIENT)
    grammars = [NUMBER, names_of_properties(3000), Grammar("regex", "[a", "there"), Grammar("grammar", CHAIN, "there")]
    try:
        with ThreadPoolExecutor(8) as threads:
            asked = [threads.submit(trials.run, grammar, 60.0) for grammar in grammars * 2]
            for number, future in enumerate(asked):
                if number % 4 == 0:
                    assert "[0-9]" in future.result(60)
                else:
                    with pytest.raises(RequestInvalid, match=("", "processor", "regex", "memory")[number % 4]):
                        future.result(60)
    finally:
        trials.close()


def test_a_trial_process_that_was_killed_is_started_again_and_nobody_notices() -> None:
    trials = Trials(VocabularySource(TOKENIZER.to_str(), VOCAB_SIZE, (END_TOKEN,)), PATIENT)
    try:
        assert trials.run(NUMBER, 60)
        [process] = trial_processes()
        process.kill()
        assert trials.run(NUMBER, 60)
        [again] = trial_processes()
        assert again.pid != process.pid
    finally:
        trials.close()
    assert not trial_processes()


@pytest.mark.parametrize("is_once", [True, False], ids=["once", "always"])
def test_a_grammar_is_not_blamed_for_a_worker_that_somebody_else_has_killed(is_once: bool) -> None:
    """A system that is short of memory does so; the grammar is tried again, and what it found is no refusal."""
    grammar = names_of_properties(3000)

    async def killed(compiler: GuideCompiler, process: psutil.Process) -> asyncio.Task[object]:
        """Compile the grammar; kill the worker that has it, once or as long as there is an answer to wait for."""
        compiling: asyncio.Task[object] = asyncio.create_task(compiler.compile(grammar))
        while not compiling.done():
            busy = [each for each in process.children() if processor_seconds(each) > 0.05]
            for each in busy:
                with suppress(psutil.Error):
                    each.kill()
            if busy and is_once:
                break
            await asyncio.sleep(0.005)
        return compiling

    async def use(compiler: GuideCompiler) -> None:
        await compiler.compile(NUMBER)
        [process] = trial_processes()
        compiling = await killed(compiler, process)
        if is_once:
            assert await compiling is not None
        else:
            with pytest.raises(EngineOverloaded, match="retry later"):
                await compiling
            assert (await compiler.compile(grammar)).start() is not None, "that was no refusal"
        assert trial_processes() == [process], "the others went on"

    with_compiler(use, replace(PATIENT, compile_cpu_seconds=60))


def test_a_process_that_compiles_stands_still_between_its_turns_and_is_ended_for_what_it_has_used() -> None:
    limits = GuidanceLimits(compile_seconds=250, compile_cpu_seconds=0.3)
    trials = Trials(VocabularySource(TOKENIZER.to_str(), VOCAB_SIZE, (END_TOKEN,)), limits)
    try:
        assert trials.run(NUMBER, 250)
        [process] = trial_processes()
        with ThreadPoolExecutor(1) as threads:
            refused = threads.submit(trials.run, names_of_properties(3000), 250.0)
            looks: list[bool] = []
            while not refused.done():
                looks.append(any(status_of(each) == psutil.STATUS_STOPPED for each in process.children()))
                time.sleep(0.005)
            with pytest.raises(RequestInvalid, match="of a processor"):
                refused.result()
        assert sum(looks) > 0.2 * len(looks), "four fifths or more on an idle machine"
    finally:
        trials.close()


def test_a_grammar_that_needs_little_is_done_before_those_that_came_earlier_and_take_long() -> None:
    trials = Trials(
        VocabularySource(TOKENIZER.to_str(), VOCAB_SIZE, (END_TOKEN,)), replace(PATIENT, compile_cpu_seconds=60)
    )
    try:
        assert trials.run(NUMBER, 250)
        with ThreadPoolExecutor(4) as threads:
            long = [threads.submit(trials.run, names_of_properties(6000 + number), 250.0) for number in range(3)]
            time.sleep(0.1)
            assert trials.run(Grammar("regex", "[a-f]{4}", "other"), 250)
            assert not any(each.done() for each in long)
            for each in long:
                each.exception()
    finally:
        trials.close()


def test_workers_end_with_the_process_that_gives_them_turns() -> None:
    limits = replace(PATIENT, compile_cpu_seconds=60)
    trials = Trials(VocabularySource(TOKENIZER.to_str(), VOCAB_SIZE, (END_TOKEN,)), limits)
    try:
        assert trials.run(NUMBER, 250)
        [process] = trial_processes()
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(trials.run, names_of_properties(3000), 250.0)
            wait_until(lambda: any(status_of(each) == psutil.STATUS_STOPPED for each in process.children()))
            workers = process.children()
            process.kill()
            _, alive = psutil.wait_procs(workers, timeout=60)
            assert not alive
            answer.exception()  # it was tried again
    finally:
        trials.close()


def test_a_refusal_is_remembered_with_the_field_that_it_names_and_costs_nothing_again() -> None:
    bad = [Grammar("regex", f"[{number}", "guided_regex") for number in range(3)]

    async def use(compiler: GuideCompiler) -> None:
        messages = []
        for grammar in bad:
            with pytest.raises(RequestInvalid) as error:
                await compiler.compile(grammar)
            messages.append(str(error.value))
        [process] = trial_processes()
        process.kill()
        process.wait(60)
        for grammar, message in list(zip(bad, messages, strict=True))[1:]:
            with pytest.raises(RequestInvalid) as error:
                await compiler.compile(grammar)
            assert (str(error.value), error.value.param, error.value.code) == (
                message,
                "guided_regex",
                "invalid_grammar",
            )
        assert not trial_processes(), "nobody was asked"
        with pytest.raises(RequestInvalid, match="elsewhere"):
            await compiler.compile(replace(bad[1], param="elsewhere"))
        with pytest.raises(RequestInvalid):
            await compiler.compile(bad[0])
        assert trial_processes(), "only the last two are remembered"

    with_compiler(use, replace(PATIENT, max_refusals=2))


def test_memory_that_a_grammar_may_take_is_bounded() -> None:
    message = refusal("json_schema", MANY_NAMES, replace(PATIENT, compile_cpu_seconds=120, trial_bytes=2**20))

    assert "memory" in message


@pytest.mark.parametrize(
    "text",
    [
        "(a|b)*a(a|b){20}", "(.*)(a|b)*a(.){200}", "a{1,1000000}", r"(\w{1,100}\s){1,100}",
        "((((a{1,50}){1,50}){1,50}){1,50})",
    ],
)  # fmt: skip
def test_expressions_that_would_explode_as_an_automaton_are_followed_lazily_or_given_up(text: str) -> None:
    sequence, tokens = compile_one("regex", text).start(), list[int]()

    reason = ""
    for _ in range(60):
        sequence.prepare(tokens, len(tokens))
        try:
            allowed = sequence.allowed()
        except GuideFailed as error:
            reason = str(error)
            break
        tokens.append([int(token) for token in allowed.nonzero()[0] if token != END_TOKEN][-1])

    assert sequence.error == reason
    assert tokens, "its beginning was tried"


def test_equal_grammars_are_compiled_once_even_at_the_same_time() -> None:
    async def use(compiler: GuideCompiler) -> None:
        guides = await asyncio.gather(*(compiler.compile(NUMBER) for _ in range(8)))
        assert len(set(map(id, guides))) == 1
        assert await compiler.compile(NUMBER) is guides[0]

    with_compiler(use)


def test_the_cache_keeps_those_that_were_used_last() -> None:
    async def use(compiler: GuideCompiler) -> None:
        first = await compiler.compile(NUMBER)
        for number in range(3):
            await compiler.compile(Grammar("regex", f"a{number}", ""))
            assert await compiler.compile(NUMBER) is first, "it was used in between"
        for number in range(3, 7):
            await compiler.compile(Grammar("regex", f"a{number}", ""))
        assert await compiler.compile(NUMBER) is not first

    with_compiler(use, replace(PATIENT, max_cached=3))


def test_more_waiting_grammars_than_the_limit_are_told_to_come_back() -> None:
    async def use(compiler: GuideCompiler) -> None:
        waiting = [asyncio.create_task(compiler.compile(Grammar("regex", f"a{n}", ""))) for n in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(EngineOverloaded):
            await compiler.compile(NUMBER)
        await asyncio.gather(*waiting)
        await compiler.compile(NUMBER)

    with_compiler(use, replace(PATIENT, max_pending=2))


def test_who_does_not_wait_any_more_leaves_it_to_the_others() -> None:
    async def use(compiler: GuideCompiler) -> None:
        gone, stays = (asyncio.create_task(compiler.compile(NUMBER)) for _ in range(2))
        await asyncio.sleep(0)
        gone.cancel()
        assert (await stays).start() is not None

    with_compiler(use)


def test_a_model_without_end_tokens_is_told_apart() -> None:
    compiler = GuideCompiler(TOKENIZER.to_str(), VOCAB_SIZE, ())

    with pytest.raises(RequestInvalid, match="no end token") as error:
        compile_all([NUMBER], compiler)

    assert error.value.code == "unsupported"


def test_a_tokenizer_of_an_unknown_kind_refuses_grammars_and_nothing_else() -> None:
    compiler = GuideCompiler("{}", VOCAB_SIZE, (3,))

    with pytest.raises(RequestInvalid, match="tokenizer") as error:
        compile_all([NUMBER], compiler)

    assert error.value.code == "unsupported"


@pytest.mark.parametrize(
    "schema",
    [
        {"a": [[[[[[1]]]]]]},
        {"enum": list(range(200))},
    ],
)  # fmt: skip
def test_a_schema_too_deep_or_too_large_is_refused_before_anything_looks_at_it(schema: object) -> None:
    limits = GuidanceLimits(max_depth=6, max_schema_values=100)

    with pytest.raises(RequestInvalid):
        check_schema(schema, "there", limits)
    check_schema({"a": [1, {"b": 2}]}, "there", limits)

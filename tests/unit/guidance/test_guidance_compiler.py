"""Grammars are compiled off the loop, bounded, once; a bad one fails alone, whatever it does to its process."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import pytest
from guided_stage import VOCAB_SIZE, allowed_after, compile_all, compile_one, make_compiler
from openai_server import byte_fallback_tokenizer, byte_level_tokenizer

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


def test_what_takes_longer_than_its_time_is_refused() -> None:
    """On the machine of whoever wrote this it takes half a second."""
    names = json.dumps({"properties": {f"{i:x}": {} for i in range(3000)}})

    async def use(compiler: GuideCompiler) -> None:
        with pytest.raises(RequestInvalid, match=r"0\.05 s"):
            await compiler.compile(Grammar("json_schema", names))

    with_compiler(use, GuidanceLimits(compile_seconds=0.05))


def test_after_one_that_was_too_slow_the_next_gets_an_answer_of_its_own() -> None:
    names = json.dumps({"type": "object", "properties": {f"{i:x}": {} for i in range(2500)}})
    limits = GuidanceLimits(compile_seconds=0.05)
    trials = Trials(VocabularySource(TOKENIZER.to_str(), VOCAB_SIZE, (END_TOKEN,)), limits)
    try:
        with pytest.raises(RequestInvalid, match=r"0\.05 s"):
            trials.run(Grammar("json_schema", names))
        trials.limits = GuidanceLimits(compile_seconds=60)
        with pytest.raises(RequestInvalid, match="regex"):
            trials.run(Grammar("regex", "[a"))
        assert "[0-9]" in trials.run(NUMBER)
    finally:
        trials.close()


def test_memory_that_a_grammar_may_take_is_bounded() -> None:
    message = refusal("json_schema", MANY_NAMES, GuidanceLimits(compile_seconds=120, trial_bytes=2**20))

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

    with_compiler(use, GuidanceLimits(max_cached=3))


def test_more_waiting_grammars_than_the_limit_are_told_to_come_back() -> None:
    async def use(compiler: GuideCompiler) -> None:
        waiting = [asyncio.create_task(compiler.compile(Grammar("regex", f"a{n}", ""))) for n in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(EngineOverloaded):
            await compiler.compile(NUMBER)
        await asyncio.gather(*waiting)
        await compiler.compile(NUMBER)

    with_compiler(use, GuidanceLimits(max_pending=2))


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

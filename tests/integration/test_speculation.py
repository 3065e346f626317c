"""Real models say with drafts what they say without: greedy as transformers does, drawn with the same seeds."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from builders import NullModel, Recorder
from grouped_models import Reference, WatchedEngine
from model_server import model_server
from openai.types.chat import ChatCompletionMessageParam
from openai_server import RunningServer, arithmetic_server, byte_level_tokenizer, save_tokenizer
from tiny_models import VOCAB_SIZE, Architecture, embedded_model_folder, make_tiny_model
from transformers import AutoTokenizer

from kvwatch.telemetry.events import DraftsVerified, RequestPreempted, StepCompleted
from kvwatch_engine.contracts.step import Int32Array
from kvwatch_engine.model.loader import LoadedModel, load_model
from kvwatch_engine.scheduling import drafting

SPECULATION: dict[str, Any] = {"num_speculative_tokens": 5, "prompt_lookup_min": 1}
NUM_TOKENS = 48

pytestmark = pytest.mark.timeout(600)


def copy_heavy_prompts(count: int) -> list[list[int]]:
    """Return prompts of random tokens that come several times."""
    prompts = []
    for seed in range(count):
        random = Random(seed)
        phrase = [random.randrange(3, VOCAB_SIZE) for _ in range(random.randint(1, 25))]
        prompts.append((phrase * 3)[: random.randint(1, 60)])
    return prompts


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma3"])
def architecture(request: pytest.FixtureRequest) -> Architecture:
    found: Architecture = request.param
    return found


@pytest.fixture(scope="module")
def folder(architecture: Architecture, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(architecture, tmp_path_factory.mktemp(architecture), seed=1)


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype="float32")


def make_engine(model: LoadedModel, **settings: Any) -> WatchedEngine:
    values = {
        "num_blocks": 400, "block_size": 8, "max_model_len": 256, "max_num_seqs": 16, "max_batch_tokens": 96,
    }  # fmt: skip
    return WatchedEngine(model, **{**values, **settings})


@pytest.mark.parametrize("num_blocks", [400, 36])
@pytest.mark.parametrize("is_told", [False, True], ids=["found", "told"])
def test_greedy_answers_are_those_of_transformers_alone_and_together(
    model: LoadedModel, folder: Path, num_blocks: int, monkeypatch: pytest.MonkeyPatch, *, is_told: bool
) -> None:
    """Random models seldom repeat themselves: told drafts come from the answers that are expected."""
    reference = Reference.load(folder)
    prompts = copy_heavy_prompts(8)
    expected = [reference.answer(prompt, NUM_TOKENS) for prompt in prompts]
    if is_told:
        tell = Told([[*prompt, *answer] for prompt, answer in zip(prompts, expected, strict=True)])
        monkeypatch.setattr(drafting, "find_draft", tell)
    engine = make_engine(model, num_blocks=num_blocks * len(model.info.groups), max_prefill_chunk=32, **SPECULATION)
    recorder = Recorder(engine.log)

    together = engine.run(prompts, NUM_TOKENS)
    alone = [engine.run([prompt], NUM_TOKENS)[0] for prompt in prompts]

    for prompt, answers, again, wanted in zip(prompts, together, alone, expected, strict=True):
        reference.check(prompt, answers[0], wanted)
        reference.check(prompt, again[0], wanted)
    assert reference.num_excused <= 1
    verified = [event for event in recorder.drain() if isinstance(event, DraftsVerified)]
    if is_told:
        assert sum(event.accepted_tokens for event in verified) > 8 * NUM_TOKENS
        assert sum(event.rejected_tokens for event in verified) > NUM_TOKENS
    assert verified
    if num_blocks == 36:
        assert any(isinstance(event, RequestPreempted) for event in recorder.events), (
            "the pool is meant to be too small"
        )


class Told:
    """Drafts that are right, but for one wrong token in some of them: stands in for the search."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts
        self.num_calls = 0

    def __call__(self, tokens: Int32Array, max_tokens: int, _min_ngram: int, _max_ngram: int) -> tuple[int, ...]:
        self.num_calls += 1
        so_far = tokens.tolist()
        text = next((text for text in self.texts if text[: len(so_far)] == so_far), [])
        draft = text[len(so_far) : len(so_far) + max_tokens]
        wrong = self.num_calls % 7
        if wrong < len(draft):
            draft[wrong] = (draft[wrong] + 1) % VOCAB_SIZE
        return tuple(draft)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.9, "seed": 11},
        {"temperature": 0.7, "seed": 5, "n": 3, "top_p": 0.9, "top_k": 40},
        {"temperature": 0.3, "seed": 1, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"repetition_penalty": 1.3},
        {"n": 2, "min_tokens": 20, "stop_token_ids": tuple(range(40, 90))},
    ],
    ids=["seed", "samples", "penalties", "repetition", "stops"],
)
def test_drawn_and_penalised_answers_are_those_without_drafts(model: LoadedModel, sampling: dict[str, Any]) -> None:
    prompts = copy_heavy_prompts(6)
    expected = make_engine(model).run(prompts, NUM_TOKENS, **sampling)
    engine = make_engine(model, **SPECULATION)
    recorder = Recorder(engine.log)

    assert engine.run(prompts, NUM_TOKENS, **sampling) == expected
    assert any(isinstance(event, DraftsVerified) for event in recorder.drain())


def test_what_speculation_has_stored_is_hit_and_continued_as_transformers_does(
    model: LoadedModel, folder: Path
) -> None:
    reference = Reference.load(folder)
    engine = make_engine(model, **SPECULATION)
    prompts = copy_heavy_prompts(4)
    answers = engine.run(prompts, NUM_TOKENS)
    longer = [[*prompt, *answer[0]] for prompt, answer in zip(prompts, answers, strict=True)]
    pool = engine.core.manager.pool
    assert pool.num_cached > 0

    again = engine.run(longer, 4)

    for prompt, answer in zip(longer, again, strict=True):
        reference.check(prompt, answer[0], reference.answer(prompt, 4))


# ---------------------------------------------------------------- over HTTP


Servers = tuple[RunningServer, RunningServer]
"""Of one model: without drafts, and with them."""

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "a block table says which blocks a block"}]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A real model, which soon says the same again and again."""
    folder = make_tiny_model("gemma3", tmp_path_factory.mktemp("served"), seed=1)
    with model_server(folder) as plain, model_server(folder, **SPECULATION) as speculating:
        yield plain, speculating


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A null model whose answers nearly repeat themselves."""
    folder = save_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer())
    models = NullModel(401), NullModel(401)
    for each in models:
        each.period = 11
    with (
        arithmetic_server(folder, models[0]) as plain,
        arithmetic_server(folder, models[1], **SPECULATION) as speculating,
    ):
        yield plain, speculating


def ask_both(servers: Servers, **more: Any) -> Any:
    """Ask both servers; return what they both say."""
    arguments: dict[str, Any] = {"max_tokens": 60, "seed": 4, **more}
    found = []
    for server in servers:
        with server.openai() as client:
            found.append(
                told(
                    client.chat.completions.create(
                        model=client.models.list().data[0].id, messages=MESSAGES, **arguments
                    )
                )
            )
        server.wait_idle()
        assert server.num_used_blocks == 0
    assert found[0] == found[1]
    return found[0]


def told(answer: Any) -> Any:
    """Return what an answer says, but for ids and the last digits of log-probabilities."""
    choices = [
        (
            choice.message.content,
            choice.finish_reason,
            [(each.token, round(each.logprob, 2), len(each.top_logprobs)) for each in choice.logprobs.content]
            if choice.logprobs
            else None,
        )
        for choice in answer.choices
    ]
    return choices, answer.usage.prompt_tokens, answer.usage.completion_tokens


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0},
        {"temperature": 0.8, "n": 3},
        {"temperature": 0, "logprobs": True, "top_logprobs": 2},
        {"temperature": 0, "max_tokens": 7},
        {"temperature": 0.5, "extra_body": {"min_tokens": 10}},
    ],
    ids=["greedy", "samples", "logprobs", "length", "min_tokens"],
)
def test_answers_over_http_are_the_same(real: Servers, more: dict[str, Any]) -> None:
    log = Recorder(real[1].log)

    ask_both(real, **more)

    assert sum(event.accepted_tokens for event in log.drain() if isinstance(event, DraftsVerified)) > 0


def test_a_stop_string_within_the_tokens_of_one_step_ends_the_text_there(arithmetic: Servers) -> None:
    log = Recorder(arithmetic[1].log)
    [(text, _, _)], _, _ = ask_both(arithmetic)

    for place in range(3, 60, 5):
        [(cut, reason, _)], _, _ = ask_both(arithmetic, stop=[text[place : place + 4]])
        assert (cut, reason) == (text[: text.index(text[place : place + 4])], "stop")

    assert sum(event.accepted_tokens for event in log.drain() if isinstance(event, DraftsVerified)) > 50


def test_a_stream_brings_the_same_text_and_the_same_usage(arithmetic: Servers) -> None:
    found = []
    for server in arithmetic:
        with server.openai() as client:
            chunks = list(
                client.chat.completions.create(
                    model=client.models.list().data[0].id, messages=MESSAGES, seed=4, max_tokens=60, n=2, stream=True,
                    stream_options={"include_usage": True},
                )
            )  # fmt: skip
        pieces = [chunk.choices[0] for chunk in chunks if chunk.choices]
        texts = ["".join(each.delta.content or "" for each in pieces if each.index == index) for index in range(2)]
        found.append((texts, chunks[-1].usage))
        server.wait_idle()
    assert found[0] == found[1]
    assert all(found[0][0])


# ---------------------------------------------------------------- the embedded model

PASSAGES = (
    "The pool holds 120 blocks of 16 tokens each. When a request ends, its blocks return to the pool.",
    "Error 507: the volume 'archive-07' is full; delete snapshots older than 30 days, then retry the backup.",
    "def add(left: int, right: int) -> int:\n    return left + right\n\n\ndef sub(left: int, right: int) -> int:\n",
    "Name: Ada Lovelace\nBorn: 10 December 1815\nKnown for: the first published computer program\n",
)
ASKED = (
    "Repeat the following text word by word:\n\n{}",
    "Write this down twice, and change nothing:\n\n{}",
    "Copy the text between the lines.\n-----\n{}\n-----",
)


@pytest.mark.model
@pytest.mark.slow
def test_copying_takes_far_fewer_steps_than_tokens_and_gives_the_same_text() -> None:
    """Tokens of a sequence in a decode step, counted: well above 1.3 where prompts ask for copies."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_folder())
    model = load_model("embedded", dtype="float32")
    prompts: list[list[int]] = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": asked.format(passage)}], add_generation_prompt=True, return_dict=False
        )
        for passage in PASSAGES
        for asked in ASKED
    ]
    reference = Reference.load(embedded_model_folder())
    plain = make_engine(model, max_model_len=512, max_batch_tokens=512).run(prompts, 64)
    engine = make_engine(model, max_model_len=512, max_batch_tokens=512, num_speculative_tokens=5)
    recorder = Recorder(engine.log)

    num_tokens = num_steps = 0
    for prompt, expected in zip(prompts, plain, strict=True):
        answer = engine.run([prompt], 64)[0][0]
        reference.check(prompt, answer, expected[0])
        steps = [event for event in recorder.drain() if isinstance(event, StepCompleted)]
        recorder.events.clear()
        decode_steps = steps[-sum(event.generated_tokens > 0 for event in steps) + 1 :]
        num_steps += len(decode_steps)
        num_tokens += sum(event.generated_tokens for event in decode_steps)

    print(f"{num_tokens} tokens in {num_steps} steps: {num_tokens / num_steps:.2f} a step")
    assert num_tokens == len(prompts) * 63
    assert num_tokens / num_steps > 1.3

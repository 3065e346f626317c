"""The server on real models: text and log-probabilities are those of transformers."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch
from beam_reference import Found, reference_beams
from model_server import model_server
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from openai_server import RunningServer
from tiny_models import embedded_model_folder, make_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from kvwatch_engine.contracts.sampling import BeamParams

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Größe und 東京? 🙂"}]
NUM_TOKENS = 40


class Reference:
    """transformers on the same folder."""

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
        loaded = AutoTokenizer.from_pretrained(str(folder))
        assert isinstance(loaded, PreTrainedTokenizerFast)
        self.tokenizer = loaded

    def prompt(self) -> list[int]:
        ids = self.tokenizer.apply_chat_template(
            list(MESSAGES), tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert isinstance(ids, list)
        return ids

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        tokens = self.model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=num_tokens,
            pad_token_id=self.tokenizer.pad_token_id,
        )  # fmt: skip
        return [int(token) for token in tokens[0, len(prompt) :]]

    def text(self, answer: Sequence[int]) -> str:
        return str(self.tokenizer.decode(answer, skip_special_tokens=True))

    @torch.inference_mode()
    def logprobs(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """Return f32[len(answer), vocab_size]."""
        logits: torch.Tensor = self.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with model_server(folder) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[OpenAI]:
    with server.openai() as client:
        yield client
    server.wait_idle()


def test_a_greedy_chat_answer_is_that_of_transformers(client: OpenAI, reference: Reference) -> None:
    expected = reference.greedy(reference.prompt())

    answer = client.chat.completions.create(model="model", messages=MESSAGES, temperature=0, max_tokens=NUM_TOKENS, n=2)

    text = reference.tokenizer.decode(expected, skip_special_tokens=True)
    assert [choice.message.content for choice in answer.choices] == [text, text]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * len(expected)


def test_chat_log_probabilities_are_those_of_the_model(client: OpenAI, reference: Reference) -> None:
    answer = client.chat.completions.create(
        model="model", messages=MESSAGES, temperature=0, max_tokens=NUM_TOKENS, logprobs=True, top_logprobs=5
    )

    [choice] = answer.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    tokens = reference.greedy(reference.prompt())
    truth = reference.logprobs(reference.prompt(), tokens)
    assert len(content) == len(tokens)
    for entry, row, token in zip(content, truth, tokens, strict=True):
        best = row.topk(5)
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-3)
        assert entry.top_logprobs[0].bytes == entry.bytes  # greedy: the chosen token is the most likely one
    joined = b"".join(bytes(entry.bytes or []) for entry in content).decode("utf-8", "replace")
    end = reference.tokenizer.eos_token if choice.finish_reason == "stop" else ""
    assert joined == (choice.message.content or "") + str(end)


def test_streamed_log_probabilities_are_those_that_are_not_streamed(client: OpenAI) -> None:
    whole = client.chat.completions.create(
        model="model", messages=MESSAGES, seed=1, max_tokens=NUM_TOKENS, logprobs=True, top_logprobs=2
    )
    stream = client.chat.completions.create(
        model="model", messages=MESSAGES, seed=1, max_tokens=NUM_TOKENS, logprobs=True, top_logprobs=2, stream=True
    )

    streamed = [entry for chunk in stream if (found := chunk.choices[0].logprobs) for entry in found.content or []]

    assert whole.choices[0].logprobs is not None
    expected = whole.choices[0].logprobs.content or []
    assert [entry.token for entry in streamed] == [entry.token for entry in expected]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in expected], abs=1e-3)
    assert whole.usage is not None
    assert len(streamed) == whole.usage.completion_tokens


def test_completion_log_probabilities_are_four_parallel_lists(client: OpenAI, reference: Reference) -> None:
    prompt = reference.tokenizer("A block holds").input_ids
    tokens = reference.greedy(prompt, 12)
    truth = reference.logprobs(prompt, tokens)

    answer = client.completions.create(model="model", prompt=prompt, temperature=0, max_tokens=12, logprobs=3)

    found = answer.choices[0].logprobs
    assert found is not None
    chosen = [float(row[token]) for row, token in zip(truth, tokens, strict=True)]
    assert found.token_logprobs == pytest.approx(chosen, abs=1e-3)
    assert [len(top) for top in found.top_logprobs or []] == [3] * 12
    assert found.text_offset is not None
    assert found.text_offset[0] == 0
    for token, offset in zip(found.tokens or [], found.text_offset, strict=True):
        if not token.startswith("bytes:"):
            # An incomplete character before the token is written when the token shows that it stays incomplete.
            assert answer.choices[0].text[offset:].lstrip("\ufffd").startswith(token.lstrip("\ufffd"))


def test_a_large_logit_bias_decides_and_a_negative_one_forbids(client: OpenAI, reference: Reference) -> None:
    [first, *_] = reference.greedy(reference.prompt())
    [wanted] = reference.tokenizer("x", add_special_tokens=False).input_ids

    forced = client.chat.completions.create(
        model="model", messages=MESSAGES, max_tokens=5, temperature=0, logit_bias={str(wanted): 100}
    )
    avoided = client.chat.completions.create(
        model="model", messages=MESSAGES, max_tokens=1, temperature=0, logit_bias={str(first): -100}, logprobs=True
    )

    assert forced.choices[0].message.content == "xxxxx"
    assert avoided.choices[0].logprobs is not None
    assert (
        bytes((avoided.choices[0].logprobs.content or [])[0].bytes or [])
        != reference.tokenizer.decode([first]).encode()
    )


def test_a_seed_gives_the_same_text_alone_and_in_a_crowd(server: RunningServer) -> None:
    def answer(seed: int) -> str:
        body = {"messages": MESSAGES, "seed": seed, "max_tokens": 30, "temperature": 1.0, "model": "model"}
        return str(server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"])

    alone = [answer(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        crowd = list(pool.map(answer, range(6)))

    assert crowd == alone
    assert len(set(alone)) == 6


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_that_spans_tokens_is_found(client: OpenAI, reference: Reference, is_stream: bool) -> None:
    prompt = reference.tokenizer("A block holds").input_ids
    text = reference.tokenizer.decode(reference.greedy(prompt), skip_special_tokens=True)
    assert isinstance(text, str)
    stop = text[9:16]

    if is_stream:
        chunks = client.completions.create(
            model="model", prompt=prompt, temperature=0, max_tokens=NUM_TOKENS, stop=stop, stream=True
        )
        shown = "".join(chunk.choices[0].text for chunk in chunks)
    else:
        whole = client.completions.create(model="model", prompt=prompt, temperature=0, max_tokens=NUM_TOKENS, stop=stop)
        shown = whole.choices[0].text

    assert shown == text[: text.index(stop)]


@pytest.mark.model
def test_the_embedded_model_knows_the_capital_of_france_in_a_stream_and_without() -> None:
    with model_server(embedded_model_folder(), max_model_len=512, num_blocks=129) as server, server.openai() as client:
        messages: list[ChatCompletionMessageParam] = [
            {"role": "user", "content": "What is the capital of France? Answer briefly."}
        ]
        whole = client.chat.completions.create(model="model", messages=messages, temperature=0, max_tokens=20)
        stream = client.chat.completions.create(
            model="model", messages=messages, temperature=0, max_tokens=20, stream=True
        )
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)

        assert whole.choices[0].message.content == streamed == "The capital of France is Paris."
        assert whole.choices[0].finish_reason == "stop"
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="model", messages=messages, max_tokens=600)


BEAMS = BeamParams(width=4, length_penalty=0.5, early_stopping="never")
BEAM_FIELDS = {"use_beam_search": True, "beam_width": 4, "length_penalty": 0.5, "early_stopping": "never"}
STOPS = list(range(100, 130))


def expected_beams(reference: Reference, prompt: list[int]) -> list[Found]:
    ends = [*STOPS, *reference.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])]
    return reference_beams(reference.model, prompt, BEAMS, max_tokens=NUM_TOKENS, ends=ends)[:3]


def shown(found: Found, reference: Reference) -> str:
    ended = len(found.token_ids) < NUM_TOKENS or found.token_ids[-1] in STOPS
    return reference.text(found.token_ids[:-1] if ended else found.token_ids)


def test_completions_by_beam_search_are_those_of_transformers(client: OpenAI, reference: Reference) -> None:
    prompt = reference.prompt()
    expected = expected_beams(reference, prompt)

    answer = client.completions.create(
        model="model", prompt=prompt, n=3, max_tokens=NUM_TOKENS, extra_body={**BEAM_FIELDS, "stop_token_ids": STOPS}
    )

    assert [choice.text for choice in answer.choices] == [shown(each, reference) for each in expected]
    assert [(choice.model_extra or {})["score"] for choice in answer.choices] == pytest.approx(
        [each.score for each in expected], abs=1e-4
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(each.token_ids) for each in expected)
    assert answer.usage.prompt_tokens == len(prompt)


def test_a_chat_by_beam_search_gives_log_probabilities_that_add_up_to_its_score(
    client: OpenAI, reference: Reference
) -> None:
    expected = expected_beams(reference, reference.prompt())

    answer = client.chat.completions.create(
        model="model", messages=MESSAGES, n=3, max_tokens=NUM_TOKENS, logprobs=True, top_logprobs=2,
        extra_body={**BEAM_FIELDS, "stop_token_ids": STOPS},
    )  # fmt: skip

    for choice, found in zip(answer.choices, expected, strict=True):
        assert choice.message.content == shown(found, reference)
        assert choice.logprobs is not None
        logprobs = [entry.logprob for entry in choice.logprobs.content or []]
        assert len(logprobs) == len(found.token_ids)
        score = (choice.model_extra or {})["score"]
        assert score == pytest.approx(sum(logprobs) / len(logprobs) ** 0.5, abs=1e-4)
        assert score == pytest.approx(found.score, abs=1e-4)


def test_a_streamed_beam_search_brings_each_text_as_one_piece(client: OpenAI, reference: Reference) -> None:
    expected = expected_beams(reference, reference.prompt())

    stream = client.chat.completions.create(
        model="model", messages=MESSAGES, n=3, max_tokens=NUM_TOKENS, stream=True,
        extra_body={**BEAM_FIELDS, "stop_token_ids": STOPS},
    )  # fmt: skip
    pieces: dict[int, list[str]] = {}
    scores: dict[int, float] = {}
    for chunk in stream:
        for choice in chunk.choices:
            pieces.setdefault(choice.index, []).extend([choice.delta.content] if choice.delta.content else [])
            if choice.finish_reason:
                scores[choice.index] = (choice.model_extra or {})["score"]

    assert pieces == {place: [shown(each, reference)] for place, each in enumerate(expected)}
    assert [scores[place] for place in range(3)] == pytest.approx([each.score for each in expected], abs=1e-4)

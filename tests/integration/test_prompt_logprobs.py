"""Log-probabilities of prompts equal transformers' log-softmax: alone, batched, in chunks, preempted, over HTTP."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_request
from grouped_models import Reference
from model_server import model_server
from openai_server import RunningServer
from prompts import PROMPTS
from tiny_models import embedded_model_folder, make_tiny_model
from transformers import AutoTokenizer

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.request import PromptLogprobs
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.loader import LoadedModel, load_model
from kvwatch_engine.model.runner import ModelRunner

TOLERANCE = 2e-4
NUM_TOP = 5
LENGTHS = (90, 1, 2, 33, 64, 17, 5, 120)


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Stage:
    """A model, its engine, and what transformers says of some prompts."""

    def __init__(self, folder: Path, prompts: Sequence[Sequence[int]]) -> None:
        self.model: LoadedModel = load_model(str(folder), dtype="float32")
        self.prompts = [list(prompt) for prompt in prompts]
        reference = Reference.load(folder).model
        with torch.inference_mode():
            self.expected = [
                torch.log_softmax(reference(torch.tensor([prompt])).logits[0].double(), dim=-1).numpy()
                for prompt in self.prompts
            ]

    def told(self, *, together: bool, **settings: Any) -> tuple[EngineCore, list[list[PromptLogprobs]]]:
        """Run all prompts; return what is told of each."""
        values = {"block_size": 8, "num_blocks": 400, "max_model_len": 512, "max_num_seqs": 8, "max_batch_tokens": 256}
        config = EngineSettings(**{**values, **settings}, groups=self.model.info.groups)
        cache = KVCache(self.model.cache_spec(config.block_size), config.num_blocks)
        core = EngineCore(config, ModelRunner(self.model, cache), EventLog())
        found: list[list[PromptLogprobs]] = [[] for _ in self.prompts]
        for number, prompt in enumerate(self.prompts):
            core.add(make_request(str(number), prompt, prompt_logprobs=NUM_TOP, max_tokens=30, ignore_eos=True), 0)
            while not together and core.has_work:
                _collect(core, found)
        while core.has_work:
            _collect(core, found)
        core.check_integrity()
        assert core.manager.pool.num_used == 0
        return core, found

    def check(self, found: list[list[PromptLogprobs]]) -> None:
        for prompt, expected, parts in zip(self.prompts, self.expected, found, strict=True):
            assert [token for part in parts for token in part.token_ids.tolist()] == prompt[1:]
            rows = np.arange(len(prompt) - 1)
            if not len(rows):
                continue
            logprobs = np.concatenate([part.logprobs for part in parts])
            np.testing.assert_allclose(logprobs, expected[rows, prompt[1:]], atol=TOLERANCE)
            top_ids = np.concatenate([part.top_token_ids for part in parts])
            top = np.concatenate([part.top_logprobs for part in parts])
            np.testing.assert_allclose(top, np.sort(expected[:-1], axis=1)[:, : -NUM_TOP - 1 : -1], atol=TOLERANCE)
            np.testing.assert_allclose(top, np.take_along_axis(expected[:-1], top_ids, 1), atol=TOLERANCE)


def _collect(core: EngineCore, found: list[list[PromptLogprobs]]) -> None:
    for output in core.step():
        assert not output.error
        if output.prompt_logprobs is not None:
            found[int(output.request_id)].append(output.prompt_logprobs)


def token_ids(lengths: Sequence[int]) -> list[list[int]]:
    return [[(7 * place + 13 * length + 5) % 500 for place in range(length)] for length in lengths]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(make_tiny_model(request.param, tmp_path_factory.mktemp(request.param)), token_ids(LENGTHS))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("chunk", [None, 7])
def test_they_are_those_of_transformers_alone_and_in_batches_whole_and_in_chunks(
    stage: Stage, together: bool, chunk: int | None
) -> None:
    _, found = stage.told(together=together, max_prefill_chunk=chunk)

    stage.check(found)


def test_they_are_told_once_though_requests_lose_their_blocks_in_the_middle_of_the_prompt(stage: Stage) -> None:
    needed = 36 if len(stage.model.info.groups) == 1 else 80  # about two of the longest
    core, found = stage.told(
        together=True, max_prefill_chunk=7, num_blocks=needed, reserve_prompt=False, max_batch_tokens=48
    )

    stage.check(found)
    assert core.scheduler.num_preemptions > 2, "the pool is meant to be too small"


@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_embedded_models_are_those_of_transformers() -> None:
    folder = embedded_model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stage = Stage(folder, [tokenizer(prompt).input_ids for prompt in PROMPTS[:6]])

    _, found = stage.told(together=True, max_prefill_chunk=32)

    stage.check(found)


# ---------------------------------------------------------------- over HTTP

TEXTS = ["A block holds the keys and values of a few tokens", "Größe, 東京は今日も 🙂", "def step(queue):"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with model_server(folder, max_prefill_chunk=8) as running:
        yield running


class Served:
    """What transformers says of texts that are served."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = Reference.load(folder).model

    def of(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the log-probabilities of all tokens after each of these."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([list(token_ids)])).logits[0]
        return np.asarray(torch.log_softmax(logits.double(), dim=-1).numpy())


@pytest.fixture(scope="module")
def served(folder: Path) -> Served:
    return Served(folder)


def check_vllm_form(
    told: list[dict[str, Any] | None] | None, prompt: list[int], expected: np.ndarray, num_top: int
) -> None:
    assert told is not None
    assert len(told) == len(prompt)
    assert told[0] is None
    for place, entries in enumerate(told[1:], 1):
        assert entries is not None
        row, token = expected[place - 1], prompt[place]
        assert next(iter(entries)) == str(token), "the prompt's own token comes first"
        assert num_top <= len(entries) <= num_top + 1
        for name, entry in entries.items():
            assert entry["logprob"] == pytest.approx(row[int(name)], abs=TOLERANCE)
            assert set(entry) == {"logprob", "rank", "decoded_token"}
        assert abs(entries[str(token)]["rank"] - 1 - int((row > row[token]).sum())) <= 1, "but for a near tie"
        assert {entry["rank"] for entry in entries.values()} >= set(range(1, num_top + 1))


def test_the_client_gets_them_for_completions_of_several_prompts_and_samples(
    server: RunningServer, served: Served
) -> None:
    with server.openai() as client:
        answer = client.completions.create(
            model="model", prompt=TEXTS, n=2, max_tokens=3, extra_body={"prompt_logprobs": 4}
        )

    assert len(answer.choices) == 6
    for choice in answer.choices:
        prompt = served.tokenizer(TEXTS[choice.index // 2]).input_ids
        told = choice.model_extra["prompt_logprobs"] if choice.model_extra else None
        check_vllm_form(told, prompt, served.of(prompt), 4)
        assert choice.logprobs is None
    server.wait_idle()


def test_the_client_gets_them_for_chats(server: RunningServer, served: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": TEXTS[1]}]
    prompt = served.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    with server.openai() as client:
        answers = [
            client.chat.completions.create(model="model", messages=messages, max_tokens=2, extra_body=extra)
            for extra in ({"prompt_logprobs": 0}, {"prompt_logprobs": 2}, {})
        ]

    first, second, none = ((answer.model_extra or {}).get("prompt_logprobs") for answer in answers)
    check_vllm_form(first, prompt, served.of(prompt), 0)
    check_vllm_form(second, prompt, served.of(prompt), 2)
    assert none is None
    assert all(answer.usage and answer.usage.prompt_tokens == len(prompt) for answer in answers)
    assert [
        answer.usage.prompt_tokens_details.cached_tokens or 0
        for answer in answers
        if answer.usage and answer.usage.prompt_tokens_details
    ] == [0, 0, (len(prompt) - 1) // 8 * 8], "who does not ask finds what the others have computed"


@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("text", TEXTS)
def test_an_echoed_prompt_has_log_probabilities_like_the_text_behind_it_also_in_a_stream(
    server: RunningServer, served: Served, text: str, num_top: int
) -> None:
    prompt = served.tokenizer(text).input_ids
    fields: dict[str, Any] = {"model": "model", "prompt": text, "echo": True, "logprobs": num_top, "temperature": 0}

    with server.openai() as client:
        whole = client.completions.create(**fields, max_tokens=4).choices[0]
        parts = [chunk.choices[0] for chunk in client.completions.create(**fields, max_tokens=4, stream=True)]

    told = whole.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert told.text_offset is not None
    assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == len(prompt) + 4
    assert told.token_logprobs[0] is None
    expected = served.of(prompt)
    for place in range(1, len(prompt)):
        assert told.token_logprobs[place] == pytest.approx(expected[place - 1, prompt[place]], abs=TOLERANCE)
    if num_top:
        assert told.top_logprobs is not None
        assert told.top_logprobs[0] is None
        best = np.sort(expected, axis=1)[:, -1]
        for place in range(1, len(prompt)):
            entries = told.top_logprobs[place]
            assert num_top <= len(entries) <= num_top + 1
            assert max(entries.values()) == pytest.approx(best[place - 1], abs=TOLERANCE)
    else:
        assert told.top_logprobs is None
    assert told.text_offset == sorted(told.text_offset)
    assert told.text_offset[len(prompt)] == len(text)
    assert whole.text.startswith(text)
    assert "".join(part.text for part in parts) == whole.text
    streamed = [part.logprobs for part in parts if part.logprobs is not None]
    assert [token for each in streamed for token in each.tokens or ()] == told.tokens
    assert [offset for each in streamed for offset in each.text_offset or ()] == told.text_offset


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_text_is_rated_without_an_answer(server: RunningServer, served: Served, is_stream: bool) -> None:
    """As benchmarks of language models do: echo, log-probabilities, and no token generated."""
    prompt = served.tokenizer(TEXTS[0]).input_ids
    expected = served.of(prompt)

    answer = server.post(
        "/v1/completions", model="model", prompt=prompt, echo=True, logprobs=1, max_tokens=0, stream=is_stream
    )  # fmt: skip

    assert answer.status_code == 200
    if is_stream:
        first = answer.text.split("\n\n")[0].removeprefix("data: ")
        choice = json.loads(first)["choices"][0]
    else:
        choice = answer.json()["choices"][0]
        assert answer.json()["usage"]["completion_tokens"] == 0
    assert (choice["text"], choice["finish_reason"]) == (TEXTS[0], "length")
    told = choice["logprobs"]["token_logprobs"]
    assert told[0] is None
    np.testing.assert_allclose(told[1:], expected[np.arange(len(prompt) - 1), prompt[1:]], atol=TOLERANCE)
    server.wait_idle()


def test_a_prompt_of_one_token_has_none(server: RunningServer) -> None:
    answer = server.post("/v1/completions", model="model", prompt=[7], prompt_logprobs=3, max_tokens=1)

    assert answer.json()["choices"][0]["prompt_logprobs"] == [None]

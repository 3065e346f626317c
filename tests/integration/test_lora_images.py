"""One prompt under adapters, salts and images: each its own text, cold at first, warm again, nothing of another's."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders import make_settings
from image_oracle import NUM_NEW_TOKENS, Oracle, Prompt
from lora_adapters import make_adapter, with_adapter
from tiny_vision_model import IMAGE, make_tiny_vision_model

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.adapter import Adapter
from kvwatch_engine.contracts.errors import AdapterError
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.loader import load_model
from kvwatch_engine.model.runner import ModelRunner

DECODER_ONLY = r".*language_model.*\.(q_proj|v_proj|o_proj|up_proj|down_proj)"
BLOCK_SIZE = 16
"""The image begins in the first block, so that nothing before it is shared."""
TEXT = f"{IMAGE}what is this, where was it made, and who can say so without a doubt in the world?"


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("llava"))


def answer(core: EngineCore, prompt: Prompt, adapter: Adapter | None, salt: str) -> tuple[list[int], int]:
    """Return the answer's tokens and how many of the prompt's were found in the prefix cache."""
    load_id = None if adapter is None else adapter.load_id
    core.add(replace(prompt.request("r"), load_id=load_id, cache_salt=salt), 0)
    tokens: list[int] = []
    cached = 0
    while core.has_work:
        for output in core.step():
            assert not output.error
            tokens += output.token_ids
            cached = output.num_cached_tokens
    core.check_integrity()
    return tokens, cached


def test_adapters_salts_and_images_are_kept_apart_and_each_is_found_again(folder: Path, tmp_path: Path) -> None:
    model = load_model(str(folder), dtype="float32")
    oracles: dict[str | None, Oracle] = {None: Oracle(folder)}
    adapters: dict[str | None, Adapter | None] = {None: None}
    for seed, letter in enumerate("ab"):
        where = make_adapter(Oracle(folder).model, tmp_path / letter, seed=seed, target_modules=DECODER_ONLY)
        oracles[letter] = Oracle(folder)
        oracles[letter].model = with_adapter(oracles[letter].model, where)
        adapters[letter] = model.adapters.load(letter, where)
    settings = make_settings(
        block_size=BLOCK_SIZE, num_blocks=100, max_model_len=400, max_batch_tokens=64,
        vocab_size=model.info.vocab_size, eos_token_ids=model.info.eos_token_ids,
    )  # fmt: skip
    core = EngineCore(
        settings, ModelRunner(model, KVCache(model.cache_spec(BLOCK_SIZE), settings.num_blocks)), EventLog()
    )
    prompts = [oracles[None].prompt(TEXT, number) for number in (1, 2)]
    variants: list[tuple[Prompt, str | None, str]] = [
        (prompt, name, salt) for prompt in prompts for name in (None, "a", "b") for salt in ("", "other")
    ]

    cold = [answer(core, prompt, adapters[name], salt) for prompt, name, salt in variants]
    warm = [answer(core, prompt, adapters[name], salt) for prompt, name, salt in variants]

    assert [cached for _, cached in cold] == [0] * len(variants)
    assert all(cached >= BLOCK_SIZE for _, cached in warm)
    for (prompt, name, _), (tokens, _), (again, _) in zip(variants, cold, warm, strict=True):
        assert len(tokens) == NUM_NEW_TOKENS
        oracles[name].check(prompt, tokens)
        oracles[name].check(prompt, again)
    assert len({tuple(tokens) for tokens, _ in cold}) > len(prompts), "adapters matter"


def test_an_adapter_of_the_vision_part_is_refused(folder: Path, tmp_path: Path) -> None:
    where = make_adapter(Oracle(folder).model, tmp_path / "a", seed=0, target_modules=["q_proj"])

    with pytest.raises(AdapterError, match=r"3 modules are not of this model, or not supported: model\.vision_tower"):
        load_model(str(folder), dtype="float32").adapters.load("a", where)

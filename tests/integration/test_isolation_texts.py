"""One prompt under every combination of keys on a real model: cold it misses, warm it hits, and the text is right."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from builders import make_request
from lora_adapters import AdaptedReference, make_adapter
from tiny_models import VOCAB_SIZE, make_tiny_model

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.request import GenerationRequest
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.contracts.tenant import tenant_salt
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.loader import LoadedModel, load_model
from kvwatch_engine.model.runner import ModelRunner

NEAR_TIE = 1e-4
PROMPT = [3 + (31 * index * index + 17 * index) % (VOCAB_SIZE - 3) for index in range(41)]
NUM_FOUND = 40
NEW_TOKENS = 24
SALTS = ("", "a", "b")
TENANTS = ("", "a", "b")


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_engine(model: LoadedModel) -> EngineCore:
    settings = EngineSettings(
        num_blocks=300, block_size=8, max_model_len=400, weights_fingerprint=model.info.weights_fingerprint
    )
    cache = KVCache(model.cache_spec(settings.block_size), settings.num_blocks)
    return EngineCore(settings, ModelRunner(model, cache), EventLog())


def assert_right(reference: AdaptedReference, expected: list[int], text: list[int]) -> None:
    """The reference's text, or one that leaves it where its two best tokens are nearly tied."""
    if text == expected:
        return
    logits = reference.logits([*PROMPT, *text])[len(PROMPT) - 1 : -1]
    losses = logits.max(dim=1).values - logits[range(len(text)), text]
    assert float(losses.max()) < NEAR_TIE


def answer(core: EngineCore, request: GenerationRequest) -> tuple[list[int], int]:
    """Return a request's text and how many tokens of its prompt were found."""
    core.add(request, 0)
    text: list[int] = []
    num_found = 0
    while core.has_work:
        for output in core.step():
            text += output.token_ids
            num_found = output.num_cached_tokens
    return text, num_found


def test_every_combination_of_salt_tenant_and_adapter_misses_cold_hits_warm_and_says_the_right_thing(
    tmp_path: Path,
) -> None:
    folder = make_tiny_model("llama", tmp_path / "model")
    model = load_model(str(folder), dtype="float32")
    where = {name: make_adapter(folder, tmp_path / name, seed=seed) for seed, name in enumerate("ab")}
    load_ids = {"": None} | {name: model.adapters.load(name, where[name]).load_id for name in "ab"}
    references = {name: AdaptedReference(folder, where.get(name)) for name in load_ids}
    expected = {name: reference.generate(PROMPT, NEW_TOKENS) for name, reference in references.items()}
    request = make_request("r", PROMPT, max_tokens=NEW_TOKENS, ignore_eos=True)
    asked = [
        (adapter, replace(request, cache_salt=salt, tenant_salt=tenant_salt(tenant), load_id=load_ids[adapter]))
        for salt, tenant, adapter in product(SALTS, TENANTS, load_ids)
    ]
    core = make_engine(model)

    cold = [answer(core, each) for _, each in asked]
    warm = [answer(core, each) for _, each in asked]

    assert {found for _, found in cold} == {0}
    assert {found for _, found in warm} == {NUM_FOUND}
    for (adapter, _), (text, _), (again, _) in zip(asked, cold, warm, strict=True):
        assert_right(references[adapter], expected[adapter], text)
        assert_right(references[adapter], expected[adapter], again)
    core.check_integrity()

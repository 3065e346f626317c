"""Text under a LoRA adapter equals PEFT's, token for token, whatever else is in the batch."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_request, run_until_idle
from lora_adapters import AdaptedReference, make_adapter
from paged_sequences import packed_step, paged_sequences
from tiny_models import ARCHITECTURES, VOCAB_SIZE, Architecture, embedded_model_folder, make_tiny_model
from transformers import AutoTokenizer

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.adapter import Adapter, AdapterSpan
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.attention import StepAttention
from kvwatch_engine.model.kv_groups import LayerPlaces
from kvwatch_engine.model.loader import LoadedModel, load_model
from kvwatch_engine.model.runner import ModelRunner

NEW_TOKENS = 24
NEAR_TIE = 1e-4

KINDS: dict[str, dict[str, Any]] = {
    "every layer": {"r": 8},
    "queries and values": {"r": 4, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]},
    "rank stabilised, of many ranks": {
        "r": 16, "use_rslora": True, "lora_alpha": 4,
        "rank_pattern": {"down_proj": 3, "layers.1.self_attn.k_proj": 5}, "alpha_pattern": {"up_proj": 7.5},
    },
    "patterns that begin or end a name": {
        "r": 8, "rank_pattern": {r"^model\.layers\.1\.mlp\.up_proj$": 2, "q_proj": 3, "k_proj$": 6},
        "alpha_pattern": {"^model.layers.0.self_attn.o_proj": 31, r"self_attn\.v_proj": 5, "v_proj": 50},
    },
    "some layers, by a regular expression": {
        "r": 8, "target_modules": r".*\.(0|2)\.(mlp\.(up|gate)_proj|self_attn\.o_proj)"
    },
    "the middle layer only": {"r": 32, "layers_to_transform": [1]},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_engine(model: LoadedModel, **settings: Any) -> EngineCore:
    values = {"block_size": 8, "num_blocks": 300, "max_model_len": 400, "max_num_seqs": 16, "max_batch_tokens": 128}
    fingerprint, groups = model.info.weights_fingerprint, model.info.groups
    config = EngineSettings(**{**values, **settings}, weights_fingerprint=fingerprint, groups=groups)
    cache = KVCache(model.cache_spec(config.block_size), config.num_blocks)
    return EngineCore(config, ModelRunner(model, cache), EventLog())


def prompt_of(seed: int, length: int) -> list[int]:
    return [3 + (seed * 7919 + index * index * 31 + index * 17) % (VOCAB_SIZE - 3) for index in range(length)]


def generate(core: EngineCore, asked: list[tuple[list[int], Adapter | None]]) -> list[tuple[list[int], int]]:
    """Return the tokens of each request and how many of its prompt's were found in the prefix cache."""
    for index, (prompt, adapter) in enumerate(asked):
        load_id = None if adapter is None else adapter.load_id
        request = make_request(str(index), prompt, max_tokens=NEW_TOKENS, ignore_eos=True)
        core.add(replace(request, load_id=load_id), 0)
    texts: dict[str, list[int]] = {}
    hits: dict[str, int] = {}
    while core.has_work:
        for output in core.step():
            assert not output.error
            texts.setdefault(output.request_id, []).extend(output.token_ids)
            hits[output.request_id] = output.num_cached_tokens
    core.check_integrity()
    return [(texts[str(index)], hits[str(index)]) for index in range(len(asked))]


def assert_text(reference: AdaptedReference, prompt: list[int], text: list[int]) -> None:
    """The reference's text, or one that leaves it where its two best tokens are nearly tied."""
    expected = reference.generate(prompt, NEW_TOKENS)
    if text == expected:
        return
    logits = reference.logits([*prompt, *text])[len(prompt) - 1 : -1]
    losses = logits.max(dim=1).values - logits[range(len(text)), text]
    assert float(losses.max()) < NEAR_TIE, f"{text} instead of {expected}"


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> Architecture:
    chosen: Architecture = request.param
    return chosen


@pytest.fixture(scope="module")
def folder(architecture: Architecture, tmp_path_factory: pytest.TempPathFactory) -> Path:
    biases = {"attention_bias": True, "mlp_bias": True} if architecture == "llama" else {}
    return make_tiny_model(architecture, tmp_path_factory.mktemp(architecture), **biases)


def test_several_adapters_in_one_batch_each_give_pefts_text(
    architecture: Architecture, folder: Path, tmp_path: Path
) -> None:
    # A tiny Gemma mostly says its last token again, which a small adapter does not change.
    strength = 4.0 if architecture == "gemma3" else 1.0
    model = load_model(str(folder), dtype="float32")
    folders = {
        kind: make_adapter(folder, tmp_path / str(number), seed=number, strength=strength, **config)
        for number, (kind, config) in enumerate(KINDS.items())
    }
    adapters = {
        kind: model.adapters.load(f"adapter-{index}", where) for index, (kind, where) in enumerate(folders.items())
    }
    references = {kind: AdaptedReference(folder, where) for kind, where in folders.items()}
    prompts = [prompt_of(seed, length) for seed, length in ((1, 37), (2, 1), (3, 64))]
    asked = [(prompt, adapter) for prompt in prompts for adapter in (None, *adapters.values())]
    base = AdaptedReference(folder, None)

    cold = generate(make_engine(model, max_prefill_chunk=13), asked)

    for (prompt, adapter), (text, _) in zip(asked, cold, strict=True):
        kind = next((kind for kind, each in adapters.items() if each is adapter), None)
        assert_text(base if kind is None else references[kind], prompt, text)
    num_texts = len({tuple(text) for text, _ in cold})
    assert num_texts == len(asked) or (architecture == "gemma3" and num_texts > 2 * len(prompts)), "adapters matter"


def test_each_adapter_misses_cold_and_hits_warm_and_a_reload_is_cold_again(folder: Path, tmp_path: Path) -> None:
    model = load_model(str(folder), dtype="float32")
    where = {name: make_adapter(folder, tmp_path / name, seed=seed) for seed, name in enumerate("ab")}
    a, b = (model.adapters.load(name, where[name]) for name in "ab")
    references = {None: AdaptedReference(folder, None)} | {name: AdaptedReference(folder, where[name]) for name in "ab"}
    prompt, core = prompt_of(4, 40), make_engine(model)
    kinds: list[Adapter | None] = [None, a, b]

    cold = [generate(core, [(prompt, kind)])[0] for kind in kinds]
    warm = [generate(core, [(prompt, kind)])[0] for kind in kinds]
    again = model.adapters.load("a", where["a"])
    reloaded = generate(core, [(prompt, again)])[0]

    assert [hits for _, hits in cold] == [0, 0, 0]
    assert [hits for _, hits in warm] == [32, 32, 32]
    assert reloaded[1] == 0
    for kind, (text, _) in zip([*kinds, *kinds, again], [*cold, *warm, reloaded], strict=True):
        assert_text(references[None if kind is None else kind.name], prompt, text)


def test_preempted_requests_go_on_with_their_adapter(folder: Path, tmp_path: Path) -> None:
    model = load_model(str(folder), dtype="float32")
    where = {name: make_adapter(folder, tmp_path / name, seed=seed) for seed, name in enumerate("ab")}
    adapters = [None, *(model.adapters.load(name, where[name]) for name in "ab")]
    references = [AdaptedReference(folder, None), *(AdaptedReference(folder, where[name]) for name in "ab")]
    asked = [(prompt_of(index, 30), adapters[index % 3]) for index in range(9)]
    core = make_engine(model, num_blocks=30)

    texts = generate(core, asked)

    assert core.scheduler.num_preemptions > 3
    for index, ((prompt, _), (text, _)) in enumerate(zip(asked, texts, strict=True)):
        assert_text(references[index % 3], prompt, text)


def test_samples_of_one_prompt_share_its_adapter(folder: Path, tmp_path: Path) -> None:
    model = load_model(str(folder), dtype="float32")
    where = make_adapter(folder, tmp_path / "a", seed=0)
    adapter, reference, prompt = model.adapters.load("a", where), AdaptedReference(folder, where), prompt_of(5, 21)
    core = make_engine(model)
    for request in (
        make_request("samples", prompt, n=3, max_tokens=NEW_TOKENS, ignore_eos=True),
        make_request("other", prompt, n=2, max_tokens=NEW_TOKENS, ignore_eos=True),
    ):
        core.add(replace(request, load_id=adapter.load_id if request.request_id == "samples" else None), 0)

    texts = run_until_idle(core)

    for index in range(3):
        assert_text(reference, prompt, texts["samples", index])
    assert texts["other", 0] == texts["other", 1] != texts["samples", 0]


def test_in_bfloat16_an_adapter_stays_near_float32(folder: Path, tmp_path: Path) -> None:
    where = make_adapter(folder, tmp_path / "a", seed=0)
    model = load_model(str(folder), dtype="bfloat16")
    adapter, prompt = model.adapters.load("a", where), prompt_of(6, 50)
    cache = KVCache(model.cache_spec(8), 40)
    groups = model.info.groups
    (sequence,) = paged_sequences([prompt], block_size=8, num_blocks=40, num_groups=len(groups))
    step = packed_step([(sequence, len(prompt))], block_size=8, windows=[group.window for group in groups])
    step = replace(step, adapters=(AdapterSpan(adapter.load_id, 0, len(prompt)),))

    with torch.inference_mode():
        hidden = model.decoder.hidden_states(
            torch.from_numpy(step.token_ids),
            torch.from_numpy(step.positions),
            StepAttention.of_step(cache, step, LayerPlaces(groups)),
            model.adapters.of_step(step.adapters),
        )
        logits = model.decoder.logits(hidden)

    expected, base = (AdaptedReference(folder, each).logits(prompt) for each in (where, None))
    distance = float((logits - expected).abs().mean() / expected.std())
    assert distance < 0.05 < 0.5 < float((logits - base).abs().mean() / expected.std())


@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_embedded_model_with_two_adapters_in_one_batch(tmp_path: Path) -> None:
    folder = embedded_model_folder()
    where = [make_adapter(folder, tmp_path / str(seed), seed=seed, r=8 << seed, strength=0.5) for seed in range(2)]
    model = load_model("embedded", dtype="float32")
    adapters = [None, *(model.adapters.load(f"adapter-{index}", each) for index, each in enumerate(where))]
    references = [AdaptedReference(folder, each) for each in (None, *where)]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [list(tokenizer(text).input_ids) for text in ("The capital of France is", "def add(a, b):\n    return")]
    asked = [(prompt, adapter) for prompt in prompts for adapter in adapters]

    texts = generate(make_engine(model, block_size=16), asked)

    for index, ((prompt, _), (text, _)) in enumerate(zip(asked, texts, strict=True)):
        assert_text(references[index % 3], prompt, text)
    assert len({tuple(text) for text, _ in texts}) == len(asked)

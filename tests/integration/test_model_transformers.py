"""The general path: transformers' own modules over the paged cache, chosen, proven, refused where they cannot be."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpu_attention import CpuAttention
from grouped_models import Reference
from model_families import family
from model_trial import BLOCK_SIZE, NUM_TOKENS, engine_for, prompts
from paged_sequences import packed_step, paged_sequences
from prompts import PROMPTS
from safetensors.torch import load_file, save_file
from tiny_models import make_shallow_model, make_tiny_model
from transformers import AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaAttention

from kvwatch_engine.contracts.cache import KVDtype, KVGroup
from kvwatch_engine.contracts.errors import AdapterError, ModelError
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.attention import StepAttention
from kvwatch_engine.model.graphs import DeviceForward
from kvwatch_engine.model.kv_groups import LayerPlaces
from kvwatch_engine.model.loader import LoadedModel, load_model
from kvwatch_engine.model.transformers_backend.network import TransformersNetwork
from kvwatch_engine.model.transformers_backend.proof import prove
from kvwatch_engine.model.transformers_backend.trace import trace_attention


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def gemma2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family("Gemma 2").make(tmp_path_factory.mktemp("gemma2"))


@pytest.fixture(scope="module")
def gemma2(gemma2_folder: Path) -> LoadedModel:
    return load_model(str(gemma2_folder), dtype="float32")


@pytest.fixture
def llama_folder(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "llama")


def network_of(model: LoadedModel) -> TransformersNetwork:
    assert isinstance(model.decoder, TransformersNetwork)
    return model.decoder


def change_config(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def logits_of(model: LoadedModel, token_ids: list[int], kv_dtype: KVDtype = "auto") -> torch.Tensor:
    """Return the logits of all tokens of a sequence, computed in two chunks."""
    groups = model.info.groups
    cache = KVCache(model.cache_spec(BLOCK_SIZE, kv_dtype), 40)
    [sequence] = paged_sequences([token_ids], block_size=BLOCK_SIZE, num_blocks=40, num_groups=len(groups))
    found = []
    for count in (len(token_ids) // 2, len(token_ids) - len(token_ids) // 2):
        step = packed_step([(sequence, count)], block_size=BLOCK_SIZE, windows=[group.window for group in groups])
        sequence.num_computed += count
        attention = StepAttention.of_step(cache, step, LayerPlaces(groups))
        with torch.inference_mode():
            hidden = model.decoder.hidden_states(torch.tensor(step.token_ids), torch.tensor(step.positions), attention)
            found.append(model.decoder.logits(hidden))
    return torch.cat(found)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_what_the_lean_decoder_knows_has_the_same_logits_either_way(architecture: Any, tmp_path: Path) -> None:
    folder = str(make_tiny_model(architecture, tmp_path))
    lean, general = (
        load_model(folder, dtype="float32"),
        load_model(folder, dtype="float32", implementation="transformers"),
    )
    token_ids = [(7 * i) % 500 for i in range(90)]

    assert (lean.info.implementation, general.info.implementation) == ("lean", "transformers")
    for fact in ("architecture", "num_layers", "num_heads", "num_kv_heads", "head_dim", "groups", "max_position"):
        assert getattr(lean.info, fact) == getattr(general.info, fact)
    assert lean.info.weights_fingerprint == general.info.weights_fingerprint
    torch.testing.assert_close(logits_of(lean, token_ids), logits_of(general, token_ids), atol=2e-4, rtol=0)


def test_a_variant_that_the_lean_decoder_lacks_goes_the_general_path(llama_folder: Path) -> None:
    change_config(llama_folder, hidden_act="gelu")

    assert load_model(str(llama_folder), dtype="float32").info.implementation == "transformers"
    with pytest.raises(ModelError, match="activation 'gelu' is not supported"):
        load_model(str(llama_folder), implementation="lean")


def test_the_lean_decoder_can_be_demanded(gemma2_folder: Path) -> None:
    with pytest.raises(ModelError, match="Gemma2ForCausalLM is not supported by the lean decoder; supported: LlamaFor"):
        load_model(str(gemma2_folder), implementation="lean")


def test_bfloat16_is_proven_as_well_and_takes_half_the_memory(gemma2: LoadedModel, gemma2_folder: Path) -> None:
    half = load_model(str(gemma2_folder), dtype="bfloat16")

    assert half.info.dtype == half.cache_spec(8).dtype == "bfloat16"
    assert half.info.weights_bytes == pytest.approx(gemma2.info.weights_bytes / 2, rel=0.01)


def test_text_is_transformers_with_windows_prefix_hits_and_preemptions(
    gemma2: LoadedModel, gemma2_folder: Path
) -> None:
    reference, asked = Reference.load(gemma2_folder), prompts()
    expected = [reference.answer(prompt, NUM_TOKENS) for prompt in asked]
    longest = max(map(len, asked)) + NUM_TOKENS
    engine = engine_for(gemma2, num_blocks=3 * -(-longest // BLOCK_SIZE) + 8)

    for _ in range(2):
        for prompt, (answer,), wanted in zip(asked, engine.run(asked, NUM_TOKENS), expected, strict=True):
            reference.check(prompt, answer, wanted)

    assert engine.core.scheduler.num_preemptions > 0
    assert reference.num_excused <= 1


@pytest.mark.model
def test_trained_weights_give_transformers_text_on_the_general_path(tmp_path: Path) -> None:
    folder = make_shallow_model(tmp_path / "shallow")
    tokenizer, reference = AutoTokenizer.from_pretrained(folder), Reference.load(folder)
    asked = [tokenizer(text).input_ids for text in PROMPTS[::3]]
    model = load_model(str(folder), dtype="float32", implementation="transformers")

    answers = engine_for(model, max_batch_tokens=64).run(asked, NUM_TOKENS)

    for prompt, (answer,) in zip(asked, answers, strict=True):
        reference.check(prompt, answer, reference.answer(prompt, NUM_TOKENS))
    assert reference.num_excused <= 1


def test_a_quantised_cache_changes_logits_little(gemma2: LoadedModel) -> None:
    token_ids = [(11 * i) % 500 for i in range(40)]
    plain, quantised = logits_of(gemma2, token_ids), logits_of(gemma2, token_ids, "int8")

    difference = (plain - quantised).abs().max() / plain.std()
    assert 0 < difference < 0.2


def test_a_staged_step_computes_the_same_and_nothing_is_captured(gemma2: LoadedModel) -> None:
    groups = gemma2.info.groups
    cache = KVCache(gemma2.cache_spec(BLOCK_SIZE), 40)
    forward = DeviceForward(gemma2.decoder, cache, gemma2.info, CpuAttention)
    forward.capture(16)
    [sequence] = paged_sequences([list(range(30))], block_size=BLOCK_SIZE, num_blocks=40, num_groups=len(groups))
    step = packed_step([(sequence, 30)], block_size=BLOCK_SIZE, windows=[group.window for group in groups])

    staged = forward.logits(step, np.array([3, 29], dtype=np.int64))

    assert forward.buckets == ()
    torch.testing.assert_close(staged, logits_of(gemma2, list(range(30)))[[3, 29]], atol=1e-4, rtol=0)


def test_adapters_are_refused_by_name(gemma2: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="adapter 'sql' cannot be loaded: this model's layers are transformers' own"):
        gemma2.adapters.load("sql", tmp_path)


class BiasedAttention(LlamaAttention):  # type: ignore[misc]
    """Adds a bias to the mask, as some models do: nothing of it reaches an attention function without a mask."""

    def forward(self, *args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if attention_mask is not None:
            attention_mask = attention_mask - 0.3 * torch.arange(attention_mask.shape[-1])
        return super().forward(*args, attention_mask=attention_mask, **kwargs)


def test_a_model_that_computes_something_else_over_a_paged_cache_is_refused(llama_folder: Path) -> None:
    model = load_model(str(llama_folder), dtype="float32", implementation="transformers")
    network = network_of(model)
    prove(network, model.cache_spec(8), model.info.groups)
    for module in network.model.modules():
        if isinstance(module, LlamaAttention):
            module.__class__ = BiasedAttention

    with pytest.raises(ModelError, match="its logits differ from transformers' own by"):
        prove(network, model.cache_spec(8), model.info.groups)


def test_windows_that_contradict_the_configuration_are_refused(gemma2_folder: Path) -> None:
    network = network_of(load_model(str(gemma2_folder), dtype="float32"))
    network.model.model.layers[0].self_attn.sliding_window = None

    with torch.inference_mode(), pytest.raises(ModelError, match="layer 0 is of type 'sliding_attention'"):
        trace_attention(network, network.model.config)


class Forgetful:
    """A configuration as a layer sees it that does not know of its window."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return None if name == "sliding_window" else getattr(self._config, name)


def test_a_window_that_only_the_mask_knows_is_found_out(tmp_path: Path) -> None:
    """A model that forgets to pass its window on: within the few tokens of the proof its real one would not show."""
    network = network_of(load_model(str(family("StarCoder2").make(tmp_path)), dtype="float32"))
    model, spec = network.model, load_model(str(tmp_path), dtype="float32").cache_spec(8)
    prove(network, spec, (KVGroup((0, 1, 2), 21),))
    for layer in model.model.layers:
        layer.self_attn.config = Forgetful(model.config)

    with pytest.raises(ModelError, match="or other windows than its layers ask for"):
        prove(network, spec, (KVGroup((0, 1, 2)),))


def test_windows_that_are_not_the_configurations_are_refused(gemma2_folder: Path) -> None:
    network = network_of(load_model(str(gemma2_folder), dtype="float32"))
    network.model.model.layers[0].self_attn.sliding_window = 22

    with (
        torch.inference_mode(),
        pytest.raises(ModelError, match=r"ask for windows of \[22\], but sliding_window is 21"),
    ):
        trace_attention(network, network.model.config)


def test_layers_that_do_not_all_attend_are_refused(gemma2_folder: Path) -> None:
    network = network_of(load_model(str(gemma2_folder), dtype="float32"))
    network.model.config.num_hidden_layers = 4

    with torch.inference_mode(), pytest.raises(ModelError, match="of 4 layers 3 ask for attention, 3 times in all"):
        trace_attention(network, network.model.config)


def test_attention_sinks_are_refused(tmp_path: Path) -> None:
    own = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 21}
    gpt_oss = type(family("Llama"))("gpt-oss", "GptOssForCausalLM", "GptOssConfig", own)

    with pytest.raises(ModelError, match="asks for attention sinks, which the attention kernels lack"):
        load_model(str(gpt_oss.make(tmp_path)), dtype="float32")


def test_a_context_ends_where_longrope_would_change_its_frequencies(tmp_path: Path) -> None:
    model = load_model(str(family("Phi-3, longrope").make(tmp_path)), dtype="float32")

    assert model.info.max_position == 256


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", "drop", r"1 weights are missing: model\.layers\.1\.mlp\.up_proj\.weight"),
        ("model.layers.0.self_attn.q_proj.bias", "add", r"1 weights are not part of Gemma2ForCausalLM: model\.layers"),
        (
            "model.norm.weight",
            "cut",
            r"1 weights have another shape than the configuration says: \('model\.norm\.weight'",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, name: str, change: str, message: str) -> None:
    folder = family("Gemma 2").make(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    if change == "drop":
        del tensors[name]
    elif change == "cut":
        tensors[name] = tensors[name][:-1].clone()
    else:
        tensors[name] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelError, match=message):
        load_model(str(folder), dtype="float32")

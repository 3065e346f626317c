"""Writes a tiny Llama model as a GGUF file, the way llama.cpp's converter lays it out."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind
from tiny_models import IM_END, random_model, tiny_tokenizer

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


_SCALE_PLACES: dict[Kind, tuple[int, ...]] = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
}
"""Kinds that the package reads and does not write: where in a block its scales are, each 16 bits."""


def make_tiny_gguf(path: Path, *, seed: int = 0, kind: Kind = Kind.F32) -> Any:
    """Write a random Llama model with matrices of a kind, and return it in float32 as transformers' model.

    Of a kind that the package cannot write the blocks themselves are random, and what is returned is what they say;
    else it is the model before it was quantised.
    """
    shape = {"hidden_size": 256, "intermediate_size": 256} if kind in _SCALE_PLACES else {}
    model = random_model("llama", seed=seed, **shape)
    config = model.config
    generator = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, config.vocab_size)
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        part = name.rsplit(".", 2)[-2]
        num_heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(part)
        if values.ndim == 1 or kind == Kind.F32:
            writer.add_tensor(_gguf_name(name), np.ascontiguousarray(_interleaved(values, num_heads)))
        elif kind in _SCALE_PLACES:
            blocks = _random_blocks(kind, values.shape, generator)
            writer.add_tensor(_gguf_name(name), blocks, raw_dtype=kind)
            with torch.no_grad():
                parameter.copy_(torch.tensor(_in_halves(gguf.quants.dequantize(blocks, kind), num_heads)))
        else:
            blocks = gguf.quants.quantize(np.ascontiguousarray(_interleaved(values, num_heads)), kind)
            writer.add_tensor(_gguf_name(name), blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_tokenizer(writer: Any, vocab_size: int) -> None:
    tokenizer = tiny_tokenizer()
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    names = {index: token for token, index in tokenizer.get_vocab().items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([names.get(index, f"[unused{index}]") for index in range(vocab_size)])
    writer.add_token_types([3 if index < 3 else 1 for index in range(vocab_size)])
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in merges])
    writer.add_eos_token_id(tokenizer.convert_tokens_to_ids(IM_END))
    writer.add_chat_template(tokenizer.chat_template)


def _random_blocks(kind: Kind, shape: tuple[int, ...], generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return blocks whose weights are as wide as those of `random_model`."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = shape
    blocks = generator.integers(256, size=(rows, columns // block_size, block_bytes), dtype=np.uint8)
    scale = 1.0
    for _ in range(2):
        for place in _SCALE_PLACES[kind]:
            blocks[:, :, place : place + 2] = np.array([scale], dtype=np.float16).view(np.uint8)
        found = gguf.quants.dequantize(blocks.reshape(rows, -1), kind)
        scale *= 1.5 * columns**-0.5 / float(found.std())
    return blocks.reshape(rows, -1)


def _interleaved(weight: npt.NDArray[np.float32], num_heads: int | None) -> npt.NDArray[np.float32]:
    """GGUF turns neighbouring dimensions together, transformers those half a head apart: reorder the rows."""
    if num_heads is None:
        return weight
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _in_halves(weight: npt.NDArray[np.float32], num_heads: int | None) -> npt.NDArray[np.float32]:
    """Undo `_interleaved`."""
    if num_heads is None:
        return weight
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, index, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{index}.{_LAYER_NAMES[part]}.{kind}"

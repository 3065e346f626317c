"""Writes a tiny Llama model as a GGUF file, the way llama.cpp's converter lays it out."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
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


def make_tiny_gguf(path: Path, *, seed: int = 0) -> Any:
    """Write a random Llama model in float32 and return it as transformers' model."""
    model = random_model("llama", seed=seed)
    config = model.config
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
        if name.endswith("q_proj.weight"):
            values = _interleaved(values, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            values = _interleaved(values, config.num_key_value_heads)
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(values))
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


def _interleaved(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """GGUF turns neighbouring dimensions together, transformers those half a head apart: reorder the rows."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, index, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{index}.{_LAYER_NAMES[part]}.{kind}"

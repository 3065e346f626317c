"""Tiny random models of many families, as transformers builds them from a configuration.

Every parameter is random, also biases and norms, and what a family does to its numbers (scales, soft caps, windows,
parts of heads that turn) is set so that forgetting it shows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from tiny_models import IM_END, VOCAB_SIZE, tiny_tokenizer, with_random_weights
from transformers import GenerationConfig

WINDOW = 21
"""Of layers that have one: no multiple of a block size, and shorter than the longer prompts."""

_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_OLDER_SHAPE: dict[str, Any] = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}
_FALCON: dict[str, Any] = {key: _SHAPE[key] for key in _SHAPE if key != "num_key_value_heads"} | {
    "num_kv_heads": 2,
    "alibi": False,
}
_ENDS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2}


@dataclass(frozen=True)
class Family:
    """One row of the table of models."""

    title: str
    model: str
    """Name of transformers' class."""
    config: str
    """Name of its configuration's class."""
    own: dict[str, Any] = field(default_factory=dict)
    """What its configuration has beside, or instead of, the common shape."""
    shape: dict[str, Any] = field(default_factory=lambda: _SHAPE)
    norm_mean: float = 1.0
    implementation: str = "transformers"
    """What computes it when nothing is asked for."""

    def make(self, folder: Path, *, seed: int = 0) -> Path:
        """Save a random model of this family with a tokenizer as a Hugging Face folder; return the folder."""
        model_class: Callable[[Any], Any] = getattr(transformers, self.model)
        config = getattr(transformers, self.config)(
            **{"vocab_size": VOCAB_SIZE, **_ENDS, **self.shape, **self.own},
        )
        model = with_random_weights(lambda: model_class(config), seed, norm_mean=self.norm_mean)
        tokenizer = tiny_tokenizer()
        model.generation_config = GenerationConfig(eos_token_id=tokenizer.convert_tokens_to_ids(IM_END))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder


_SOME_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: tuple[Family, ...] = (
    Family("Llama", "LlamaForCausalLM", "LlamaConfig", implementation="lean"),
    Family("Mistral", "MistralForCausalLM", "MistralConfig", {"sliding_window": WINDOW}, implementation="lean"),
    Family("Qwen2", "Qwen2ForCausalLM", "Qwen2Config", implementation="lean"),
    Family("Qwen3", "Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 16}, implementation="lean"),
    Family(
        "Gemma 2", "Gemma2ForCausalLM", "Gemma2Config",
        {"head_dim": 16, "query_pre_attn_scalar": 11, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
        | _SOME_SLIDING, norm_mean=0.0,
    ),
    Family(
        "Gemma 3", "Gemma3ForCausalLM", "Gemma3TextConfig",
        {"head_dim": 16, "query_pre_attn_scalar": 11} | _SOME_SLIDING, norm_mean=0.0, implementation="lean",
    ),
    Family("Phi-3", "Phi3ForCausalLM", "Phi3Config", {"sliding_window": WINDOW}),
    Family(
        "Phi-3, longrope", "Phi3ForCausalLM", "Phi3Config",
        {
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 256,
                "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [4.0] * 8,
            },
        },
    ),
    Family("OLMo 2", "Olmo2ForCausalLM", "Olmo2Config"),
    Family(
        "Granite", "GraniteForCausalLM", "GraniteConfig",
        {"attention_multiplier": 0.1, "logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    ),
    Family("StarCoder2", "Starcoder2ForCausalLM", "Starcoder2Config", {"sliding_window": WINDOW}),
    Family("GPT-NeoX", "GPTNeoXForCausalLM", "GPTNeoXConfig"),
    Family("Falcon, one KV head", "FalconForCausalLM", "FalconConfig", shape=_FALCON),
    Family(
        "Falcon, grouped heads", "FalconForCausalLM", "FalconConfig", {"new_decoder_architecture": True}, shape=_FALCON
    ),
    Family(
        "Falcon, a KV head each", "FalconForCausalLM", "FalconConfig", {"multi_query": False, "num_kv_heads": 4},
        shape=_FALCON,
    ),
    Family(
        "Mixtral (experts)", "MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4, "sliding_window": WINDOW}
    ),
    Family("Qwen3-MoE (experts)", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"head_dim": 16} | _EXPERTS),
    Family("OLMoE (experts)", "OlmoeForCausalLM", "OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    Family(
        "DeepSeek-V3 (latent attention, experts)", "DeepseekV3ForCausalLM", "DeepseekV3Config",
        {
            "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1,
        },
    ),
    Family("Cohere 2", "Cohere2ForCausalLM", "Cohere2Config", _SOME_SLIDING | {"logit_scale": 0.3}),
    Family("SmolLM3", "SmolLM3ForCausalLM", "SmolLM3Config"),
    Family("Phi", "PhiForCausalLM", "PhiConfig", {"partial_rotary_factor": 0.5}),
    Family("StableLM", "StableLmForCausalLM", "StableLmConfig", {"partial_rotary_factor": 0.5}),
    Family("GPT-J", "GPTJForCausalLM", "GPTJConfig", {"rotary_dim": 8}, shape=_OLDER_SHAPE),
    Family("GPT-2", "GPT2LMHeadModel", "GPT2Config", shape=_OLDER_SHAPE),
    Family("GPT-BigCode", "GPTBigCodeForCausalLM", "GPTBigCodeConfig", shape=_OLDER_SHAPE),
    Family(
        "OPT", "OPTForCausalLM", "OPTConfig",
        {"ffn_dim": 96, "word_embed_proj_dim": 64},
        shape={key: _SHAPE[key] for key in _SHAPE if key not in ("intermediate_size", "num_key_value_heads")},
    ),
)  # fmt: skip


def family(title: str) -> Family:
    """Return a family by its title."""
    return next(each for each in FAMILIES if each.title == title)

"""Rotary embeddings against transformers' own class and functions."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.model.decoder_config import decoder_config
from kvwatch_engine.model.rope import rotary_embedding
from kvwatch_kernels.dims import PAD_SLOT
from kvwatch_kernels.rotary import rotate_and_store

HEAD_DIM = 32

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "default with a large base": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn with every option": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
}


def llama_config(rope: dict[str, Any], **overrides: Any) -> LlamaConfig:
    shape = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "max_position_embeddings": 512}
    return LlamaConfig(rope_parameters=dict(rope), **(shape | overrides))


@pytest.mark.parametrize("name", VARIANTS)
def test_angles_and_rotation_equal_those_of_transformers(name: str) -> None:
    config = llama_config(VARIANTS[name])
    positions = torch.tensor([0, 1, 2, 100, 127, 128, 300, 511])
    generator = torch.Generator().manual_seed(0)
    # Three heads of queries, one of keys, one of values.
    qkv = torch.randn(len(positions), 5, HEAD_DIM, generator=generator)
    query = qkv[:, :3].clone()
    cache = torch.zeros(1, 1, 1, HEAD_DIM)

    cosine, sine = rotary_embedding(config, HEAD_DIM).angles(positions, torch.float32)
    rotated = rotate_and_store(qkv, cosine, sine, cache, cache, np.full(len(positions), PAD_SLOT, dtype=np.int64))

    expected_cosine, expected_sine = LlamaRotaryEmbedding(config)(query, positions[None])
    assert torch.equal(cosine, expected_cosine[0, :, : HEAD_DIM // 2])
    assert torch.equal(sine, expected_sine[0, :, : HEAD_DIM // 2])
    heads_first = query.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(heads_first, heads_first, expected_cosine, expected_sine)
    torch.testing.assert_close(rotated, expected[0].transpose(0, 1), atol=1e-6, rtol=0)


def test_angles_are_computed_in_float32_for_bfloat16_models() -> None:
    rotary = rotary_embedding(llama_config(VARIANTS["default"]), HEAD_DIM)

    cosine, _ = rotary.angles(torch.tensor([501]), torch.bfloat16)

    assert cosine.dtype == torch.bfloat16
    assert torch.equal(cosine, rotary.angles(torch.tensor([501]), torch.float32)[0].bfloat16())


def test_frequencies_that_change_in_the_middle_of_a_sequence_are_refused_by_name() -> None:
    config = llama_config(
        {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0] * (HEAD_DIM // 2),
            "long_factor": [2.0] * (HEAD_DIM // 2),
            "original_max_position_embeddings": 128,
            "factor": 4.0,
        }
    )

    with pytest.raises(ModelError, match="'longrope' is not supported; supported: default, linear, dynamic"):
        rotary_embedding(config, HEAD_DIM)


def test_partly_rotated_heads_are_refused() -> None:
    config = llama_config({"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0, "partial_rotary_factor": 0.5})

    with pytest.raises(ModelError, match="rotates 16 of 32 dimensions"):
        rotary_embedding(config, HEAD_DIM)


def test_yarn_extends_the_longest_context_and_dynamic_does_not() -> None:
    yarn = llama_config(VARIANTS["yarn"], max_position_embeddings=128)
    dynamic = llama_config(VARIANTS["dynamic"], max_position_embeddings=128)

    assert decoder_config(yarn).max_position == 512
    assert decoder_config(dynamic).max_position == 128

"""The forward pass of a GPU with several KV groups, run on the CPU: graphs over staged arrays give what steps do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpu_attention import CpuAttention
from paged_sequences import packed_step, paged_sequences
from tiny_models import Architecture, make_tiny_model

from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.attention import StepAttention
from kvwatch_engine.model.graphs import DeviceForward
from kvwatch_engine.model.kv_groups import LayerPlaces
from kvwatch_engine.model.loader import LoadedModel, load_model

BLOCK_SIZE, NUM_BLOCKS, WINDOW = 4, 200, 9
CONFIGS: dict[Architecture, dict[str, Any]] = {
    "gemma3": {"sliding_window": WINDOW},
    "mistral": {"sliding_window": WINDOW},
}


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = make_tiny_model(request.param, tmp_path_factory.mktemp("model"), **CONFIGS[request.param])
    return load_model(str(folder), dtype="float32")


def cache_of(model: LoadedModel) -> KVCache:
    cache = KVCache(model.cache_spec(BLOCK_SIZE), NUM_BLOCKS)
    cache.data.fill_(float("nan"))
    return cache


def test_prefill_and_padded_decode_steps_equal_plain_ones(model: LoadedModel) -> None:
    groups, plain_cache, cache = model.info.groups, cache_of(model), cache_of(model)
    forward = DeviceForward(model.decoder, cache, model.info, CpuAttention)
    forward.capture(64)
    prompts = [[(7 * i + 3 * length) % 500 for i in range(length)] for length in (3, 17, 40)]
    sequences = paged_sequences(
        prompts, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_new_tokens=4, num_groups=len(groups)
    )
    windows = [group.window for group in groups]
    for chunk in (11, 100, 1, 1, 1):
        parts = [(s, min(chunk, len(s.token_ids) - s.num_computed)) for s in sequences]
        parts = [(s, count) for s, count in parts if count]
        step = packed_step(parts, block_size=BLOCK_SIZE, windows=windows)
        sampled = (step.query_starts[1:] - 1).astype(np.int64)
        with torch.inference_mode():
            attention = StepAttention.of_step(plain_cache, step, LayerPlaces(groups))
            hidden = model.decoder.hidden_states(torch.tensor(step.token_ids), torch.tensor(step.positions), attention)
            expected = model.decoder.logits(hidden[torch.tensor(sampled)])
        torch.testing.assert_close(forward.logits(step, sampled), expected, atol=1e-5, rtol=0)
        for sequence, count in parts:
            sequence.num_computed += count
            if sequence.num_computed == len(sequence.token_ids):
                sequence.token_ids.append(11)
    assert forward.buckets, "decode steps were replayed"

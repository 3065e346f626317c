"""Runs steps of a tiny model by the GPU's forward pass, in Triton's interpreter, and by the CPU's.

Prints how far they differ, as JSON.

TRITON_INTERPRET=1 python interpreted_device_steps.py FOLDER_OF_A_MODEL KV_DTYPE
"""

import json
import sys
from typing import cast

import numpy as np
import torch
from paged_sequences import packed_step, paged_sequences

from kvwatch_engine.contracts.cache import KVDtype
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.attention import StepAttention
from kvwatch_engine.model.graphs import DeviceForward
from kvwatch_engine.model.loader import load_model

BLOCK_SIZE, NUM_BLOCKS = 16, 16
LENGTHS = (5, 33, 1)


def main(folder: str, kv_dtype: KVDtype) -> None:
    model = load_model(folder, dtype="float32")
    spec = model.cache_spec(BLOCK_SIZE, kv_dtype)
    plain_cache, cache = KVCache(spec, NUM_BLOCKS), KVCache(spec, NUM_BLOCKS)
    forward = DeviceForward(model.decoder, cache, model.info)
    forward.capture(8)
    prompts = [[(7 * i + 3 * length) % 500 for i in range(length)] for length in LENGTHS]
    sequences = paged_sequences(prompts, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_new_tokens=4)
    differences, is_void = [], []
    for chunk in (8, 1000, 1000, 1000):  # part of the prompts, the rest of them, two decode steps
        parts = [(s, min(chunk, len(s.token_ids) - s.num_computed)) for s in sequences]
        step = packed_step(parts, block_size=BLOCK_SIZE)
        sampled = (step.query_starts[1:] - 1).astype(np.int64)
        with torch.inference_mode():
            attention = StepAttention.of_step(plain_cache, step)
            hidden = model.decoder.hidden_states(torch.tensor(step.token_ids), torch.tensor(step.positions), attention)
            expected = model.decoder.logits(hidden[torch.tensor(sampled)])
        differences.append((forward.logits(step, sampled) - expected).abs().max().item())
        is_void.append(not forward.buckets)
        if is_void[-1]:
            forward.capture(64)
        for sequence, count in parts:
            sequence.num_computed += count
            if sequence.num_computed == len(sequence.token_ids):
                sequence.token_ids.append(11)
    same_bytes = (cache.blocks == plain_cache.blocks).float().mean().item()
    json.dump({"differences": differences, "is_void": is_void, "same_bytes": same_bytes}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], cast(KVDtype, sys.argv[2]))

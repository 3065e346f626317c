"""vLLM's block manager on the trace of `bench_block_manager.py`. Prints JSON: blocks a second.

Run by that benchmark, with an interpreter that has vLLM and nothing of ours. Both hash with sha256, the default.
"""

import gc
import json
import logging
import time
from collections import deque

import torch
from block_trace import BLOCK_SIZE, NUM_DECODE_STEPS, NUM_LIVE, NUM_REQUESTS, SHARED_PREFIX, SMALL, num_blocks, prompts
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

REQUESTS_OF_A_POOL = 400
"""So many fill the pool once and more, before the clock starts."""


def make_manager(*, with_events: bool) -> KVCacheManager:
    """Return the manager of a pool as large as ours."""
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32)
    config = KVCacheConfig(num_blocks=SMALL, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(
        config, max_model_len=4096, scheduler_block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE,
        enable_kv_cache_events=with_events,
    )  # fmt: skip


def run(manager: KVCacheManager, request: Request) -> None:
    """Admit a request, compute its prompt, and decode; its blocks stay."""
    found, num_found, *_ = manager.get_computed_blocks(request)
    num_prompt = request.num_prompt_tokens
    if manager.allocate_slots(request, num_prompt - num_found, num_found, found) is None:
        raise RuntimeError("the pool is too small for the trace")
    request.num_computed_tokens = num_prompt
    for token in range(NUM_DECODE_STEPS):
        request.append_output_token_ids(token)
        manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1


def play(manager: KVCacheManager, texts: list[list[int]]) -> float:
    """Play the trace; return blocks a second. Events are taken after each request, as after each step."""
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    sampling = SamplingParams(max_tokens=NUM_DECODE_STEPS)
    requests = [Request(str(number), prompt, sampling, None) for number, prompt in enumerate(texts)]
    live: deque[Request] = deque()
    gc.collect()
    spent = -time.thread_time()
    for request in requests:
        if len(live) == NUM_LIVE:
            manager.free(live.popleft())
        request._block_hasher = hasher  # only now: what it costs to make a request is not the block manager's
        request.update_block_hashes()
        run(manager, request)
        manager.take_events()
        live.append(request)
    spent += time.thread_time()
    for request in live:
        manager.free(request)
    return sum(map(num_blocks, texts)) / spent


def measure(*, shared: float = 0.0, with_events: bool = False) -> float:
    """Fill a pool, then play the trace on it."""
    manager = make_manager(with_events=with_events)
    texts = prompts(REQUESTS_OF_A_POOL + NUM_REQUESTS, shared=shared)
    play(manager, texts[NUM_REQUESTS:])
    return play(manager, texts[:NUM_REQUESTS])


def main() -> None:
    """Print the result as JSON."""
    logging.disable()
    init_none_hash(sha256)
    plain = measure()
    print(
        json.dumps(
            {
                "blocks_per_second": round(plain),
                "blocks_per_second_shared": round(measure(shared=SHARED_PREFIX)),
                "events_ratio": round(plain / measure(with_events=True), 3),
            }
        )
    )


if __name__ == "__main__":
    main()

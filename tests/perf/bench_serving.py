"""Serving throughput of the embedded model beside transformers' static batching, in one run. Prints JSON.

    python tests/perf/bench_serving.py [--pairs 3]

48 requests of 256 tokens in and 64 out, 16 at a time. The two alternate; the ratio is taken pair by pair. transformers
gets what makes it fastest here: the faster of two dtypes (tried first), whole batches of equal lengths, no padding.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch
from embedded_engine import load_embedded, make_core, random_prompts, run, submit
from paired import estimate, ratio
from transformers import AutoModelForCausalLM

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.core import EngineCore
from kvwatch_engine.model.loader import LoadedModel

NUM_REQUESTS = 48
NUM_PROMPT_TOKENS = 256
NUM_OUTPUT_TOKENS = 64
BATCH = 16
BUDGET_RATIO = 2.0


class Transformers:
    """Static batching: 16 prompts at a time through `generate`."""

    def __init__(self, model: LoadedModel, dtype: str) -> None:
        self.dtype = dtype
        self.model: Any = AutoModelForCausalLM.from_pretrained(model.info.folder, dtype=getattr(torch, dtype)).eval()

    def tokens_per_second(self, seed: int, num_requests: int = NUM_REQUESTS) -> float:
        """Generate for all requests; return output tokens/s."""
        prompts = torch.tensor(random_prompts(num_requests, NUM_PROMPT_TOKENS, seed))
        started = time.perf_counter()
        for batch in torch.split(prompts, BATCH):
            with torch.inference_mode():
                output = self.model.generate(
                    batch, attention_mask=torch.ones_like(batch), max_new_tokens=NUM_OUTPUT_TOKENS,
                    min_new_tokens=NUM_OUTPUT_TOKENS, do_sample=False, pad_token_id=0,
                )  # fmt: skip
            assert output.shape == (BATCH, NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS)
        return num_requests * NUM_OUTPUT_TOKENS / (time.perf_counter() - started)


def fastest_transformers(model: LoadedModel) -> Transformers:
    """Return transformers in the dtype that is faster on this machine, warmed up."""
    candidates = [Transformers(model, dtype) for dtype in ("float32", "bfloat16")]
    for candidate in candidates:
        candidate.tokens_per_second(998, BATCH)
    return max(candidates, key=lambda candidate: candidate.tokens_per_second(997, BATCH))


def kvwatch_tokens_per_second(core: EngineCore, seed: int) -> float:
    """Serve all requests; return output tokens/s."""
    prompts = random_prompts(NUM_REQUESTS, NUM_PROMPT_TOKENS, seed)
    started = time.perf_counter()
    submit(core, prompts, NUM_OUTPUT_TOKENS, f"seed{seed}")
    num_tokens = run(core)
    assert num_tokens == NUM_REQUESTS * NUM_OUTPUT_TOKENS
    return num_tokens / (time.perf_counter() - started)


def main() -> None:
    """Print the result as JSON; exit 1 when the budget is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    pairs = parser.parse_args().pairs
    model = load_embedded()
    core = make_core(model, EventLog(), max_num_seqs=BATCH)
    peer = fastest_transformers(model)
    submit(core, random_prompts(BATCH, NUM_PROMPT_TOKENS, 999), 4, "warm-up")
    run(core)
    ours: list[float] = []
    theirs: list[float] = []
    for pair in range(pairs):
        ours.append(kvwatch_tokens_per_second(core, pair))
        theirs.append(peer.tokens_per_second(pair))
    speedup = ratio(ours, theirs)
    print(
        json.dumps(
            {
                "load": f"{NUM_REQUESTS} x {NUM_PROMPT_TOKENS} in, {NUM_OUTPUT_TOKENS} out, {BATCH} at a time",
                "dtype": model.info.dtype,
                "transformers_dtype": peer.dtype,
                "pairs": pairs,
                "kvwatch_output_tokens_per_second": estimate(ours).rounded(1),
                "transformers_output_tokens_per_second": estimate(theirs).rounded(1),
                "ratio": speedup.rounded(2),
                "budget_ratio": BUDGET_RATIO,
            }
        )
    )
    sys.exit(speedup.median < BUDGET_RATIO)


if __name__ == "__main__":
    main()

"""What the machine allows: its memory's bandwidth and its products' rate, measured, and the least times that follow.

The model is the roofline: work of F operations on B bytes takes at least max(F / peak, B / bandwidth). Source: S.
Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for multicore architectures",
Communications of the ACM 52(4), 2009. Counts for a decoder:

- a decode step of a batch reads every weight once, and the K/V of each sequence's context:
      B = weight bytes + sum over sequences of context length * K/V bytes per token
  (R. Pope et al., "Efficiently scaling transformer inference", MLSys 2023, section 2);
- a token costs two operations for each weight of a layer, two for each of the logits where they are needed, and
  attention's 4 * layers * query heads * head size * context length.

Knows no server. What is read and computed beside that (activations, the writing of K/V) is left out: the bounds are
lower ones.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from peers.loads import Load
from safetensors import safe_open

BUFFER_BYTES = 2**30
"""Read to measure the bandwidth; many times any last-level cache that two cores could have to themselves."""
_BANDWIDTH_READS = 9
_PRODUCT_SIZE = 2048
_PRODUCTS = 15
BYTES = 2
"""Of a number in bfloat16."""


@dataclass(frozen=True)
class Machine:
    """What was measured."""

    bandwidth: float
    """Bytes/s that all threads together read."""
    peak: float
    """Operations/s of a large product in bfloat16, a multiplication and an addition counting as two."""


@dataclass(frozen=True)
class ModelSize:
    """What a model makes the machine read and compute, in bfloat16."""

    weight_bytes: int
    """Weights that every step reads."""
    layer_weights: int
    """Weights that every token is multiplied with."""
    logit_weights: int
    """Weights that a token whose next one is wanted is multiplied with."""
    kv_bytes_per_token: int
    attention_operations: int
    """Of one token for each token of its context."""


@dataclass(frozen=True)
class LeastTimes:
    """Lower bounds of a load, in seconds."""

    prefill: float
    decode: float
    """Decode steps of full batches, each at the roof that binds it."""
    step: float
    """One decode step in the middle of an answer."""
    overlapped: float
    """All bytes or all operations, whichever takes longer: what no order of the work can go below."""

    @property
    def phases(self) -> float:
        """Prefill, then decode."""
        return self.prefill + self.decode


class Meter:
    """Measures the machine, again and again, with as many threads as torch takes here."""

    def __init__(self) -> None:
        self._buffer = torch.rand(BUFFER_BYTES // 4)
        self._square = torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE).bfloat16()
        self.num_threads = torch.get_num_threads()

    def measure(self) -> Machine:
        """Return what the machine keeps up: the median of a few reads, by the faster of two ways, and of products."""
        with torch.inference_mode():
            # Which of the two reads faster depends on the machine; both read everything once.
            reads = (self._buffer.sum, self._buffer.view(torch.int32).amax)
            read = min(median(_seconds(each) for _ in range(_BANDWIDTH_READS)) for each in reads)
            product = median(_seconds(lambda: self._square @ self._square) for _ in range(_PRODUCTS))
        return Machine(bandwidth=BUFFER_BYTES / read, peak=2 * _PRODUCT_SIZE**3 / product)


def model_size(folder: Path) -> ModelSize:
    """Read a model's shapes.

    Args:
        folder: Hugging Face folder of a decoder whose layers all have attention over the whole context.
    """
    config = json.loads((folder / "config.json").read_text())
    layer_weights = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names = [name for name in tensors.keys() if ".layers." in name]  # noqa: SIM118 - it is no dictionary
            layer_weights += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    vocabulary = int(config["vocab_size"]) * int(config["hidden_size"])
    heads, layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
    head_size = int(config.get("head_dim") or config["hidden_size"] // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return ModelSize(
        weight_bytes=(layer_weights + vocabulary) * BYTES,  # the table of embeddings is looked up, not read
        layer_weights=layer_weights,
        logit_weights=vocabulary,
        kv_bytes_per_token=2 * layers * kv_heads * head_size * BYTES,
        attention_operations=4 * layers * heads * head_size,
    )


def decode_step_seconds(model: ModelSize, machine: Machine, batch: int, context: float) -> float:
    """Return the least time of a decode step of `batch` sequences with `context` tokens each."""
    work = _decode_work(model, batch, context)
    return max(work[0] / machine.bandwidth, work[1] / machine.peak)


def least_times(load: Load, model: ModelSize, machine: Machine) -> LeastTimes:
    """Return the bounds of a load: prompts computed once, what they share once in all, then full batches decode."""
    waves = load.num_requests / load.concurrency
    steps = [
        _decode_work(model, load.concurrency, load.num_prompt_tokens + number)
        for number in range(1, load.num_output_tokens)
    ]
    prefill_bytes, prefill_operations = _prefill_work(load, model)
    decode = waves * sum(max(size / machine.bandwidth, count / machine.peak) for size, count in steps)
    all_bytes = waves * sum(size for size, _ in steps)
    all_operations = prefill_operations + waves * sum(count for _, count in steps)
    return LeastTimes(
        prefill=max(prefill_bytes / machine.bandwidth, prefill_operations / machine.peak),
        decode=decode,
        step=decode_step_seconds(
            model, machine, load.concurrency, load.num_prompt_tokens + load.num_output_tokens / 2
        ),
        overlapped=max(all_bytes / machine.bandwidth, all_operations / machine.peak),
    )  # fmt: skip


def weight_bound_tokens_per_second(model: ModelSize, machine: Machine) -> float:
    """Return how many tokens a second one stream could get if a step were nothing but reading the weights."""
    return machine.bandwidth / model.weight_bytes


def _decode_work(model: ModelSize, batch: int, context: float) -> tuple[float, float]:
    """Return bytes and operations of a step."""
    size = model.weight_bytes + batch * context * model.kv_bytes_per_token
    per_token = 2 * (model.layer_weights + model.logit_weights) + context * model.attention_operations
    return size, batch * per_token


def _prefill_work(load: Load, model: ModelSize) -> tuple[float, float]:
    """Return bytes and operations of all prompts; a token sees those before it, on average half of the prompt."""
    shared, own = load.num_shared_tokens, load.num_prompt_tokens - load.num_shared_tokens
    num_tokens = shared + load.num_requests * own
    seen = shared * (shared + 1) / 2 + load.num_requests * (own * shared + own * (own + 1) / 2)
    operations = (
        2 * model.layer_weights * num_tokens + 2 * model.logit_weights * load.num_requests
        + seen * model.attention_operations
    )  # fmt: skip
    return model.weight_bytes, operations


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started

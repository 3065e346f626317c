"""All linear layers of the embedded model beside oneDNN's packed products, alternating. Prints JSON.

python tests/perf/bench_linear.py [threads]

The weights are walked through as a step does it, so that none sits in the processor's cache by luck. `prefill` leaves
out the product for the logits, which only rows that are sampled from need. Budget: never slower than oneDNN in float32
(the ratio is that of pairs of runs next to each other; 1.05 allows for noise).
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from paired import ratio
from torch import Tensor

from kvwatch_kernels.linear import is_fast, linear, pack_weight

BUDGET = 1.05
# SmolLM2-135M, (in, out): queries, keys and values; attention's output; gate and up; down. Then the logits.
LAYER = ((576, 960), (576, 576), (576, 3072), (1536, 576))
NUM_LAYERS = 30
LOGITS = (576, 49152)


@dataclass(frozen=True)
class Case:
    """One step of `num_rows` tokens, repeated."""

    name: str
    num_rows: int
    rounds: int
    has_logits: bool = True


CASES = (
    Case("decode_1", 1, 30),
    Case("decode_4", 4, 30),
    Case("decode_16", 16, 30),
    Case("decode_32", 32, 20),
    Case("decode_64", 64, 20),
    Case("prefill_512", 512, 21, has_logits=False),
    Case("prefill_1024", 1024, 9, has_logits=False),
)

Product = Callable[[Tensor], Tensor]


def ours(weight: Tensor) -> Product:
    """Return a packed layer, in the weight's dtype."""
    packed = pack_weight(weight)
    return lambda x: linear(x, packed)


def onednn(weight: Tensor) -> Product:
    """Return a layer of oneDNN in its own order, in float32."""
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight.float(), None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, blocked, None, "none", [], "")


def seconds_of(products: list[Product], inputs: list[Tensor]) -> float:
    """Return the time of one step."""
    started = time.perf_counter()
    for product, x in zip(products, inputs, strict=True):
        product(x)
    return time.perf_counter() - started


def measure(case: Case, variants: dict[str, list[Product]]) -> tuple[dict[str, object], bool]:
    """Alternate the variants; return the figures and whether the budget is met."""
    shapes = [*LAYER * NUM_LAYERS, *([LOGITS] if case.has_logits else [])]
    rows = {depth: torch.randn(case.num_rows, depth) for depth in {depth for depth, _ in shapes}}
    inputs = [rows[depth] for depth, _ in shapes]
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(case.rounds + 1):
        for name, products in variants.items():
            times[name].append(seconds_of(products[: len(shapes)], inputs))
    times = {name: values[1:] for name, values in times.items()}
    ratios = {name: ratio(values, times["onednn"]) for name, values in times.items() if name != "onednn"}
    figures: dict[str, object] = {f"{name}_ms": round(median(values) * 1e3, 2) for name, values in times.items()}
    figures |= {f"{name}_ratio": result.rounded() for name, result in ratios.items()}
    return figures, all(result.median <= BUDGET for result in ratios.values())


def main() -> None:
    """Print the result as JSON; exit 1 when a budget is missed."""
    if len(sys.argv) > 1:
        torch.set_num_threads(int(sys.argv[1]))
    with torch.inference_mode():
        weights = [torch.randn(out, depth).bfloat16() for depth, out in (*LAYER * NUM_LAYERS, LOGITS)]
        variants = {
            "onednn": [onednn(weight) for weight in weights],
            "float32": [ours(weight.float()) for weight in weights],
            "bfloat16": [ours(weight) for weight in weights],
        }
        results = {case.name: measure(case, variants) for case in CASES}
    document: dict[str, object] = {
        "threads": torch.get_num_threads(),
        "is_fast": is_fast(torch.device("cpu")),
        "budget": BUDGET,
    }
    document.update({name: figures for name, (figures, _) in results.items()})
    print(json.dumps(document))
    sys.exit(not all(is_met for _, is_met in results.values()))


if __name__ == "__main__":
    main()

"""Block size against waste and against speed, on short and on long sequences.

python tests/studies/block_size.py

Waste comes from the scheduler and the block tables under a load of many lengths; speed from the embedded model.
"""

import time
from statistics import mean

from embedded_engine import load_embedded, random_prompts, submit
from page import FOLDER, Row, put_table
from plot import write_plot
from simulation import Load, serve

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.loader import LoadedModel
from kvwatch_engine.model.runner import ModelRunner

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
POOL_TOKENS = 16_384
LOADS = {
    "short": Load(num_requests=150, num_clients=32, prompt=(3.5, 0.5), answer=(3.0, 0.5)),
    "long": Load(num_requests=60, num_clients=16, prompt=(6.3, 0.4), answer=(4.6, 0.4)),
}
CONTEXTS = {"short": 48, "long": 512}
BATCH = 8
NUM_ANSWER = 28
"""More than the steps of all prefills, so that all sequences decode together for a while."""
ROUNDS = 3
"""The fastest counts: what else the machine does only ever adds."""


def speed(model: LoadedModel, block_size: int, context: int) -> tuple[float, float]:
    """Return (prefill tokens a second, decoded tokens a second) of a batch of sequences."""
    num_blocks = 1 + BATCH * (2 + (context + NUM_ANSWER) // block_size)
    settings = EngineSettings(
        num_blocks=num_blocks, block_size=block_size, max_num_seqs=BATCH, max_batch_tokens=256,
        vocab_size=model.info.vocab_size, enable_prefix_cache=False,
    )  # fmt: skip
    core = EngineCore(settings, ModelRunner(model, KVCache(model.cache_spec(block_size), num_blocks)), EventLog())
    prefill, decode = [], []
    for number in range(ROUNDS + 1):
        submit(core, random_prompts(BATCH, context, number), NUM_ANSWER, f"r{number}")
        steps = []
        while core.has_work:
            begin = time.perf_counter()
            outputs = core.step()
            steps.append((len(outputs), time.perf_counter() - begin))
        num_prefill = next(index for index, (count, _) in enumerate(steps) if count == BATCH)
        prefill.append(sum(seconds for _, seconds in steps[:num_prefill]))
        decode += [seconds for count, seconds in steps[num_prefill:] if count == BATCH]
    return BATCH * context / min(prefill[1:]), BATCH / min(decode)


def main() -> None:
    """Run the study; write its tables and plots."""
    model = load_embedded()
    wastes: dict[str, list[float]] = {}
    decodes: dict[str, list[float]] = {}
    for name, load in LOADS.items():
        rows: list[Row] = []
        wastes[name], decodes[name] = [], []
        for size in BLOCK_SIZES:
            outcome = serve(load, block_size=size, num_blocks=1 + POOL_TOKENS // size)
            prefill, decode = speed(model, size, CONTEXTS[name])
            wastes[name].append(mean(outcome.wastes) * 100)
            decodes[name].append(decode)
            rows.append([size, f"{mean(outcome.wastes):.2%}", outcome.num_preemptions, round(prefill), round(decode)])
        head = ["block size", "waste", "preemptions", "prefill tokens/s", "decode tokens/s"]
        put_table("block-size", name, head, rows)
    names = [str(size) for size in BLOCK_SIZES]
    write_plot(FOLDER / "block-size-waste.svg", "Waste", ("block size, tokens", "empty slots in held blocks, %"),
               names, wastes)  # fmt: skip
    write_plot(FOLDER / "block-size-speed.svg", f"Decoding, {BATCH} sequences", ("block size, tokens", "tokens/s"),
               names, decodes)  # fmt: skip


if __name__ == "__main__":
    main()

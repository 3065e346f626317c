"""Block size against waste, bookkeeping and speed, on short and on long sequences.

make study ARGS=block-size
"""

import time
from collections.abc import Sequence
from statistics import mean, median

from embedded_engine import load_embedded, random_prompts, run, submit
from load import Load
from machine import conditions, measured
from outcome import Outcome
from page import FOLDER, Row, put_table
from plot import Panel, write_plot
from rounds import Limits, rotated
from simulation import Case, serve
from spread import Spread

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.loader import LoadedModel
from kvwatch_engine.model.runner import ModelRunner

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NAMES = tuple(str(size) for size in BLOCK_SIZES)
AXIS = "block size, tokens"
POOL_TOKENS = 16_384
LOADS = {
    "short": Load(num_requests=150, num_clients=32, prompt=(3.5, 0.5), answer=(3.0, 0.5)),
    "long": Load(num_requests=60, num_clients=16, prompt=(6.3, 0.4), answer=(4.6, 0.4)),
}
CONTEXTS = {"short": 48, "long": 1024}
BATCH = 8
NUM_ANSWER = 24


def waste(limits: Limits) -> None:
    """Let the scheduler and the block tables serve many lengths without a model; look what the steps cost."""
    machine = conditions()
    wastes, costs = {}, {}
    for name, load in LOADS.items():
        found: dict[int, list[Outcome]] = {size: [] for size in BLOCK_SIZES}
        for number in limits.rounds(3):
            for size in rotated(BLOCK_SIZES, number):
                settings = {"block_size": size, "num_blocks": 1 + POOL_TOKENS // size}
                found[size].append(serve(Case(load, settings)))
        wastes[name] = [Spread.of([mean(found[size][0].wastes)], 100) for size in BLOCK_SIZES]
        costs[name] = [Spread.of((_step_seconds(each) for each in found[size]), 1e6) for size in BLOCK_SIZES]
        rows: list[Row] = [
            [size, f"{wastes[name][place].median:.2f}%", found[size][0].num_preemptions, costs[name][place]]
            for place, size in enumerate(BLOCK_SIZES)
        ]
        head = ["block size", "waste", "preemptions", "bookkeeping, µs a step"]
        put_table("block-size", f"waste, {name}", head, rows, measured(len(found[1]), machine))
    panels = [
        Panel("Waste", (AXIS, "empty slots in held blocks, %"), NAMES, wastes),
        Panel("Scheduling and block tables", (AXIS, "µs a step"), NAMES, costs),
    ]
    write_plot(FOLDER / "block-size-waste.svg", panels)


def speed(limits: Limits) -> None:
    """Let the embedded model compute prompts and decode, in blocks of each size in turn."""
    model = load_embedded()
    prefills, decodes = {}, {}
    for name, context in CONTEXTS.items():
        machine = conditions()
        engines = {size: _Engine(model, size, context) for size in BLOCK_SIZES}
        prefill: dict[int, list[float]] = {size: [] for size in BLOCK_SIZES}
        decode: dict[int, list[float]] = {size: [] for size in BLOCK_SIZES}
        for number in limits.rounds(5):
            for size in rotated(BLOCK_SIZES, number):
                prefill[size].append(engines[size].prefill_speed(number))
                decode[size].append(engines[size].decode_speed(number))
        prefills[name], decodes[name] = _spreads(prefill), _spreads(decode)
        rows: list[Row] = [
            [
                size,
                prefills[name][place],
                Spread.ratio(prefill[size], prefill[16]),
                decodes[name][place],
                Spread.ratio(decode[size], decode[16]),
            ]
            for place, size in enumerate(BLOCK_SIZES)
        ]
        head = ["block size", "prefill tokens/s", "to 16", "decode tokens/s", "to 16"]
        put_table("block-size", f"speed, {name}", head, rows, measured(len(decode[1]), machine))
    panels = [
        Panel("Prefill", (AXIS, "tokens/s"), NAMES, prefills),
        Panel(f"Decoding, {BATCH} sequences", (AXIS, "tokens/s"), NAMES, decodes),
    ]
    write_plot(FOLDER / "block-size-speed.svg", panels)


class _Engine:
    """The embedded model with blocks of one size, whose prefix cache keeps the prompts that are decoded from."""

    def __init__(self, model: LoadedModel, block_size: int, context: int) -> None:
        num_blocks = 1 + (BATCH + 2) * (2 + (context + NUM_ANSWER) // block_size)
        settings = EngineSettings(
            num_blocks=num_blocks, block_size=block_size, max_num_seqs=BATCH, max_batch_tokens=256,
            vocab_size=model.info.vocab_size,
        )  # fmt: skip
        runner = ModelRunner(model, KVCache(model.cache_spec(block_size), num_blocks))
        runner.warm_up(settings.max_batch_tokens)
        self._core = EngineCore(settings, runner, EventLog())
        self._context = context
        # One token more than whole blocks: the last one is always computed.
        self._prompts = random_prompts(BATCH, context + 1, 1_000_000)
        self._decode("first")

    def prefill_speed(self, number: int) -> float:
        """Return prompt tokens a second; no prompt came before."""
        count = max(1, 1024 // self._context)
        submit(self._core, random_prompts(count, self._context, number), 1, f"prefill{number}")
        begin = time.perf_counter()
        run(self._core)
        return count * self._context / (time.perf_counter() - begin)

    def decode_speed(self, number: int) -> float:
        """Return generated tokens a second, of steps in which all sequences decode."""
        return BATCH / median(self._decode(f"decode{number}"))

    def _decode(self, name: str) -> Sequence[float]:
        submit(self._core, self._prompts, NUM_ANSWER, name)
        steps = []
        num_decoded = 0
        while self._core.has_work:
            begin = time.perf_counter()
            num_before, num_decoded = num_decoded, len(self._core.step())
            if num_before == num_decoded == BATCH:
                steps.append(time.perf_counter() - begin)
        return steps


def _spreads(values: dict[int, list[float]]) -> list[Spread]:
    return [Spread.of(each) for each in values.values()]


def _step_seconds(outcome: Outcome) -> float:
    return outcome.engine_seconds / outcome.num_steps


PARTS = {"waste": waste, "speed": speed}

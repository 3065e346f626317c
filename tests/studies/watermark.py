"""Watermark: blocks kept free at admission, against preemptions, throughput and smoothness.

make study ARGS=watermark
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from embedded import PRESSED_BLOCKS, PRESSURE, EmbeddedEngine
from load import Load
from machine import conditions, measured
from outcome import Outcome
from page import FOLDER, Row, put_table
from plot import Panel, write_plot
from rounds import Limits, rotated
from simulation import Case, serve_all
from spread import Spread

from kvwatch_engine.memory.sizing import parse_watermark

RATIOS = ("0.00", "0.01", "0.02", "0.05", "0.10", "0.15")
NAMES = ("off", *RATIOS[1:])
SEEDS = (7, 8, 9)
NUM_BLOCKS = 401
LOADS = {
    "short answers": Load(prompt=(5.3, 0.7), answer=(4.3, 0.5)),
    "long answers": Load(prompt=(4.6, 0.7), answer=(5.5, 0.6), num_requests=400),
}
ROUNDS = 4

Found = Sequence[Sequence[Outcome]]
"""For each watermark its outcomes, one for each load or round: the first of all watermarks belong together."""


def simulate(_limits: Limits) -> None:
    """Let a cost model tell the time: several loads, one seed after the other."""
    cases = [
        Case(replace(load, seed=seed), {"num_blocks": NUM_BLOCKS, "watermark_blocks": _blocks(ratio, NUM_BLOCKS)})
        for load in LOADS.values() for ratio in RATIOS for seed in SEEDS
    ]  # fmt: skip
    outcomes = iter(serve_all(cases))
    found = {name: [[next(outcomes) for _ in SEEDS] for _ in RATIOS] for name in LOADS}
    note = f"Median (lowest to highest) of {len(SEEDS)} seeds; a pool of {NUM_BLOCKS - 1} blocks."
    for name, lines in found.items():
        _put(name, lines, NUM_BLOCKS, note)
    _plot("watermark-simulated.svg", found)


def measure(limits: Limits) -> None:
    """Let the embedded model serve one load after the other under each watermark in turn."""
    machine = conditions()
    engine = EmbeddedEngine(PRESSED_BLOCKS)
    engine.serve(replace(PRESSURE, num_requests=8))
    found: dict[str, list[Outcome]] = {ratio: [] for ratio in RATIOS}
    for number in limits.rounds(ROUNDS):
        load = replace(PRESSURE, seed=SEEDS[0] + number)
        for ratio in rotated(RATIOS, number):
            found[ratio].append(engine.serve(load, watermark_blocks=_blocks(ratio, PRESSED_BLOCKS)))
    lines = list(found.values())
    _put("embedded model", lines, PRESSED_BLOCKS, measured(len(lines[0]), machine))
    _plot("watermark-measured.svg", {"embedded model": lines})


def _blocks(ratio: str, num_blocks: int) -> int:
    return parse_watermark(ratio, num_blocks - 1)


def _put(name: str, found: Found, num_blocks: int, note: str) -> None:
    off = [each.tokens_per_second for each in found[0]]
    rows: list[Row] = [
        [
            label,
            _blocks(ratio, num_blocks),
            Spread.of(each.num_preemptions for each in runs),
            f"{Spread.of(each.recomputed_share for each in runs).median:.1%}",
            Spread.of(each.tokens_per_second for each in runs),
            Spread.ratio([each.tokens_per_second for each in runs], off),
            Spread.of((each.gap_p99 for each in runs), 1e3),
            Spread.of(each.first_token_p50 for each in runs).median,
            Spread.of(each.end_to_end_p99 for each in runs).median,
        ]
        for label, ratio, runs in zip(NAMES, RATIOS, found, strict=True)
    ]
    head = ["watermark", "blocks", "preemptions", "recomputed", "tokens/s", "tokens/s, to off", "ITL p99 ms",
            "TTFT p50 s", "e2e p99 s"]  # fmt: skip
    put_table("watermark", name, head, rows, note)


def _plot(file: str, found: Mapping[str, Found]) -> None:
    axis = "watermark, part of the pool"
    write_plot(
        FOLDER / file,
        [
            Panel("Preemptions", (axis, "preemptions"), NAMES, {
                name: [Spread.of(each.num_preemptions for each in runs) for runs in lines]
                for name, lines in found.items()
            }),
            Panel("Throughput", (axis, "tokens/s"), NAMES, {
                name: [Spread.of(each.tokens_per_second for each in runs) for runs in lines]
                for name, lines in found.items()
            }),
            Panel("Smoothness", (axis, "ITL p99, ms"), NAMES, {
                name: [Spread.of((each.gap_p99 for each in runs), 1e3) for runs in lines]
                for name, lines in found.items()
            }),
        ],
    )  # fmt: skip


PARTS = {"simulated": simulate, "measured": measure}

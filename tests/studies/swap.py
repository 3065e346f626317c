"""Swap against recomputation: by block size, by the bandwidth of the link, and in the engine under each mode.

make study ARGS=swap
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from embedded import PRESSED_BLOCKS, PRESSURE, EmbeddedEngine
from embedded_engine import load_embedded
from machine import conditions, measured
from outcome import Outcome
from page import FOLDER, Row, put_table
from plot import Panel, write_plot
from resume_paths import RecomputePath, SwapPath
from rounds import Limits, rotated
from spread import Spread, shown

from kvwatch_engine.memory.sizing import parse_watermark
from kvwatch_engine.memory.tiers.tiers import TierSettings

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NUM_TOKENS = 512
NUM_SEQUENCES = 8
BANDWIDTHS = {"1 MB/s": 1e6, "10 MB/s": 1e7, "100 MB/s": 1e8, "1 GB/s": 1e9, "none": None}
MEASURED_FROM = 1e8
"""Bytes a second; what takes longer is not waited for, but computed."""
LENGTHS = (32, 128, 512, 2048)
LINKS = {"none": None, "20 MB/s": 2e7, "2 MB/s": 2e6}
"""Limits of the link, in bytes a second, at which the engine is run."""
NO_LINK = "-"
MODES = (
    ("recompute", NO_LINK), ("swap", "none"), ("auto", "none"), ("swap", "20 MB/s"), ("auto", "20 MB/s"),
    ("auto", "2 MB/s"),
)  # fmt: skip
"""Recomputation as without `--host-memory`; swap over the slowest link would take minutes."""
HOST_BYTES = 256 * 2**20


def by_block_size(limits: Limits) -> None:
    """Move and compute the same number of tokens in blocks of each size."""
    machine = conditions()
    model = load_embedded()
    moved = {size: SwapPath(model, size, NUM_TOKENS, NUM_SEQUENCES) for size in BLOCK_SIZES}
    computed = {size: RecomputePath(model, size, NUM_TOKENS) for size in BLOCK_SIZES}
    swaps: dict[int, list[float]] = {size: [] for size in BLOCK_SIZES}
    recomputes: dict[int, list[float]] = {size: [] for size in BLOCK_SIZES}
    for size in BLOCK_SIZES:  # warm up
        moved[size].seconds(), computed[size].seconds()
    for number in limits.rounds(9):
        for size in rotated(BLOCK_SIZES, number):
            swaps[size].append(moved[size].seconds())
            recomputes[size].append(computed[size].seconds())
    rows: list[Row] = [
        [
            size,
            Spread.of(swaps[size], 1e3),
            2 * moved[size].sequence_bytes / median(swaps[size]) / 1e9,
            Spread.of(recomputes[size], 1e3),
            Spread.ratio(recomputes[size], swaps[size]),
        ]
        for size in BLOCK_SIZES
    ]
    head = ["block size", "swap out and in, ms", "GB/s", "recompute, ms", "recompute / swap"]
    put_table("swap", "by block size", head, rows, measured(len(swaps[1]), machine))
    names, axis = [str(size) for size in BLOCK_SIZES], "block size, tokens"
    lines = {
        "swap": [Spread.of(swaps[size], 1e3) for size in BLOCK_SIZES],
        "recompute": [Spread.of(recomputes[size], 1e3) for size in BLOCK_SIZES],
    }
    panels = [
        Panel(f"To get {NUM_TOKENS} tokens back", (axis, "ms"), names, lines, is_log=True),
        Panel("Swap alone", (axis, "ms"), names, {"swap": lines["swap"]}),
    ]
    write_plot(FOLDER / "swap-block-size.svg", panels)


def by_bandwidth(limits: Limits) -> None:
    """Move and compute sequences of several lengths over links of several speeds."""
    machine = conditions()
    model = load_embedded()
    moved = {length: SwapPath(model, 16, length, 1) for length in LENGTHS}
    computed = {length: RecomputePath(model, 16, length) for length in LENGTHS}
    swaps: dict[tuple[int, str], list[float]] = {(length, name): [] for length in LENGTHS for name in BANDWIDTHS}
    recomputes: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for length in LENGTHS:  # warm up
        moved[length].seconds(), computed[length].seconds()
    for number in limits.rounds(7):
        for length in rotated(LENGTHS, number):
            recomputes[length].append(computed[length].seconds())
            for name, limit in BANDWIDTHS.items():
                swaps[length, name].append(_swap_seconds(moved[length], limit))
    rows: list[Row] = [
        [
            length,
            Spread.of(recomputes[length], 1e3),
            *(Spread.of(swaps[length, name], 1e3).median for name in BANDWIDTHS),
            2 * moved[length].sequence_bytes / median(recomputes[length]) / 1e6,
        ]
        for length in LENGTHS
    ]
    head = ["tokens", "recompute, ms", *(f"swap, {name}, ms" for name in BANDWIDTHS), "break-even, MB/s"]
    put_table("swap", "by bandwidth", head, rows, measured(len(recomputes[LENGTHS[0]]), machine))
    gains = {
        f"{length} tokens": [Spread.ratio(recomputes[length], swaps[length, name]) for name in BANDWIDTHS]
        for length in LENGTHS
    }
    axis, names = "limit of the link", list(BANDWIDTHS)
    times = {
        "swap": [Spread.of(swaps[NUM_TOKENS, name], 1e3) for name in names],
        "recompute": [Spread.of(recomputes[NUM_TOKENS], 1e3)] * len(names),
    }
    panels = [
        Panel(f"To get {NUM_TOKENS} tokens back", (axis, "ms"), names, times, is_log=True),
        Panel("Above 1 swap is faster", (axis, "recompute / swap"), names, gains, is_log=True),
    ]
    write_plot(FOLDER / "swap-bandwidth.svg", panels)


def by_mode(limits: Limits) -> None:
    """Serve loads that do not fit in the pool, in each mode in turn."""
    machine = conditions()
    engine = EmbeddedEngine(PRESSED_BLOCKS)
    watermark = parse_watermark("0.02", PRESSED_BLOCKS - 1)
    engine.serve(replace(PRESSURE, num_requests=8))
    found: dict[tuple[str, str], list[Outcome]] = {each: [] for each in MODES}
    for number in limits.rounds(4):
        load = replace(PRESSURE, num_requests=80, seed=7 + number)
        for mode, link in rotated(MODES, number):
            has_host = link != NO_LINK
            tiers = TierSettings(host_bytes=HOST_BYTES, bytes_per_second=LINKS[link]) if has_host else None
            outcome = engine.serve(load, tiers=tiers, preemption_mode=mode, watermark_blocks=watermark)
            found[mode, link].append(outcome)
    base = [each.tokens_per_second for each in found[MODES[0]]]
    rows: list[Row] = [
        [
            mode,
            link,
            Spread.of(each.num_preemptions for each in runs),
            Spread.of(each.num_swapped for each in runs),
            _median_ms([value for each in runs for value in each.recompute_estimates]),
            _median_ms([value for each in runs for value in each.swap_estimates]),
            f"{Spread.of(each.recomputed_share for each in runs).median:.1%}",
            Spread.of(each.tokens_per_second for each in runs),
            Spread.ratio([each.tokens_per_second for each in runs], base),
            Spread.of((each.gap_p99 for each in runs), 1e3),
        ]
        for (mode, link), runs in found.items()
    ]
    head = ["mode", "limit of the link", "preemptions", "of them swaps", "recompute estimate, ms", "swap estimate, ms",
            "recomputed", "tokens/s", "tokens/s, to recompute", "ITL p99 ms"]  # fmt: skip
    put_table("swap", "by mode", head, rows, measured(len(base), machine))
    axis = "limit of the link"
    panels = [
        Panel("Throughput", (axis, "tokens/s"), list(LINKS), _lines(found, lambda each: each.tokens_per_second)),
        Panel("Smoothness", (axis, "ITL p99, ms"), list(LINKS), _lines(found, lambda each: each.gap_p99 * 1e3)),
    ]
    write_plot(FOLDER / "swap-modes.svg", panels)


def _lines(
    found: Mapping[tuple[str, str], Sequence[Outcome]], value_of: Callable[[Outcome], float]
) -> dict[str, list[Spread | None]]:
    """Return a value of each mode over the links; what needs no link is the same at all of them."""
    lines: dict[str, list[Spread | None]] = {}
    for mode in ("recompute", "swap", "auto"):
        runs = [found.get((mode, NO_LINK if mode == "recompute" else link)) for link in LINKS]
        lines[mode] = [Spread.of(map(value_of, each)) if each else None for each in runs]
    return lines


def _swap_seconds(path: SwapPath, limit: float | None) -> float:
    """Return the time out and in again; measured where that does not take long."""
    return path.seconds(limit) if limit is None or limit >= MEASURED_FROM else 2 * path.sequence_bytes / limit


def _median_ms(seconds: list[float]) -> str:
    return shown(median(seconds) * 1e3) if seconds else "-"


PARTS = {"block-size": by_block_size, "bandwidth": by_bandwidth, "mode": by_mode}

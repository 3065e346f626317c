"""Watermark: blocks kept free at admission, against preemptions, throughput and smoothness.

python tests/studies/watermark.py
"""

from dataclasses import replace
from statistics import mean

from page import FOLDER, Row, put_table
from plot import write_plot
from simulation import Load, Outcome, percentile, serve

RATIOS = (0.0, 0.01, 0.02, 0.05, 0.10, 0.15)
NAMES = tuple("off" if not ratio else f"{ratio:.2f}" for ratio in RATIOS)
SEEDS = (7, 8, 9)
NUM_BLOCKS = 401
LOADS = {
    "short answers": Load(prompt=(5.3, 0.7), answer=(4.3, 0.5)),
    "long answers": Load(prompt=(4.6, 0.7), answer=(5.5, 0.6), num_requests=400),
}


def outcomes(load: Load, ratio: float) -> list[Outcome]:
    """Serve a load once with each seed."""
    blocks = round(ratio * (NUM_BLOCKS - 1))
    return [serve(replace(load, seed=seed), num_blocks=NUM_BLOCKS, watermark_blocks=blocks) for seed in SEEDS]


def main() -> None:
    """Run the study; write its tables and plots."""
    preemptions, gaps = {}, {}
    for name, load in LOADS.items():
        found = [outcomes(load, ratio) for ratio in RATIOS]
        preemptions[name] = [mean(each.num_preemptions for each in runs) for runs in found]
        gaps[name] = [mean(percentile(each.gaps, 0.99) for each in runs) * 1e3 for runs in found]
        rows: list[Row] = [
            [
                ratio,
                round(mean(each.num_preemptions for each in runs)),
                f"{mean(each.recomputed_share for each in runs):.1%}",
                round(mean(each.tokens_per_second for each in runs)),
                gap,
                mean(percentile(each.first_token_seconds, 0.5) for each in runs),
                mean(percentile(each.end_to_end_seconds, 0.99) for each in runs),
            ]
            for ratio, runs, gap in zip(NAMES, found, gaps[name], strict=True)
        ]
        head = ["watermark", "preemptions", "recomputed", "tokens/s", "ITL p99 ms", "TTFT p50 s", "e2e p99 s"]
        put_table("watermark", name, head, rows)
    axes = ("watermark, part of the pool", "preemptions")
    write_plot(FOLDER / "watermark-preemptions.svg", "Preemptions", axes, NAMES, preemptions)
    write_plot(FOLDER / "watermark-itl.svg", "Smoothness", (axes[0], "ITL p99, ms"), NAMES, gaps)


if __name__ == "__main__":
    main()

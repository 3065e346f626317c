"""Victim policies: who yields, against the share of tokens that are computed twice.

make study ARGS=victims
"""

from dataclasses import replace

from load import Load
from outcome import percentile
from page import FOLDER, Row, put_table
from plot import Panel, write_plot
from rounds import Limits
from simulation import CPU, GPU, Case, Prices, serve_all
from spread import Spread

POLICIES = ("newest", "least-computed", "lowest-priority")
SEEDS = (7, 8, 9)
CONDITIONS: dict[str, tuple[int, Prices]] = {"off": (0, GPU), "0.02": (8, GPU), "0.02, dear prefill": (8, CPU)}
"""Blocks of a pool of 400 that are kept free, and what computing costs."""
LOAD = Load(prompt=(4.6, 0.9), answer=(5.3, 0.7), num_requests=400, low_priority_share=0.3)


def simulate(_limits: Limits) -> None:
    """Serve the same loads under each policy; a cost model tells the time."""
    cases = [
        Case(replace(LOAD, seed=seed), {"victim_policy": policy, "watermark_blocks": blocks}, prices)
        for blocks, prices in CONDITIONS.values() for policy in POLICIES for seed in SEEDS
    ]  # fmt: skip
    outcomes = iter(serve_all(cases))
    shares, preemptions = {}, {}
    for name in CONDITIONS:
        found = [[next(outcomes) for _ in SEEDS] for _ in POLICIES]
        newest = [each.tokens_per_second for each in found[0]]
        shares[name] = [Spread.of((each.recomputed_share for each in runs), 100) for runs in found]
        preemptions[name] = [Spread.of(each.num_preemptions for each in runs) for runs in found]
        rows: list[Row] = [
            [
                policy,
                preemptions[name][index],
                max(each.most_preemptions for each in runs),
                shares[name][index],
                Spread.ratio([each.tokens_per_second for each in runs], newest),
                Spread.of((each.gap_p99 for each in runs), 1e3),
                Spread.of(percentile(each.gaps, 0.9999) for each in runs),
                Spread.of(each.end_to_end_p99 for each in runs),
            ]
            for index, (policy, runs) in enumerate(zip(POLICIES, found, strict=True))
        ]
        head = ["policy", "preemptions", "most of one request", "recomputed, %", "tokens/s, to newest", "ITL p99 ms",
                "ITL p99.99 s", "e2e p99 s"]  # fmt: skip
        put_table("victims", f"watermark {name}", head, rows, f"Median (lowest to highest) of {len(SEEDS)} seeds.")
    axis = "victim policy"
    panels = [
        Panel(
            "Tokens computed twice, by watermark", (axis, "recomputed tokens, %"), POLICIES, shares, are_connected=False
        ),
        Panel("Preemptions, by watermark", (axis, "preemptions"), POLICIES, preemptions, are_connected=False),
    ]
    write_plot(FOLDER / "victims.svg", panels)


PARTS = {"simulated": simulate}

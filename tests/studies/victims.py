"""Victim policies: who yields, against the share of tokens that are computed twice.

python tests/studies/victims.py
"""

from dataclasses import replace
from statistics import mean

from page import FOLDER, Row, put_table
from plot import write_plot
from simulation import Load, percentile, serve

POLICIES = ("newest", "least-computed", "lowest-priority")
SEEDS = (7, 8, 9)
WATERMARKS = {"off": 0, "0.02": 8}
"""Blocks of a pool of 400."""
LOAD = Load(prompt=(4.6, 0.9), answer=(5.3, 0.7), num_requests=400, low_priority_share=0.3)


def main() -> None:
    """Run the study; write its tables and plots."""
    shares: dict[str, list[float]] = {}
    for watermark, blocks in WATERMARKS.items():
        rows: list[Row] = []
        shares[f"watermark {watermark}"] = []
        for policy in POLICIES:
            runs = [serve(replace(LOAD, seed=seed), victim_policy=policy, watermark_blocks=blocks) for seed in SEEDS]
            share = mean(each.recomputed_share for each in runs)
            shares[f"watermark {watermark}"].append(share * 100)
            rows.append(
                [
                    policy,
                    round(mean(each.num_preemptions for each in runs)),
                    max(each.most_preemptions for each in runs),
                    f"{share:.1%}",
                    round(mean(each.tokens_per_second for each in runs)),
                    mean(percentile(each.gaps, 0.99) for each in runs) * 1e3,
                    mean(percentile(each.gaps, 0.9999) for each in runs),
                    mean(percentile(each.end_to_end_seconds, 0.99) for each in runs),
                ]
            )
        head = ["policy", "preemptions", "most of one request", "recomputed", "tokens/s", "ITL p99 ms",
                "ITL p99.99 s", "e2e p99 s"]  # fmt: skip
        put_table("victims", f"watermark {watermark}", head, rows)
    axes = ("victim policy", "recomputed tokens, %")
    write_plot(FOLDER / "victims-recomputed.svg", "Tokens computed twice", axes, POLICIES, shares)


if __name__ == "__main__":
    main()

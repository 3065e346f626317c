"""Upper bounds of histograms, in base units. Knows no metric.

Those of request latencies are the bounds that vLLM's dashboards use, so that the two can be laid over each other.
"""

RESIDENCY_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60,
    120, 300, 600, 1200, 1800, 3600, 14400, 86400,
)  # fmt: skip
TTFT_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
    20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
STEP_SECONDS = (
    0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 2.5, 5,
)  # fmt: skip
"""Few, since there are four phases."""
PREEMPTION_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Finer than those of requests at the low end, since computing again often takes some hundredths of a second."""
REBUILD_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60)
TRANSFER_SECONDS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10, 60)
"""Few, since there are four directions: they would be a tenth of the page of an engine that has no tiers."""
TOKENS = tuple(float(2**i) for i in range(18))
BLOCKS = tuple(float(2**i) for i in range(17))
BATCH = tuple(float(2**i) for i in range(11))
GHOST_BLOCKS = tuple(float(2**i) for i in range(18))

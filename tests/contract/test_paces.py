"""Paces that one part has and another relies on without importing it."""

import inspect

from kvwatch.bench.measurement import SETTLE_SECONDS
from kvwatch.ledger.pace import BESIDE_SECONDS, POLL_SECONDS
from kvwatch.observatory.observatory import Observatory


def test_the_bench_waits_until_a_page_that_others_read_too_shows_the_end() -> None:
    parameters = inspect.signature(Observatory).parameters
    render_seconds, view_seconds = (parameters[f"{name}_interval_seconds"].default for name in ("render", "view"))

    # Whoever looks seldomer than views are due publishes at every look.
    assert view_seconds <= 0.9 * POLL_SECONDS
    assert render_seconds + POLL_SECONDS <= SETTLE_SECONDS
    assert render_seconds + view_seconds + BESIDE_SECONDS <= SETTLE_SECONDS

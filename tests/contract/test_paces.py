"""Paces that one part has and another relies on without importing it."""

import inspect

from kvwatch.bench.measurement import SETTLE_SECONDS
from kvwatch.ledger.pace import POLL_SECONDS
from kvwatch.observatory.observatory import Observatory


def test_the_bench_waits_until_a_page_that_others_read_too_shows_the_end() -> None:
    render_seconds = inspect.signature(Observatory).parameters["render_interval_seconds"].default

    assert render_seconds + 2 * POLL_SECONDS <= SETTLE_SECONDS

"""What hostile grammars do to the requests of others: nothing that these notice, it should turn out. Prints JSON.

    python tests/perf/bench_hostile_grammars.py [--pairs 12] [--seconds 8]

`kvwatch serve` with the embedded model in a process of its own; a few streams decode through its API. In windows that
take turns, nothing else happens; or bursts of grammars arrive, exponential, huge and deep ones, several at once, a part
of them again and again; or as many harmless requests of the same sizes, which are refused for a wrong temperature: what
those cost is the price of any request. Compared are the times between two tokens of a stream, as its client sees them:
the ratio of their 99th percentiles, round by round, so that the machine's drift cancels. Each window has streams of its
own, of texts in which each token is a piece of its own, and equally long ones. Whoever sends the bursts does so from
`hostile_sender.py`, another process, with bytes made beforehand. Of each grammar it measures how long it took to be
refused.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from hostile_sender import BURST_SECONDS, Order, Outcome, SenderProcess, body_of, refused, with_head
from paired import Estimate, estimate, pseudomedian

sys.path.insert(0, str(Path(__file__).parents[1]))

from server_process import serve_process

NUM_STREAMS = 4
REST_SECONDS = 1.0
"""Between two windows, so that nothing of the one is left in the other."""
MAX_TOKENS = 4_000
BUDGET_RATIO = 1.10
BUDGET_REFUSAL_SECONDS = 1.0
MOST_UNEVEN_RATIO = 1.05
"""Streams that are in the same steps have as many events, unless tokens of one are only a part of a character."""
KINDS = ("free", "harmless", "hostile")


class Streams:
    """Reads a few long answers at once; speaks HTTP by hand: what it costs itself must not be what it measures."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname, parts.port
        self.intervals: list[float] = []
        self.counts: Counter[int] = Counter()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_measuring = False

    async def start(self) -> None:
        """Begin, and return when all of them decode."""
        ready = [asyncio.Event() for _ in range(NUM_STREAMS)]
        self._tasks = [asyncio.create_task(self._read(number, each)) for number, each in enumerate(ready)]
        await asyncio.gather(*(each.wait() for each in ready))

    async def measure(self, what: asyncio.Future[None] | asyncio.Task[Outcome]) -> None:
        """Note the times between tokens for as long as something goes on."""
        self._is_measuring = True
        await what
        self._is_measuring = False

    async def stop(self) -> None:
        """End."""
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            assert isinstance(outcome, asyncio.CancelledError), f"a stream has ended: {outcome}"

    async def _read(self, number: int, ready: asyncio.Event) -> None:
        numbers = " ".join(str(each) for each in range(10 * number, 10 * number + 60))
        body = body_of(
            {"prompt": numbers, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        )
        reader, writer = await asyncio.open_connection(*self._address, limit=2**20)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        status = int((await reader.readline()).split()[1])
        assert status == 200, f"a stream was answered {status}"
        num_tokens, last = 0, 0.0
        try:
            while line := await reader.readline():
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                if num_tokens and self._is_measuring:
                    self.intervals.append(now - last)
                    self.counts[number] += 1
                num_tokens, last = num_tokens + 1, now
                if num_tokens == 8:
                    ready.set()
        finally:
            writer.close()


class Rounds:
    """Windows of each kind in turn, and what was seen in them."""

    def __init__(self, url: str, seconds: float, sender: SenderProcess) -> None:
        self._url = url
        self._seconds = max(1, round(seconds / BURST_SECONDS)) * BURST_SECONDS
        self._sender = sender
        self.p99_ms: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.median_ms: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.refusals: list[tuple[str, int, float]] = []

    async def run(self, number: int) -> None:
        """Measure one window of each kind, each round in another order."""
        turn = number % len(KINDS)
        order = KINDS[turn:] + KINDS[:turn]
        for kind in order if number % 2 else order[::-1]:
            await self._window(kind)

    async def _window(self, kind: str) -> None:
        streams = Streams(self._url)
        await streams.start()
        rest = asyncio.ensure_future(asyncio.sleep(self._seconds))
        sent = None
        if kind != "free":
            order = Order(self._url, self._seconds, is_hostile=kind == "hostile")
            sent = asyncio.create_task(asyncio.to_thread(self._sender.send, order))
        await streams.measure(rest)
        if sent is not None and kind == "hostile":
            self.refusals += (await sent).refusals
        elif sent is not None:
            assert {status for _, status, _ in (await sent).refusals} == {400}
        await streams.stop()
        fewest, most = min(streams.counts.values()), max(streams.counts.values())
        assert most <= fewest * MOST_UNEVEN_RATIO, f"streams had {fewest} to {most} events: not each token is one"
        self.p99_ms[kind].append(float(np.percentile(streams.intervals, 99)) * 1e3)
        self.median_ms[kind].append(float(np.median(streams.intervals)) * 1e3)
        await asyncio.sleep(REST_SECONDS)


def ratio(rounds: Rounds, kind: str, other: str) -> Estimate:
    """Return the ratio of the 99th percentiles of two kinds of windows, round by round."""
    pairs = zip(rounds.p99_ms[kind], rounds.p99_ms[other], strict=True)
    return pseudomedian([a / b for a, b in pairs])


async def measure(url: str, num_rounds: int, seconds: float) -> Rounds:
    """Return what was seen in so many rounds."""
    parts = urlsplit(url)
    # What honest people send first starts the process that compiles grammars.
    honest = body_of({"guided_regex": "[ab]{3}"})
    status, _ = await asyncio.to_thread(refused, (parts.hostname or "", parts.port or 0), with_head(honest))
    assert status == 200
    with SenderProcess() as sender:
        rounds = Rounds(url, seconds, sender)
        for number in range(num_rounds):
            await rounds.run(number)
    return rounds


def main() -> None:
    """Print the result as JSON; exit 1 when others notice, or a refusal takes too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=8.0)
    asked = parser.parse_args()
    with serve_process("embedded", ready_seconds=900) as server:  # the first start compiles the kernels
        rounds = asyncio.run(measure(server.api, asked.pairs, asked.seconds))
    slowdown = ratio(rounds, "hostile", "free")
    slowest: dict[str, float] = {}
    for name, _, seconds in rounds.refusals:
        slowest[name] = max(slowest.get(name, 0.0), round(seconds, 3))
    statuses = Counter(status for _, status, _ in rounds.refusals)
    result = {
        "streams": NUM_STREAMS,
        "itl_p99_ms": {kind: estimate(found).rounded(2) for kind, found in rounds.p99_ms.items()},
        "itl_median_ms": {kind: estimate(found).rounded(2) for kind, found in rounds.median_ms.items()},
        "ratio_itl_p99": slowdown.rounded(3),
        "ratio_itl_p99_harmless": ratio(rounds, "harmless", "free").rounded(3),
        "ratio_itl_p99_to_harmless": ratio(rounds, "hostile", "harmless").rounded(3),
        "budget_ratio": BUDGET_RATIO,
        "refused": sum(statuses.values()),
        "refused_by_status": {str(status): count for status, count in sorted(statuses.items())},
        "slowest_refusal_seconds": dict(sorted(slowest.items())),
        "budget_refusal_seconds": BUDGET_REFUSAL_SECONDS,
    }
    print(json.dumps(result))
    is_slow = max(slowest.values()) > BUDGET_REFUSAL_SECONDS
    sys.exit(slowdown.median > BUDGET_RATIO or is_slow or not set(statuses) <= {400, 429})


if __name__ == "__main__":
    main()

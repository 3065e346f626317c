"""What hostile grammars do to the requests of others: nothing that these notice, it should turn out. Prints JSON.

    python tests/perf/bench_hostile_grammars.py [--pairs 10] [--seconds 10]

`kvwatch serve` with the embedded model in a process of its own; a few streams decode through its API. In windows that
alternate, bursts of grammars arrive, or none: exponential, huge and deep ones, several at once, a part of them again
and again. Compared are the times between two tokens of a stream, as its client sees them: the ratio of their 99th
percentiles, pair by pair, so that the machine's drift cancels. Of each grammar its client measures how long it took to
be refused.
"""

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from paired import estimate, ratio

sys.path.insert(0, str(Path(__file__).parents[1]))

from server_process import serve_process

NUM_STREAMS = 4
BURST = 4
BURST_SECONDS = 1.5
REST_SECONDS = 1.0
"""Between two windows, so that nothing of the one is left in the other."""
MAX_TOKENS = 8_000
BUDGET_RATIO = 1.10
BUDGET_REFUSAL_SECONDS = 1.0


def grammars() -> dict[str, dict[str, object]]:
    """Return what must be refused, by name: fields of a request, in which `#` is replaced to make texts differ."""
    names: dict[str, object] = {
        "allOf": [{"properties": {f"{i + j:x}": {} for i in range(480)}} for j in range(0, 4800, 480)]
    }
    either = [
        {"anyOf": [{"properties": {f"p{i}{j}": {}}, "required": [f"p{i}{j}"]} for j in range(8)]} for i in range(8)
    ]
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(4000))
    doubling = "".join(f"{chr(66 + i)}: {chr(67 + i)} {chr(67 + i)}\n" for i in range(22))
    return {
        "thousands of names": {"guided_json": names | {"title": "#"}},
        "alternatives of alternatives": {"guided_json": {"allOf": either, "title": "#"}},
        "a chain that takes the stack": {"guided_grammar": f'start: r0\n{rules}r4000: "a#"\n'},
        "a terminal of astronomic size": {"guided_grammar": f'start: A\nA: B B\n{doubling}X: "x#"\n'},
        "parentheses": {"guided_grammar": "start: " + "(" * 20_000 + '"a#"' + ")" * 20_000 + "\n"},
        "a deep expression": {"guided_regex": "(" * 2_000 + "a#" + ")" * 2_000},
        "an exponential expression": {"guided_regex": "(?:" * 300 + "a#" + "){1,99}" * 300},
        "a deep schema": {"guided_json": json.loads('{"items":' * 300 + '{"title": "#"}' + "}" * 300)},
        "a huge expression": {"guided_regex": "#" + "a" * 100_000},
        "a huge schema": {"guided_json": {"enum": list(range(100_000)), "title": "#"}},
    }  # fmt: skip


@dataclass
class Refusals:
    """What became of the grammars."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    statuses: Counter[int] = field(default_factory=Counter)

    def note(self, name: str, status: int, seconds: float) -> None:
        self.statuses[status] += 1
        self.seconds.setdefault(name, []).append(seconds)


class Client:
    """Speaks HTTP by hand: what it costs itself must not be what it measures."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._address = parts.hostname, parts.port
        self.intervals: list[float] | None = None
        """Where the times between tokens are noted; none while nobody measures."""

    async def post(self, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
        """Send a completion request; return where the answer is read, and its status."""
        reader, writer = await asyncio.open_connection(*self._address, limit=2**20)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        return reader, writer, status

    async def stream(self, seed: int, ready: asyncio.Event) -> None:
        """Read a long answer until this task is cancelled."""
        prompt = [(seed * 7919 + place) % 40_000 + 100 for place in range(32)]
        body = {
            "model": "SmolLM2-135M-Instruct", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        reader, writer, status = await self.post(json.dumps(body).encode())
        assert status == 200, f"the stream was answered {status}"
        num_tokens, last = 0, 0.0
        try:
            while line := await reader.readline():
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                if num_tokens and self.intervals is not None:
                    self.intervals.append(now - last)
                num_tokens, last = num_tokens + 1, now
                if num_tokens == 8:
                    ready.set()
        finally:
            writer.close()

    async def refuse(self, name: str, body: bytes, refusals: Refusals) -> None:
        """Send a grammar and note how long its refusal took."""
        started = time.perf_counter()
        _, writer, status = await self.post(body)
        refusals.note(name, status, time.perf_counter() - started)
        writer.close()


class Attack:
    """Bursts of hostile grammars, each request's bytes made beforehand."""

    def __init__(self, client: Client, num_bodies: int) -> None:
        self._client = client
        self.refusals = Refusals()
        numbers = itertools.count()
        names = itertools.cycle(grammars().items())
        # Every third comes again and again.
        self._bodies = iter(
            [
                (name, _body(fields, 0 if turn % 3 == 0 else next(numbers) + 1))
                for turn, (name, fields) in enumerate(itertools.islice(names, num_bodies))
            ]
        )

    async def run(self, seconds: float) -> None:
        """Send a burst every `BURST_SECONDS`."""
        deadline = time.perf_counter() + seconds
        sent: list[asyncio.Task[None]] = []
        while time.perf_counter() < deadline:
            for name, body in itertools.islice(self._bodies, BURST):
                sent.append(asyncio.create_task(self._client.refuse(name, body, self.refusals)))
            await asyncio.sleep(min(BURST_SECONDS, max(0.0, deadline - time.perf_counter())))
        await asyncio.gather(*sent)


def _body(fields: dict[str, object], number: int) -> bytes:
    request = {"model": "SmolLM2-135M-Instruct", "prompt": "x", "max_tokens": 4, **fields}
    return json.dumps(request).replace("#", f"{number}").encode()


async def window(client: Client, seconds: float, attack: Attack | None) -> float:
    """Return the 99th percentile of the times between two tokens during a window, in ms."""
    intervals: list[float] = []
    client.intervals = intervals
    await (asyncio.sleep(seconds) if attack is None else attack.run(seconds))
    client.intervals = None
    await asyncio.sleep(REST_SECONDS)
    return float(np.percentile(intervals, 99)) * 1e3


async def measure(url: str, num_pairs: int, seconds: float) -> tuple[list[float], list[float], Refusals]:
    """Return the 99th percentiles with and without hostile grammars in ms, pair by pair, and what became of these."""
    client = Client(url)
    attack = Attack(client, int(num_pairs * (seconds / BURST_SECONDS + 2)) * BURST)
    # What honest people send first starts the process that compiles grammars.
    await client.refuse("honest", _body({"guided_regex": "[ab]{3}"}, 0), Refusals())
    attacked: list[float] = []
    free: list[float] = []
    for pair in range(num_pairs):
        ready = [asyncio.Event() for _ in range(NUM_STREAMS)]
        streams = [asyncio.create_task(client.stream(pair * 100 + n, each)) for n, each in enumerate(ready)]
        await asyncio.gather(*(each.wait() for each in ready))
        for is_attacked in (pair % 2 == 0, pair % 2 == 1):
            found = attacked if is_attacked else free
            found.append(await window(client, seconds, attack if is_attacked else None))
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return attacked, free, attack.refusals


def main() -> None:
    """Print the result as JSON; exit 1 when others notice, or a refusal takes too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0)
    asked = parser.parse_args()
    with serve_process("embedded", ready_seconds=900) as server:  # the first start compiles the kernels
        attacked, free, refusals = asyncio.run(measure(server.api, asked.pairs, asked.seconds))
    slowdown = ratio(attacked, free)
    slowest = {name: round(max(seconds), 3) for name, seconds in sorted(refusals.seconds.items())}
    is_refused = set(refusals.statuses) <= {400, 429}
    result = {
        "streams": NUM_STREAMS,
        "itl_p99_ms_hostile": estimate(attacked).rounded(2),
        "itl_p99_ms_free": estimate(free).rounded(2),
        "ratio_itl_p99": slowdown.rounded(3),
        "budget_ratio": BUDGET_RATIO,
        "refused": sum(refusals.statuses.values()),
        "refused_by_status": {str(status): count for status, count in sorted(refusals.statuses.items())},
        "slowest_refusal_seconds": slowest,
        "budget_refusal_seconds": BUDGET_REFUSAL_SECONDS,
    }
    print(json.dumps(result))
    is_slow = max(slowest.values()) > BUDGET_REFUSAL_SECONDS
    sys.exit(slowdown.median > BUDGET_RATIO or is_slow or not is_refused)


if __name__ == "__main__":
    main()

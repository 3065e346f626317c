"""Sends bursts of requests that a server has to refuse, from a process of its own: `python hostile_sender.py`.

Each line on its standard input is an `Order` as JSON, answered by a line with its `Outcome` when all requests have been
refused. What it sends is made before the clock starts; the requests of a burst are sent at once, on threads.
"""

import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

MODEL = "SmolLM2-135M-Instruct"
BURST = 4
BURST_SECONDS = 1.5
_REPEATED = 3
"""Every third grammar has been sent before."""


class Order(msgspec.Struct):
    """Bursts for so long: of grammars, or of harmless requests of the same sizes."""

    url: str
    seconds: float
    is_hostile: bool


class Outcome(msgspec.Struct):
    """What became of them: the name, the status and the time until it came, of each request."""

    refusals: list[tuple[str, int, float]]


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


def body_of(fields: dict[str, object]) -> bytes:
    """Return the body of a request for a completion."""
    return json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 4, **fields}).encode()


def hostile_bodies() -> Iterator[tuple[str, bytes]]:
    """Give one grammar after the other, for ever, most of them new ones."""
    texts = {name: body_of(fields) for name, fields in grammars().items()}
    for turn, (name, text) in enumerate(itertools.cycle(texts.items())):
        number = 0 if turn % _REPEATED == 0 else turn
        yield name, text.replace(b"#", b"%06d" % number)


def harmless_bodies() -> Iterator[tuple[str, bytes]]:
    """Give bodies of the same sizes that are refused for what has nothing to do with grammars."""
    for name, text in hostile_bodies():
        yield name, body_of({"temperature": -1, "user": "x" * max(0, len(text) - 90)})


class Sender:
    """Sends bursts to a server."""

    def __init__(self) -> None:
        self._bodies = {True: hostile_bodies(), False: harmless_bodies()}

    def send(self, order: Order) -> Outcome:
        """Send bursts for as long as is asked for; return when all requests have been answered."""
        num_bursts = max(1, round(order.seconds / BURST_SECONDS))
        requests = [
            [(name, with_head(body)) for name, body in itertools.islice(self._bodies[order.is_hostile], BURST)]
            for _ in range(num_bursts)
        ]
        parts = urlsplit(order.url)
        address = parts.hostname or "", parts.port or 0
        refusals: list[tuple[str, int, float]] = []
        threads: list[threading.Thread] = []

        def send_one(name: str, request: bytes) -> None:
            refusals.append((name, *refused(address, request)))

        started = time.monotonic()
        for number, burst in enumerate(requests):
            time.sleep(max(0.0, started + number * BURST_SECONDS - time.monotonic()))
            for each in burst:
                threads.append(threading.Thread(target=send_one, args=each))
                threads[-1].start()
        for thread in threads:
            thread.join()
        return Outcome(refusals)


def refused(address: tuple[str, int], request: bytes) -> tuple[int, float]:
    """Send a request; return the status of its answer and how many seconds it took."""
    started = time.monotonic()
    with socket.create_connection(address) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65_536):
            answer += piece
    return int(answer.split(b" ", 2)[1]), time.monotonic() - started


def with_head(body: bytes) -> bytes:
    """Return a request as it goes out."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class SenderProcess:
    """A sender in a process of its own, as a context manager."""

    def __enter__(self) -> "SenderProcess":
        command = [sys.executable, str(Path(__file__))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self

    def send(self, order: Order) -> Outcome:
        """Have an order carried out. Blocks meanwhile."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=Outcome)

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)


def main() -> None:
    """Carry out orders until there are no more."""
    sender = Sender()
    for line in sys.stdin.buffer:
        outcome = sender.send(msgspec.json.decode(line, type=Order))
        sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

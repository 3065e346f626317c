"""Requests of a trace file.

A line is a JSON object with `timestamp` (ms), `input_length` and `output_length` (tokens), and `hash_ids`, which names
each block of 512 prompt tokens: equal leading ids are a shared prefix. The text of a block is made from its id, so
prompts share exactly what they shared in the trace. The file may be compressed with gzip.
"""

import gzip
import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import overload

import msgspec

from kvwatch.bench.scenarios import TRACE, RequestSpec
from kvwatch.bench.words import TextScale, make_words
from kvwatch.errors import ConfigError

BLOCK_TOKENS = 512
"""Tokens that one hash id stands for."""
MOST_OF_LIMIT = 0.95
"""A request is cut so that it fills at most this part of the target's limit: words vary in tokens."""
_CACHED_BLOCKS = 4096


class TraceRequest(msgspec.Struct, frozen=True):
    """One line."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, most: int) -> list[TraceRequest]:
    """Return the first `most` requests of a file in the order of their times.

    Raises:
        ConfigError: it cannot be read, or a line is no such request.
    """
    requests: list[TraceRequest] = []
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if len(requests) == most:
                    break
                if line.strip():
                    requests.append(_decode(line, f"--trace: {path}, line {number}"))
    except (OSError, EOFError) as error:
        raise ConfigError(f"--trace: {path} cannot be read ({error}); give a file of JSON lines") from error
    if not requests:
        raise ConfigError(f"--trace: {path} holds no request")
    return sorted(requests, key=lambda request: request.timestamp)


class TraceRequests(Sequence[RequestSpec]):
    """The requests of a trace for one target. A prompt is made when it is asked for: together they may be gigabytes."""

    def __init__(
        self, requests: Sequence[TraceRequest], seed: int, speed: float, scale: float, limit: int, text: TextScale
    ) -> None:
        """Create the sequence.

        Args:
            requests: As `read_trace` gives them.
            seed: Decides the text of blocks.
            speed: 2 sends twice as fast as the trace.
            scale: 0.1 makes prompts and answers a tenth as long; what was shared stays shared.
            limit: Longest sequence that the target takes; what is longer is cut.
            text: How words become tokens at the target.
        """
        self._requests = requests
        self._seed = seed
        self._speed = speed
        self._scale = scale
        self._room = int(limit * MOST_OF_LIMIT)
        self._text = text
        self._block = lru_cache(_CACHED_BLOCKS)(self._make_block)
        self.num_cut = sum(self._wanted(each) != self._lengths(each) for each in requests)
        """Requests that are longer than the target takes."""

    def __len__(self) -> int:
        return len(self._requests)

    @overload
    def __getitem__(self, place: int) -> RequestSpec: ...
    @overload
    def __getitem__(self, place: slice) -> list[RequestSpec]: ...
    def __getitem__(self, place: int | slice) -> RequestSpec | list[RequestSpec]:
        if isinstance(place, slice):
            return [self._spec(index) for index in range(len(self))[place]]
        return self._spec(range(len(self))[place])

    def _spec(self, index: int) -> RequestSpec:
        request = self._requests[index]
        num_input, num_output = self._lengths(request)
        return RequestSpec(
            scenario=TRACE,
            index=index,
            prompt=self._prompt(request.hash_ids, num_input),
            max_tokens=num_output,
            seed=index,
            is_fixed_length=True,
            due_seconds=(request.timestamp - self._requests[0].timestamp) / 1000 / self._speed,
        )

    def _wanted(self, request: TraceRequest) -> tuple[int, int]:
        return max(1, round(request.input_length * self._scale)), max(1, round(request.output_length * self._scale))

    def _lengths(self, request: TraceRequest) -> tuple[int, int]:
        """Return tokens of prompt and answer, cut to what fits: the answer to half of it at most, then the prompt."""
        num_input, num_output = self._wanted(request)
        num_output = min(num_output, max(1, self._room // 2))
        return max(1, min(num_input, self._room - num_output)), num_output

    def _prompt(self, hash_ids: Sequence[int], num_tokens: int) -> str:
        num_words = max(1, int((num_tokens - self._text.overhead_tokens) / self._text.tokens_per_word))
        size = max(1, round(BLOCK_TOKENS * self._scale / self._text.tokens_per_word))
        whole, rest = divmod(num_words, size)
        # A trace may name fewer blocks than its length needs; what has no id is the request's own.
        ids: list[int | str] = [*hash_ids, *(f"{hash_ids[-1:]}+{place}" for place in range(whole + 1))]
        text = "".join(self._block(block_id, size) for block_id in ids[:whole])
        return text + (self._make_block(ids[whole], rest) if rest else "")

    def _make_block(self, block_id: int | str, num_words: int) -> str:
        return make_words(random.Random(f"{self._seed}/block/{block_id}"), num_words)  # noqa: S311


def _decode(line: bytes, where: str) -> TraceRequest:
    try:
        request = msgspec.json.decode(line, type=TraceRequest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is no request of a trace ({error}); see docs/bench.md") from error
    if request.input_length < 1 or request.output_length < 1:
        raise ConfigError(f"{where}: lengths must be at least 1")
    return request

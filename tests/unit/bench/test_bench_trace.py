import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.bench.trace import BLOCK_TOKENS, TraceRequest, TraceRequests, read_trace
from kvwatch.bench.words import TextScale
from kvwatch.errors import ConfigError


def line(timestamp: float, num_input: int, num_output: int, hash_ids: list[int]) -> str:
    fields = {"timestamp": timestamp, "input_length": num_input, "output_length": num_output, "hash_ids": hash_ids}
    return json.dumps(fields) + "\n"


def requests_of(
    requests: list[TraceRequest],
    limit: int = 100_000,
    scale: float = 1.0,
    tokens_per_word: float = 1.0,
    speed: float = 1.0,
) -> TraceRequests:
    return TraceRequests(requests, 1, speed, scale, limit, TextScale(tokens_per_word, 0))


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_file_is_read_in_the_order_of_its_times(tmp_path: Path, name: str) -> None:
    text = line(2000, 600, 10, [1, 2]) + "\n" + line(1000, 100, 5, [3]) + line(9000, 1, 1, [4])
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())

    found = read_trace(path, 2)

    assert [each.timestamp for each in found] == [1000, 2000]
    specs = requests_of(found, speed=4)
    assert [spec.due_seconds for spec in specs] == [0, 0.25]
    assert [(len(spec.prompt.split()), spec.max_tokens) for spec in specs] == [(100, 5), (600, 10)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no request"),
        (b'{"timestamp": 1}\n', "line 1"),
        (b"\xff\xff\n", "line 1"),
        (b'{"x": ' + b"[" * 100_000, "line 1"),
        (line(0, 5, 5, [1]).encode() + b"[1, 2]\n", "line 2"),
        (line(0, 0, 5, [1]).encode(), "at least 1"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_file_is_a_usage_error(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_trace(path, 100)


def test_a_file_that_only_claims_to_be_compressed_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(line(0, 5, 5, [1]).encode())
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(path, 100)


@given(
    common=st.integers(0, 4), own=st.lists(st.integers(1, 3), min_size=2, max_size=2),
    scale=st.sampled_from([1.0, 0.25, 0.1]), tokens_per_word=st.sampled_from([1.0, 1.3, 3.7]),
)  # fmt: skip
def test_prompts_share_exactly_the_blocks_that_they_share_in_the_trace(
    common: int, own: list[int], scale: float, tokens_per_word: float
) -> None:
    ids = [[*range(common), *range(100 * who, 100 * who + count)] for who, count in enumerate(own, 1)]
    lines = [TraceRequest(0, BLOCK_TOKENS * len(each), 10, each) for each in ids]
    first, second = (spec.prompt.split() for spec in requests_of(lines, scale=scale, tokens_per_word=tokens_per_word))
    size = round(BLOCK_TOKENS * scale / tokens_per_word)

    shared = next((place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)

    assert shared is not None
    assert common * size <= shared < common * size + 12  # random words agree by chance now and then
    for prompt, count in zip((first, second), own, strict=True):
        wanted = BLOCK_TOKENS * (common + count) * scale
        assert len(prompt) * tokens_per_word == pytest.approx(wanted, abs=tokens_per_word + 1)


def test_what_is_too_long_is_cut_and_counted() -> None:
    lines = [TraceRequest(0, 5000, 5000, list(range(10))), TraceRequest(0, 300, 100, [1])]
    specs = requests_of(lines, limit=1000)
    assert specs.num_cut == 1
    assert [(len(spec.prompt.split()), spec.max_tokens) for spec in specs] == [(475, 475), (300, 100)]
    assert specs[1].max_tokens == specs[-1].max_tokens == specs[1:][0].max_tokens == 100


def test_a_request_with_fewer_ids_than_blocks_still_has_its_length() -> None:
    specs = requests_of([TraceRequest(0, 2000, 1, []), TraceRequest(0, 2000, 1, [5])])
    assert [len(spec.prompt.split()) for spec in specs] == [2000, 2000]
    assert specs[0].prompt != specs[1].prompt

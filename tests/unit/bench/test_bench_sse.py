import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.bench.errors import RequestFailed
from kvwatch.bench.sse import EventReader


def naive(stream: bytes) -> list[bytes]:
    """The data of all events of a stream that is known as a whole."""
    events = re.split(rb"\n\n+", stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + b"\n\n")
    found = [
        [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")] for event in events
    ]
    return [b"\n".join(lines) for lines in found if lines]


LINES = st.sampled_from(
    [b"data: a", b"data:b", b"data: ", b"data:  c", b": waiting", b"event: x", b"", b"id: 7", b"nonsense"]
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
STREAMS = st.lists(st.tuples(LINES, ENDS), max_size=20).map(lambda parts: b"".join(map(b"".join, parts)))


@given(stream=STREAMS, cuts=st.lists(st.integers(0, 200), max_size=12))
def test_events_do_not_depend_on_where_the_stream_is_cut(stream: bytes, cuts: list[int]) -> None:
    reader = EventReader()
    places = [0, *sorted(cuts), len(stream)]

    events = [data for begin, end in pairwise(places) for data in reader.feed(stream[begin:end])]
    events += reader.end()

    assert events == naive(stream)


def test_an_event_is_given_as_soon_as_it_is_complete() -> None:
    reader = EventReader()
    assert reader.feed(b"data: one\n\ndata: tw") == [b"one"]
    assert reader.feed(b"o\n\n") == [b"two"]


@pytest.mark.parametrize("stream", [b"data: " + b"x" * 200, b"data: xxxxxxxx\n" * 20, b":" + b"x" * 200])
def test_what_is_too_long_is_refused_before_it_ends(stream: bytes) -> None:
    reader = EventReader(max_event_bytes=100)
    for place in range(90):
        reader.feed(stream[place : place + 1])
    with pytest.raises(RequestFailed) as failed:
        reader.feed(stream[90:])
    assert failed.value.kind == "too_long"


def test_many_short_events_are_not_too_long() -> None:
    reader = EventReader(max_event_bytes=20)
    assert len(reader.feed(b"data: 0123456789\n\n" * 1000)) == 1000

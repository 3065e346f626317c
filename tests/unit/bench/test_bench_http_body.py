"""Where a body of HTTP/1.1 ends does not depend on how it is cut; what is no HTTP is refused."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.bench.errors import RequestFailed
from kvwatch.bench.http_body import Body, ChunkedBody, EndlessBody, SizedBody

CUTS = st.lists(st.integers(0, 400), max_size=20)
CONTENTS = st.lists(st.binary(min_size=1, max_size=40) | st.just(b"\r\n0\r\n\r\n"), max_size=8)


def fed(body: Body, sent: bytes, cuts: list[int]) -> bytes:
    places = [0, *sorted(cuts), len(sent)]
    return b"".join(body.feed(sent[begin:end]) for begin, end in pairwise(places) if begin < end)


def chunked(contents: list[bytes], extension: bytes = b"", trailers: bytes = b"") -> bytes:
    chunks = [b"%X%b\r\n%b\r\n" % (len(each), extension, each) for each in contents]
    return b"".join(chunks) + b"0\r\n" + trailers + b"\r\n"


@given(contents=CONTENTS, cuts=CUTS, extension=st.sampled_from([b"", b";a=b", b" "]), has_trailers=st.booleans())
def test_a_chunked_body_is_its_chunks_however_it_is_cut(
    contents: list[bytes], cuts: list[int], extension: bytes, has_trailers: bool
) -> None:
    sent = chunked(contents, extension, b"a: b\r\nc: d\r\n" if has_trailers else b"")
    for num_missing in (0, 1):
        body = ChunkedBody()
        found = fed(body, sent[: len(sent) - num_missing], [min(cut, len(sent) - num_missing) for cut in cuts])
        assert found == b"".join(contents)
        assert body.is_over == (num_missing == 0)


@given(content=st.binary(max_size=100), cuts=CUTS)
def test_a_body_of_known_length_ends_with_it(content: bytes, cuts: list[int]) -> None:
    body = SizedBody(len(content))
    assert fed(body, content, [min(cut, len(content)) for cut in cuts]) == content
    assert body.is_over
    with pytest.raises(RequestFailed, match="more came"):
        body.feed(b"x")


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    body = EndlessBody()
    assert fed(body, b"one\n\ntwo", [3]) == b"one\n\ntwo"
    assert not body.is_over
    assert body.ends_with_connection


@pytest.mark.parametrize(
    "sent",
    [
        b"zz\r\n", b"\r\n", b"-1\r\n", b"0x5\r\n", b"3\r\nabcd\r\n", b"3\r\nabc\n2\r\n", b"5" * 5000, b"0\r\n\r\nmore",
        b"0\r\n" + b"t" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_chunked_body_is_refused(sent: bytes) -> None:
    with pytest.raises(RequestFailed) as caught:
        fed(ChunkedBody(), sent, [])
    assert caught.value.kind == "protocol"

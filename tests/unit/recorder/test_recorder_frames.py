"""Frames: what is written comes back, what was damaged does not, and a hostile one costs nothing."""

import struct
import tracemalloc
import zlib

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.errors import RecordingError
from kvwatch.recorder.frames import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    Codec,
    FrameInfo,
    FrameKind,
    FramePacker,
    Span,
    is_whole,
    open_body,
    read_info,
)

INTS = st.integers(-(2**63), 2**63 - 1)
SPANS = st.builds(Span, INTS, INTS, INTS, INTS, INTS, INTS)


def forge(body: bytes, raw_bytes: int, codec: Codec = Codec.ZSTD) -> tuple[bytes, FrameInfo]:
    """Make a frame with a valid checksum around any body."""
    head = struct.pack("<4sBBHQII6q", b"KVWF", FrameKind.EVENTS, codec, 0, 0, len(body), raw_bytes, *[0] * 6)
    frame = head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body
    info = read_info(frame[:HEADER_BYTES])
    assert info is not None
    return frame, info


@given(kind=st.sampled_from(FrameKind), raw=st.binary(max_size=2000), repeat=st.integers(1, 50), span=SPANS)
def test_what_was_packed_is_what_is_opened(kind: FrameKind, raw: bytes, repeat: int, span: Span) -> None:
    packer = FramePacker(level=1)
    packer.next_number = 17

    frame = packer.pack(kind, raw * repeat, span)

    info = read_info(frame)
    assert info is not None
    assert (info.kind, info.number, info.span, info.size) == (kind, 17, span, len(frame))
    assert open_body(frame, info) == raw * repeat


@given(raw=st.binary(min_size=1, max_size=400), place=st.integers(0, 10_000), change=st.integers(1, 255))
def test_no_changed_byte_goes_unnoticed(raw: bytes, place: int, change: int) -> None:
    frame = bytearray(FramePacker(level=1).pack(FrameKind.EVENTS, raw * 3, Span(1, 2)))
    frame[place % len(frame)] ^= change

    info = read_info(bytes(frame))

    assert info is None or not is_whole(bytes(frame), info)
    if info is not None:
        with pytest.raises(RecordingError, match="damaged"):
            open_body(bytes(frame), info)


def test_a_frame_that_claims_more_than_it_may_is_none() -> None:
    head = struct.pack("<4sBBHQII6qI", b"KVWF", 3, 1, 0, 0, 10, MAX_BODY_BYTES + 1, *[0] * 6, 0)

    assert read_info(head) is None


def test_a_body_that_grows_beyond_what_the_header_says_is_not_decompressed() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(64 * 2**20))
    frame, info = forge(bomb, raw_bytes=1000)

    tracemalloc.start()
    try:
        with pytest.raises(RecordingError, match="size"):
            open_body(frame, info)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 2**20


@pytest.mark.parametrize("body", [b"", b"no zstd at all", zstandard.ZstdCompressor().compress(b"x" * 1000)[:-3]])
def test_a_body_that_is_not_what_it_says_is_a_named_error(body: bytes) -> None:
    frame, info = forge(body, raw_bytes=1000)

    with pytest.raises(RecordingError, match="damaged"):
        open_body(frame, info)


def test_a_state_that_is_too_large_for_the_format_is_refused() -> None:
    with pytest.raises(RecordingError, match="too large"):
        FramePacker(level=1).pack(FrameKind.STATE, bytes(MAX_BODY_BYTES + 1), Span())

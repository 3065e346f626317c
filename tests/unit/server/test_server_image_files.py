"""Files of images from strangers: whatever they hold, they are decoded within the limits or refused."""

import base64
import re
from collections.abc import Callable
from io import BytesIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tiny_vision_model import picture

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.server.image_files import MAX_JPEG_SCANS, base64_of, decode_image, num_bytes_of

MAX_PIXELS = 100_000


def file_of(kind: str, shown: Image.Image | None = None, **options: object) -> bytes:
    file = BytesIO()
    (shown or picture(1)).save(file, kind, **options)
    return file.getvalue()


def decode(data: bytes) -> Image.Image:
    return decode_image(base64.b64encode(data).decode(), MAX_PIXELS, "here")


def refusal_or(decoded: Callable[[], Image.Image]) -> Image.Image | RequestInvalid:
    try:
        return decoded()
    except RequestInvalid as error:
        return error


def assert_well_said(error: RequestInvalid) -> None:
    assert error.param == "here"
    assert len(str(error)) < 300


FILES = {
    "png": file_of("PNG"),
    "jpeg": file_of("JPEG"),
    "progressive": file_of("JPEG", progressive=True),
    "webp": file_of("WEBP"),
    "gif": file_of("GIF", picture(1).convert("P")),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_whole_file_is_decoded(kind: str) -> None:
    found = decode(FILES[kind])
    assert (found.mode, found.size) == ("RGB", (40, 32))


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=200)
@given(kind=st.sampled_from(sorted(FILES)), data=st.data())
def test_damaged_files_are_decoded_within_the_limits_or_refused(kind: str, data: st.DataObject) -> None:
    file = bytearray(FILES[kind])
    for _ in range(data.draw(st.integers(1, 6))):
        begin = data.draw(st.integers(0, len(file) - 1))
        file[begin : begin + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    found = refusal_or(lambda: decode(bytes(file)))
    if isinstance(found, RequestInvalid):
        assert found.code == "invalid_image"
        assert_well_said(found)
    else:
        assert found.mode == "RGB"
        assert found.width * found.height <= MAX_PIXELS


@given(url=st.one_of(st.text(), st.text().map("data:".__add__), st.text().map("data:image/png;base64,".__add__)))
def test_any_text_as_a_url_is_refused(url: str) -> None:
    found = refusal_or(lambda: decode_image(base64_of(url, "here"), MAX_PIXELS, "here"))
    assert isinstance(found, RequestInvalid), "no text that is found by chance is an image"
    assert_well_said(found)


@given(data=st.binary(max_size=100))
def test_the_size_of_a_file_is_known_before_it_is_decoded(data: bytes) -> None:
    text = base64_of(f"data:image/gif;charset=utf-8;base64,{base64.b64encode(data).decode()}", "here")
    assert len(data) <= num_bytes_of(text) <= len(data) + 2


def test_a_jpeg_of_endless_scans_is_refused_since_each_goes_over_all_pixels() -> None:
    data = file_of("JPEG", progressive=True)
    last = data.rfind(b"\xff\xda")

    def with_scans(count: int) -> bytes:
        return data[:last] + data[last:-2] * count + data[-2:]

    num_scans = data.count(b"\xff\xda")
    assert decode(with_scans(1)).size == (40, 32)
    assert decode(with_scans(MAX_JPEG_SCANS - num_scans + 1)).size == (40, 32)
    expected = re.escape(f"has {MAX_JPEG_SCANS + 1} scans, but {MAX_JPEG_SCANS} are the limit")
    with pytest.raises(RequestInvalid, match=expected):
        decode(with_scans(MAX_JPEG_SCANS - num_scans + 2))

"""Images as clients send them: data URLs to pixels, under limits that hold before anything large is decoded.

Nothing is ever fetched: a URL that names another machine is refused.
"""

import binascii
import re
from io import BytesIO

from PIL import Image, ImageOps

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.server.errors import shorten

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""What is decoded; of moving images the first frame."""
MAX_SIDE_RATIO = 100
"""Scaled to the model's size on its shorter side, a thin strip would be many times longer than it is now."""
MAX_JPEG_SCANS = 64
"""A progressive JPEG has about ten; a file of a few bytes for each scan could have a million, each over all pixels."""

_SCAN = b"\xff\xda"
"""The marker before a scan; image data cannot hold it."""
_MEDIA_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
_DATA_URL = re.compile(r"data:([a-zA-Z]+/[\w.+-]+)?((?:;[\w.+-]+=[\w.+-]*)*)(;base64)?,", re.ASCII)
_MAX_PREFIX_CHARS = 256
_INVALID = "invalid_image"


def base64_of(url: str, param: str) -> str:
    """Return the base64 text of a data URL, undecoded.

    Raises:
        RequestInvalid: it is no data URL of an image in base64.
    """
    prefix = _DATA_URL.match(url[:_MAX_PREFIX_CHARS])
    if prefix is None:
        what = (
            "is no data URL" if url[:5].lower() == "data:" else f"is {shorten(url, 32)!r}, and this server fetches none"
        )
        raise RequestInvalid(f"{param} {what}; send data:image/png;base64,...", param=param, code="unsupported")
    media_type = (prefix[1] or "").lower()
    if media_type not in _MEDIA_TYPES:
        raise RequestInvalid(
            f"{param} is of type {shorten(media_type) or 'text/plain'}; send one of {', '.join(_MEDIA_TYPES)}",
            param=param,
            code="unsupported",
        )
    if not prefix[3]:
        raise RequestInvalid(f"{param} is not in base64; send data:{media_type};base64,...", param=param, code=_INVALID)
    return url[prefix.end() :]


def num_bytes_of(base64: str) -> int:
    """Return how many bytes a base64 text stands for, or one or two more."""
    return len(base64) * 3 // 4


def decode_image(base64: str, max_pixels: int, param: str) -> Image.Image:
    """Return an image, upright and in RGB.

    Args:
        base64: the file.
        max_pixels: most pixels that it may have; its header is asked before they are decoded.
        param: where it stands in the request.

    Raises:
        RequestInvalid: it cannot be decoded, or is too large or too thin.
    """
    try:
        data = binascii.a2b_base64(base64, strict_mode=True)
    except ValueError as error:  # also for characters that are not ASCII
        raise RequestInvalid(f"{param} is not valid base64: {error}", param=param, code=_INVALID) from error
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            _check_size(*image.size, max_pixels, param)
            if image.format == "JPEG":
                _check_scans(data.count(_SCAN), param)
            image.load()
            return ImageOps.exif_transpose(image).convert("RGB")
    except RequestInvalid:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(f"{param} has far more pixels", max_pixels, param) from error
    except Exception as error:  # damaged files make the decoders raise every kind
        raise RequestInvalid(
            f"{param} cannot be decoded ({type(error).__name__}); send a whole file as PNG, JPEG, WebP or GIF",
            param=param,
            code=_INVALID,
        ) from error


def _check_size(width: int, height: int, max_pixels: int, param: str) -> None:
    if width * height > max_pixels:
        raise _too_large(f"{param} has {width} x {height} pixels", max_pixels, param)
    if max(width, height) > MAX_SIDE_RATIO * min(width, height):
        raise RequestInvalid(
            f"{param} has {width} x {height} pixels; its longer side may be {MAX_SIDE_RATIO} times the shorter one",
            param=param,
            code=_INVALID,
        )


def _check_scans(num_scans: int, param: str) -> None:
    if num_scans > MAX_JPEG_SCANS:
        raise RequestInvalid(
            f"{param} has {num_scans} scans, but {MAX_JPEG_SCANS} are the limit; save it anew",
            param=param,
            code=_INVALID,
        )


def _too_large(what: str, max_pixels: int, param: str) -> RequestInvalid:
    return RequestInvalid(
        f"{what}, but {max_pixels} in all are the limit; scale it down, or raise --max-image-pixels",
        param=param,
        code=_INVALID,
    )

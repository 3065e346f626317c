"""Reading a request's body under a limit, and decoding it."""

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.server.errors import BodyTimeout, BodyTooLarge, ClientGone, UnsupportedMediaType, shorten
from kvwatch_engine.server.settings import ServerSettings

_FORM_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
"""What a web page can send to any address without asking first: refused, so that no page can use a local server."""
_DISCARD_FACTOR = 8
"""How many times the limit is read and thrown away, so that an honest client gets to see the answer."""
_PLACE = re.compile(r"^(?P<reason>.*) - at `(?:key in )?\$\.?(?P<place>.*)`$", re.DOTALL)

Body = TypeVar("Body", bound=msgspec.Struct)


async def read_body(request: Request, settings: ServerSettings) -> bytes:
    """Return the body, read piece by piece.

    Raises:
        UnsupportedMediaType: it is declared as a form or as plain text.
        BodyTooLarge: it is longer than `settings.max_body_bytes`.
        BodyTimeout: it did not arrive within `settings.body_seconds`.
        ClientGone: the client hung up before its end.
    """
    declared = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if declared in _FORM_TYPES:
        raise UnsupportedMediaType(f"content-type is {declared}; send application/json")
    try:
        async with asyncio.timeout(settings.body_seconds):
            return await _collect(request, settings.max_body_bytes)
    except TimeoutError as error:
        raise BodyTimeout(f"the body did not arrive within {settings.body_seconds:g} s; send it again") from error
    except ClientDisconnect as error:
        raise ClientGone("the client hung up while sending its request") from error


async def _collect(request: Request, limit: int) -> bytes:
    pieces: list[bytes] = []
    num_bytes = 0
    async for piece in request.stream():
        num_bytes += len(piece)
        if num_bytes <= limit:
            pieces.append(piece)
        else:
            pieces.clear()
            if num_bytes > limit * _DISCARD_FACTOR:
                break
    if num_bytes > limit:
        raise BodyTooLarge(f"the body is longer than the limit of {limit} bytes; shorten it")
    return b"".join(pieces)


def decode_body(body: bytes, kind: type[Body]) -> Body:
    """Decode a JSON body.

    Raises:
        RequestInvalid: it is not JSON (lone surrogates and NaN are not), nested too deeply, or of the wrong types.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        found = _PLACE.match(str(error))
        reason, place = (found["reason"], found["place"]) if found else (str(error), "")
        missing = re.search(r"missing required field `(\w+)`", reason)
        param = ".".join(part for part in (place, missing[1] if missing else "") if part)
        what = shorten(param, 128) or "the body"
        raise RequestInvalid(f"{what}: {reason}", param=shorten(param, 128) or None) from error
    except msgspec.DecodeError as error:
        raise RequestInvalid(f"the body is not valid JSON in UTF-8: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise RequestInvalid("the body is nested too deeply", code="invalid_json") from error

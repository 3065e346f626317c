"""Finds out what the target is: its models from `/v1/models`, its kind and its pool from `/metrics`."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import httpx
import msgspec

from kvwatch.bench.answer import retry_after
from kvwatch.bench.client import failure_of, start_of
from kvwatch.bench.errors import RequestFailed, TargetUnreachable
from kvwatch.bench.signals import Kind, Reading, kind_of, read_signals
from kvwatch.bench.target import OFF, Target, Wanted
from kvwatch.config import unknown_name

MAX_PAGE_BYTES = 16 * 2**20
"""Longest page that is read; a larger one counts as unreadable."""
GET_SECONDS = 10.0
"""Longest time that a page may take."""

_OWNERS: dict[str, Kind] = {"kvwatch": "kvwatch", "vllm": "vllm", "sglang": "sglang"}
_RESETS: dict[Kind, str] = {"vllm": "/reset_prefix_cache", "sglang": "/flush_cache"}
"""Where servers empty their prefix cache. vLLM has the path only in its development mode; kvwatch's admin API is at
another address and wants a token, so it is asked only if `--reset-url` names it."""


class _Card(msgspec.Struct):
    id: str
    owned_by: str = ""
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


async def discover(http: httpx.AsyncClient, wanted: Wanted) -> Target:
    """Return what the target says of itself.

    Raises:
        TargetUnreachable: nothing there speaks OpenAI's API.
        ConfigError: it does not serve the wanted model.
    """
    cards = await _patiently(lambda: _models(http, wanted), wanted.ready_seconds)
    names = [card.id for card in cards]
    model = wanted.model or names[0]
    if names and model not in names:
        raise unknown_name(model, names, "--model:")
    card = next((card for card in cards if card.id == model), _Card(model))
    metrics_url, kind, reading = await _metrics(http, wanted)
    if kind == "unknown":
        kind = _OWNERS.get(card.owned_by, "unknown")
    return Target(
        url=wanted.url,
        kind=kind,
        model=model,
        models=(model, *(name for name in names if name != model)),
        endpoint=wanted.endpoint,
        max_model_len=card.max_model_len,
        token_capacity=int(reading.token_capacity) if reading and reading.token_capacity else None,
        metrics_url=metrics_url if reading else None,
        reset_url=_reset_url(wanted, kind),
    )


async def get_text(http: httpx.AsyncClient, url: str, seconds: float) -> str:
    """Return a page.

    Args:
        http: Asks for it.
        url: Where it is.
        seconds: What it may take.

    Raises:
        RequestFailed: there is none, it is no text, it is too long, or it takes too long.
    """
    try:
        async with asyncio.timeout(seconds), http.stream("GET", url) as response:
            if response.status_code != 200:
                header = response.headers.get("retry-after")
                raise RequestFailed(f"http_{response.status_code}", await start_of(response), retry_after(header))
            body = bytearray()
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > MAX_PAGE_BYTES:
                    raise RequestFailed("too_long", f"more than {MAX_PAGE_BYTES} bytes came")
            return body.decode()
    except TimeoutError as error:
        raise RequestFailed("timeout", f"no answer within {seconds:g} s") from error
    except UnicodeDecodeError as error:
        raise RequestFailed("bad_utf8", "what came is no UTF-8") from error
    except httpx.HTTPError as error:
        raise failure_of(error) from error


async def _models(http: httpx.AsyncClient, wanted: Wanted) -> list[_Card]:
    url = wanted.url + "/v1/models"
    try:
        cards = msgspec.json.decode(await get_text(http, url, GET_SECONDS), type=_Models).data
    except RequestFailed as error:
        if error.kind == "http_404" and wanted.model is not None:
            return []  # a server may leave the list out; then the user's word is taken
        raise TargetUnreachable(f"{url}: {_remedy(error)}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise TargetUnreachable(
            f"{url} does not answer with OpenAI's list of models ({error}); is it the address of an API?"
        ) from error
    if not cards and wanted.model is None:
        raise TargetUnreachable(f"{url} lists no model; name one with --model")
    return cards


def _remedy(error: RequestFailed) -> str:
    remedies = {
        "refused": "is the server running? --wait-ready SECONDS waits for it",
        "timeout": "if it is still starting, --wait-ready SECONDS waits for it",
        "http_401": "give its key with --api-key-file",
        "http_403": "give its key with --api-key-file",
        "http_404": "is it the address of an OpenAI-compatible API? Without a list of models, name one with --model",
        "http_503": "it is not ready; --wait-ready SECONDS waits for it",
    }
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return f"{error}; give the certificate of its authority with --ca-file"
    status = f"status {error.kind.removeprefix('http_')}: " if error.kind.startswith("http_") else ""
    return f"{status}{error}; {remedies.get(error.kind, 'check --url')}"


async def _patiently(ask: Callable[[], Awaitable[list[_Card]]], seconds: float) -> list[_Card]:
    """Ask until it is answered, for so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return await ask()
        except TargetUnreachable:
            if time.monotonic() >= deadline:
                raise
            await asyncio.sleep(0.25)


async def _metrics(http: httpx.AsyncClient, wanted: Wanted) -> tuple[str | None, Kind, Reading | None]:
    """Return where the metrics are, whose they are, and a first look at them."""
    if wanted.metrics_url == OFF:
        return None, "unknown", None
    url = wanted.metrics_url or wanted.url + "/metrics"
    try:
        page = await get_text(http, url, GET_SECONDS)
    except RequestFailed as error:
        if wanted.metrics_url is not None:
            raise TargetUnreachable(f"--metrics-url: {url}: {error}; correct it, or give {OFF}") from error
        return None, "unknown", None
    kind = kind_of(page)
    return url, kind, read_signals(kind, page)


def _reset_url(wanted: Wanted, kind: Kind) -> str | None:
    if wanted.reset_url is not None:
        return None if wanted.reset_url == OFF else wanted.reset_url
    path = _RESETS.get(kind)
    return None if path is None else wanted.url + path

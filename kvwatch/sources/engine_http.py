"""Asks an engine over HTTP: bounded in time and size, with its token and certificates."""

import asyncio
import ssl

import httpx

from kvwatch.errors import ConfigError, KVWatchError
from kvwatch.sources.engines import EngineSpec

TIMEOUT_SECONDS = 5.0
"""For a whole answer: one that comes byte by byte is none."""

MAX_ANSWER_BYTES = 4 << 20


class EngineUnreachableError(KVWatchError):
    """An engine does not answer, or not with what was asked for."""


class EngineHTTP:
    """Client of one engine. Event loop only; `close` it at the end."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._client: httpx.AsyncClient | None = None
        self._trusted: bytes | None = None

    async def get(self, path: str) -> bytes | None:
        """Return the body of an answer; None if the engine has no such path.

        Raises:
            EngineUnreachableError: it does not answer in time, with success and within the limit.
        """
        url = self._spec.url.rstrip("/") + path
        try:
            client, token = await self._connected(), self._spec.token()
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            async with (
                asyncio.timeout(TIMEOUT_SECONDS),
                client.stream("GET", url, headers=headers) as answer,
            ):
                if answer.status_code == httpx.codes.NOT_FOUND:
                    return None
                if answer.status_code != httpx.codes.OK:
                    raise EngineUnreachableError(f"{url} answers with status {answer.status_code}")
                return await _bounded(answer, url)
        except TimeoutError as error:
            raise EngineUnreachableError(f"{url} takes more than {TIMEOUT_SECONDS:g} s to answer") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, ConfigError) as error:
            raise EngineUnreachableError(f"{url} cannot be asked ({type(error).__name__}: {error})") from error

    async def close(self) -> None:
        """Close connections. Safe twice."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _connected(self) -> httpx.AsyncClient:
        trusted = self._spec.ca()
        if self._client is None or trusted != self._trusted:
            await self.close()
            self._trusted = trusted
            # Only what is configured: no proxy from the environment, no redirect to elsewhere. Nothing packed either:
            # some bytes could become gigabytes.
            self._client = httpx.AsyncClient(
                timeout=TIMEOUT_SECONDS,
                trust_env=False,
                follow_redirects=False,
                headers={"Accept-Encoding": "identity"},
                verify=_context(trusted) if self._spec.url.startswith("https:") else False,
            )
        return self._client


def _context(trusted: bytes | None) -> ssl.SSLContext:
    """Return what trusts these certificates and no others, or the system's; some megabytes of those."""
    if trusted is None:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=trusted.decode("ascii", "ignore"))  # comments may be in any language
    return context


async def _bounded(answer: httpx.Response, url: str) -> bytes:
    packing = answer.headers.get("Content-Encoding", "identity")
    if packing.lower() != "identity":
        raise EngineUnreachableError(f"{url} answers in the encoding {packing!r}, which was not asked for")
    body = bytearray()
    async for part in answer.aiter_raw():
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            raise EngineUnreachableError(f"{url} answers with more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)

"""One request: sent, and what became of it."""

import asyncio
from collections.abc import Callable

import httpx

from kvwatch.bench.answer import MAX_ERROR_BYTES, MAX_MESSAGE_CHARS, Answer, one_line
from kvwatch.bench.connections import (
    CONNECT_SECONDS,
    KEEP_ALIVE_SECONDS,
    Connections,
    request_headers,
    trusted_authorities,
)
from kvwatch.bench.dialect import Dialect
from kvwatch.bench.errors import RequestFailed
from kvwatch.bench.outcome import RequestOutcome
from kvwatch.bench.plan import fingerprint
from kvwatch.bench.scenarios import RequestSpec

MAX_RETRY_SECONDS = 60.0
"""Longest wait that a server can ask for."""


def make_http(api_key: str | None, ca_file: str | None) -> httpx.AsyncClient:
    """Return the HTTP client for all but the load: no proxy, no compression, no redirects.

    Raises:
        ConfigError: `ca_file` holds no certificates, or cannot be read.
    """
    return httpx.AsyncClient(
        headers=request_headers(api_key),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_SECONDS),
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        trust_env=False,
        verify=trusted_authorities(ca_file),
    )


class Client:
    """Sends requests to one target. Event loop only."""

    def __init__(
        self,
        connections: Connections,
        dialect: Dialect,
        request_timeout_seconds: float = 600.0,
        max_retries: int = 0,
    ) -> None:
        """Create a client.

        Args:
            connections: To the target.
            dialect: Writes bodies.
            request_timeout_seconds: Longest time that one attempt may take.
            max_retries: Attempts after the first for 429 and 503, each after the time that the server asks for.
        """
        self._connections = connections
        self._dialect = dialect
        self._timeout_seconds = request_timeout_seconds
        self._max_retries = max_retries
        self.num_in_flight = 0
        self.peak_in_flight = 0
        """Most requests that were under way at once."""

    async def send(self, spec: RequestSpec, intended_seconds: float, now: Callable[[], float]) -> RequestOutcome:
        """Ask, and return what became of it; never raises for what the target does.

        Args:
            spec: What to ask.
            intended_seconds: When it should have been sent.
            now: Seconds since the run began.
        """
        outcome = RequestOutcome(
            index=spec.index, scenario=spec.scenario, fingerprint=fingerprint(spec), temperature=spec.temperature,
            max_tokens=spec.max_tokens, intended_seconds=intended_seconds, sent_seconds=now(),
        )  # fmt: skip
        self.num_in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.num_in_flight)
        try:
            await self._attempts(spec, outcome, now)
        except RequestFailed as error:
            outcome.status, outcome.error_kind, outcome.error = "failed", error.kind, str(error)[:MAX_MESSAGE_CHARS]
        except asyncio.CancelledError:
            outcome.status = "interrupted"  # the run is being ended; what is known of the request is kept
        finally:
            self.num_in_flight -= 1
            outcome.end_seconds = now()
        return outcome

    async def _attempts(self, spec: RequestSpec, outcome: RequestOutcome, now: Callable[[], float]) -> None:
        while True:
            try:
                await self._attempt(spec, outcome, now)
            except RequestFailed as error:
                if error.retry_after_seconds is None or outcome.num_retries >= self._max_retries:
                    raise
                outcome.num_retries += 1
                await asyncio.sleep(min(error.retry_after_seconds, MAX_RETRY_SECONDS))
            else:
                return

    async def _attempt(self, spec: RequestSpec, outcome: RequestOutcome, now: Callable[[], float]) -> None:
        body, path = self._dialect.body(spec), self._dialect.path(spec)
        answer = Answer(spec, outcome, now)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await self._connections.post(path, body, answer)
        except TimeoutError as error:
            raise RequestFailed("timeout", f"no complete answer within {self._timeout_seconds:g} s") from error
        finally:
            answer.keep_texts()
        answer.end()
        self._check_length(spec, outcome)

    def _check_length(self, spec: RequestSpec, outcome: RequestOutcome) -> None:
        if outcome.status != "ok" or not (spec.is_fixed_length and self._dialect.has_fixed_length):
            return
        wanted = spec.max_tokens * spec.n
        if outcome.output_tokens is not None and outcome.output_tokens != wanted:
            raise RequestFailed("wrong_length", f"{outcome.output_tokens} tokens came, {wanted} had been fixed")


async def start_of(response: httpx.Response) -> str:
    """Return the beginning of a body as text on one line, whatever it is."""
    body = b""
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > MAX_ERROR_BYTES:
            break
    return one_line(body)


def failure_of(error: httpx.HTTPError) -> RequestFailed:
    """Return what went wrong below HTTP."""
    words = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError):
        if _is_refused(error):
            return RequestFailed("refused", "the connection was refused")
        return RequestFailed("connection", words)
    if isinstance(error, httpx.TimeoutException):
        return RequestFailed("timeout", words)
    if isinstance(error, httpx.RemoteProtocolError):
        # A body cut short, or no answer at all, is the server's end; anything else is no HTTP.
        is_cut = "incomplete" in words or "closed" in words or "disconnected" in words
        return RequestFailed("truncated" if is_cut else "protocol", words)
    return RequestFailed("connection", words)


def _is_refused(error: BaseException) -> bool:
    """Return whether a refusal is behind an error: the libraries in between do not say so themselves."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ConnectionRefusedError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False

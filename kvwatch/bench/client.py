"""One request: sent, its stream read piece by piece, every piece stamped as it arrives."""

import asyncio
import ssl
from collections.abc import Callable

import httpx
import msgspec

from kvwatch.bench.dialect import Dialect
from kvwatch.bench.errors import RequestFailed
from kvwatch.bench.outcome import RequestOutcome
from kvwatch.bench.plan import fingerprint
from kvwatch.bench.scenarios import RequestSpec
from kvwatch.bench.sse import EventReader

MAX_RETRY_SECONDS = 60.0
"""Longest wait that a server can ask for."""
DEFAULT_RETRY_SECONDS = 1.0
_MAX_ERROR_BYTES = 64 * 1024
_MAX_MESSAGE_CHARS = 300
_RETRIED = frozenset({429, 503})
_CONNECT_SECONDS = 10.0
_KEEP_ALIVE_SECONDS = 2.0
"""Shorter than any server's: a connection must not be closed by the server at the moment in which it is used again."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def piece(self) -> str:
        """Return the text that it adds."""
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning_content or self.delta.reasoning or ""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    id: str | int | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Chunk).decode


def make_http(api_key: str | None, ca_file: str | None) -> httpx.AsyncClient:
    """Return the HTTP client: as many connections as requests, no proxy, no compression, no redirects."""
    headers = {"accept-encoding": "identity", "content-type": "application/json", "user-agent": "kvwatch-bench"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    return httpx.AsyncClient(
        headers=headers,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_ALIVE_SECONDS),
        timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
        trust_env=False,
        verify=ssl.create_default_context(cafile=ca_file),
    )


class Client:
    """Sends requests to one target. Event loop only."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        url: str,
        dialect: Dialect,
        request_timeout_seconds: float = 600.0,
        max_retries: int = 0,
    ) -> None:
        """Create a client.

        Args:
            http: Connections.
            url: Root of the target.
            dialect: Writes bodies.
            request_timeout_seconds: Longest time that one attempt may take.
            max_retries: Attempts after the first for 429 and 503, each after the time that the server asks for.
        """
        self._http = http
        self._url = url
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
            outcome.status, outcome.error_kind, outcome.error = "failed", error.kind, str(error)[:_MAX_MESSAGE_CHARS]
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
        try:
            async with (
                asyncio.timeout(self._timeout_seconds),
                self._http.stream("POST", self._url + path, content=body) as response,
            ):
                await _check_answer(response)
                await _Answer(spec, outcome, now).read(response)
        except TimeoutError as error:
            raise RequestFailed("timeout", f"no complete answer within {self._timeout_seconds:g} s") from error
        except httpx.HTTPError as error:
            raise failure_of(error) from error
        self._check_length(spec, outcome)

    def _check_length(self, spec: RequestSpec, outcome: RequestOutcome) -> None:
        if outcome.status != "ok" or not (spec.is_fixed_length and self._dialect.has_fixed_length):
            return
        wanted = spec.max_tokens * spec.n
        if outcome.output_tokens is not None and outcome.output_tokens != wanted:
            raise RequestFailed("wrong_length", f"{outcome.output_tokens} tokens came, {wanted} had been fixed")


class _Answer:
    """Reads one stream into an outcome."""

    def __init__(self, spec: RequestSpec, outcome: RequestOutcome, now: Callable[[], float]) -> None:
        self._spec = spec
        self._outcome = outcome
        self._now = now
        self._texts: list[list[str]] = [[] for _ in range(spec.n)]
        self._last: list[float | None] = [None] * spec.n
        self._last_of_all = 0.0
        self._is_done = False
        outcome.finish_reasons = [None] * spec.n
        if spec.n == 1:
            outcome.pauses = outcome.gaps  # one list for both: a long run has millions of them

    async def read(self, response: httpx.Response) -> None:
        """Read until the end, or until the client is to hang up."""
        reader = EventReader()
        try:
            if self._spec.hang_up_after == 0:
                self._outcome.status = "hung_up"
                return
            async for piece in response.aiter_raw():
                moment = self._now()
                for data in reader.feed(piece):
                    self._event(data, moment)
                if self._is_enough():
                    self._outcome.status = "hung_up"
                    return
            for data in reader.end():
                self._event(data, self._now())
        finally:
            self._outcome.texts = ["".join(pieces) for pieces in self._texts]
        if not self._is_done and None in self._outcome.finish_reasons:
            raise RequestFailed("truncated", "the stream ended without [DONE] and without a reason")
        self._outcome.status = "ok"

    def _is_enough(self) -> bool:
        limit = self._spec.hang_up_after
        return limit is not None and self._outcome.num_pieces >= limit and not self._is_done

    def _event(self, data: bytes, moment: float) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        chunk = _decoded(data)
        if bytes(chunk.error) not in (b"", b"null"):
            raise RequestFailed("server_error", bytes(chunk.error).decode(errors="replace"))
        if isinstance(chunk.id, str):
            self._outcome.answer_id = chunk.id
        for choice in chunk.choices:
            self._choice(choice, moment)
        if chunk.usage is not None:
            self._usage(chunk.usage)

    def _choice(self, choice: _Choice, moment: float) -> None:
        if not 0 <= choice.index < self._spec.n:
            raise RequestFailed("bad_json", f"choice {choice.index} of {self._spec.n}")
        if choice.finish_reason is not None:
            self._outcome.finish_reasons[choice.index] = choice.finish_reason
        text = choice.piece()
        if not text:
            return
        self._texts[choice.index].append(text)
        self._outcome.num_pieces += 1
        if self._outcome.first_token_seconds is None:
            self._outcome.first_token_seconds = moment
        elif self._spec.n > 1:
            self._outcome.pauses.append(moment - self._last_of_all)
        self._last_of_all = moment
        last = self._last[choice.index]
        if last is not None:
            self._outcome.gaps.append(moment - last)
        self._last[choice.index] = moment

    def _usage(self, usage: _Usage) -> None:
        self._outcome.prompt_tokens = usage.prompt_tokens
        self._outcome.output_tokens = usage.completion_tokens
        details = usage.prompt_tokens_details
        self._outcome.cached_tokens = details.cached_tokens if details else None


def _decoded(data: bytes) -> _Chunk:
    try:
        data.decode()
        return _decode(data)
    except UnicodeDecodeError as error:
        raise RequestFailed("bad_utf8", f"an event is not UTF-8: {data[:80]!r}") from error
    except msgspec.DecodeError as error:
        raise RequestFailed("bad_json", f"{error}: {data[:80]!r}") from error


async def _check_answer(response: httpx.Response) -> None:
    """Refuse an answer that is no stream of events.

    Raises:
        RequestFailed: so; with the server's own words.
    """
    kind = response.headers.get("content-type", "")
    if response.status_code == 200 and kind.startswith("text/event-stream"):
        return
    text = await start_of(response)
    if response.status_code == 200:
        raise RequestFailed("not_a_stream", f"content type {kind or 'unknown'!r}: {text}")
    retry = retry_after(response.headers.get("retry-after")) if response.status_code in _RETRIED else None
    raise RequestFailed(f"http_{response.status_code}", text, retry)


async def start_of(response: httpx.Response) -> str:
    """Return the beginning of a body as text on one line, whatever it is."""
    body = b""
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > _MAX_ERROR_BYTES:
            break
    return " ".join(body.decode(errors="replace").split())[:_MAX_MESSAGE_CHARS]


def retry_after(header: str | None) -> float:
    """Return how many seconds to wait; a date or nonsense counts as the default."""
    return float(header) if header is not None and header.isascii() and header.isdigit() else DEFAULT_RETRY_SECONDS


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

"""One answer: its stream read piece by piece, every piece of text stamped as it arrives."""

from collections.abc import Callable

import msgspec
from msgspec import UNSET, UnsetType

from kvwatch.bench.errors import RequestFailed
from kvwatch.bench.outcome import RequestOutcome
from kvwatch.bench.scenarios import RequestSpec
from kvwatch.bench.sse import EventReader

MAX_MESSAGE_CHARS = 300
MAX_ERROR_BYTES = 64 * 1024
DEFAULT_RETRY_SECONDS = 1.0
_RETRIED = frozenset({429, 503})


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
    error: msgspec.Raw | UnsetType = UNSET


_decode = msgspec.json.Decoder(_Chunk).decode


class Answer:
    """Reads one stream into an outcome."""

    def __init__(self, spec: RequestSpec, outcome: RequestOutcome, now: Callable[[], float]) -> None:
        self._spec = spec
        self._outcome = outcome
        self._now = now
        self._texts: list[list[str]] = [[] for _ in range(spec.n)]
        self._last: list[float | None] = [None] * spec.n
        self._last_of_all = 0.0
        self._is_done = False
        self._events = EventReader()
        self._refusal: Refusal | None = None
        outcome.finish_reasons = [None] * spec.n
        if spec.n == 1:
            outcome.pauses = outcome.gaps  # one list for both: a long run has millions of them

    def head(self, status: int, headers: dict[str, str]) -> bool:
        """See `Reader.head`."""
        kind = headers.get("content-type", "")
        if status == 200 and kind.lower().startswith("text/event-stream"):
            if self._spec.hang_up_after == 0:
                self._outcome.status = "hung_up"
            return self._outcome.status == "hung_up"
        self._refusal = Refusal(status, kind, headers.get("retry-after"))
        return False

    def piece(self, data: bytes) -> bool:
        """See `Reader.piece`."""
        if self._refusal is not None:
            return self._refusal.is_enough(data)
        moment = self._now()
        for event in self._events.feed(data):
            self._event(event, moment)
        if self._is_enough():
            self._outcome.status = "hung_up"
        return self._outcome.status == "hung_up"

    def keep_texts(self) -> None:
        """Put what has come into the outcome."""
        self._outcome.texts = ["".join(pieces) for pieces in self._texts]

    def end(self) -> None:
        """Say that nothing more comes.

        Raises:
            RequestFailed: it was no stream of events, or the stream is incomplete.
        """
        if self._refusal is not None:
            raise self._refusal.as_error()
        if self._outcome.status == "hung_up":
            return
        for event in self._events.end():
            self._event(event, self._now())
        self.keep_texts()
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
        if chunk.error is not UNSET and bytes(chunk.error) not in (b"", b"null"):
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
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestFailed("bad_json", f"{error}: {data[:80]!r}") from error


class Refusal:
    """An answer that is no stream of events: its words."""

    def __init__(self, status: int, kind: str, retry: str | None) -> None:
        self._status = status
        self._kind = kind
        self._retry = retry
        self._body = b""

    def is_enough(self, data: bytes) -> bool:
        """Add a piece; return whether no more is of interest."""
        self._body += data
        return len(self._body) > MAX_ERROR_BYTES

    def as_error(self) -> RequestFailed:
        """Return what it means, with the server's own words."""
        text = one_line(self._body)
        if self._status == 200:
            return RequestFailed("not_a_stream", f"content type {self._kind or 'unknown'!r}: {text}")
        return RequestFailed(
            f"http_{self._status}", text, retry_after(self._retry) if self._status in _RETRIED else None
        )


def one_line(body: bytes) -> str:
    """Return the beginning of a body as text on one line, whatever it is."""
    return " ".join(body.decode(errors="replace").split())[:MAX_MESSAGE_CHARS]


def retry_after(header: str | None) -> float:
    """Return how many seconds to wait; a date or nonsense counts as the default."""
    return float(header) if header is not None and header.isascii() and header.isdigit() else DEFAULT_RETRY_SECONDS

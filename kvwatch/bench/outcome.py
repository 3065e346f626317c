"""What became of one request, as its client saw it. All times are seconds since the run began."""

from typing import Literal

import msgspec

Status = Literal["ok", "hung_up", "failed", "interrupted"]

ERROR_KINDS = {
    "refused": "the connection was refused",
    "connection": "the connection could not be made or was lost",
    "timeout": "no complete answer within --request-timeout",
    "truncated": "the stream ended before the answer did",
    "protocol": "what came is no HTTP",
    "not_a_stream": "status 200, but no stream of events",
    "bad_json": "an event is no JSON of OpenAI's shape",
    "bad_utf8": "an event is not UTF-8",
    "too_long": "an event is longer than the client takes",
    "server_error": "an error event in mid-stream",
    "wrong_length": "the answer ended before the number of tokens that had been fixed",
}
"""Kinds of errors beside `http_` and a status."""


class RequestOutcome(msgspec.Struct, kw_only=True):
    """One request's times, texts and end."""

    index: int
    scenario: str
    fingerprint: str
    """Hash of what was asked; equal in two runs that asked the same."""
    temperature: float
    max_tokens: int = 0
    """Longest answer that was asked for, in tokens, of each choice."""
    intended_seconds: float
    """When it should have been sent. In an open loop latencies count from here, whatever held the client up."""
    sent_seconds: float = 0.0
    """When its first attempt began; the same as intended in a closed loop."""
    first_token_seconds: float | None = None
    """When the first piece of text arrived; None if none did."""
    end_seconds: float = 0.0
    gaps: list[float] = []
    """Seconds between successive pieces of text, of each choice apart."""
    pauses: list[float] = []
    """Seconds between successive pieces of text, whatever their choice; the same as `gaps` for n = 1."""
    num_pieces: int = 0
    """Pieces of text, usually tokens, over all choices."""
    prompt_tokens: int | None = None
    """What the server counted; None if it did not say."""
    output_tokens: int | None = None
    cached_tokens: int | None = None
    texts: list[str] = []
    """Text of each choice, by its number."""
    finish_reasons: list[str | None] = []
    status: Status = "failed"
    error_kind: str = ""
    error: str = ""
    num_retries: int = 0
    answer_id: str = ""
    """What the server calls its answer; a kvwatch calls the request so in its events and traces."""

    @property
    def ttft_seconds(self) -> float | None:
        """Time to first token, from the intended start."""
        return None if self.first_token_seconds is None else self.first_token_seconds - self.intended_seconds

    @property
    def e2e_seconds(self) -> float:
        """Time to the end, from the intended start."""
        return self.end_seconds - self.intended_seconds

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens; pieces of text where the server does not count (after a hang-up, for instance)."""
        return self.num_pieces if self.output_tokens is None else self.output_tokens

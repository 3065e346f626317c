"""Log-probabilities in the two forms of the API."""

from collections.abc import Callable, Sequence

from kvwatch_engine.contracts.request import TokenLogprob
from kvwatch_engine.server.choice import TokenRecord
from kvwatch_engine.server.protocol.chat import ChatLogprobs, TokenLogprobs, TopLogprob
from kvwatch_engine.server.protocol.completions import CompletionLogprobs

BytesOf = Callable[[int], bytes]
"""Token id -> the UTF-8 bytes that it stands for."""

LOWEST = -9999.0
"""Given for a token that is impossible: JSON has no infinity."""


def chat_logprobs(records: Sequence[TokenRecord], bytes_of: BytesOf) -> ChatLogprobs:
    """Return log-probabilities as chat completions give them."""
    content = []
    for record in records:
        chosen = _top(record.position.chosen, bytes_of)
        likely = [_top(entry, bytes_of) for entry in record.position.top]
        content.append(TokenLogprobs(chosen.token, chosen.logprob, chosen.bytes, likely))
    return ChatLogprobs(content)


def completion_logprobs(
    records: Sequence[TokenRecord], bytes_of: BytesOf, *, has_top: bool, first_offset: int = 0
) -> CompletionLogprobs:
    """Return log-probabilities as completions give them.

    Args:
        records: one for each token.
        bytes_of: gives a token's bytes.
        has_top: whether alternatives were asked for.
        first_offset: characters that stand before the generated text.
    """
    return CompletionLogprobs(
        tokens=[name_of(record.position.chosen, bytes_of) for record in records],
        token_logprobs=[finite(record.position.chosen.logprob) for record in records],
        top_logprobs=[_alternatives(record, bytes_of) for record in records] if has_top else None,
        text_offset=[first_offset + record.text_offset for record in records],
    )


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Return the log-probabilities of two parts of a text."""
    has_top = first.top_logprobs is not None and second.top_logprobs is not None
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        [*(first.top_logprobs or ()), *(second.top_logprobs or ())] if has_top else None,
        first.text_offset + second.text_offset,
    )


def _alternatives(record: TokenRecord, bytes_of: BytesOf) -> dict[str, float]:
    """Return the likely tokens and the chosen one: one entry more when it is not among them."""
    found: dict[str, float] = {}
    for entry in (*record.position.top, record.position.chosen):
        found.setdefault(name_of(entry, bytes_of), finite(entry.logprob))
    return found


def _top(entry: TokenLogprob, bytes_of: BytesOf) -> TopLogprob:
    raw = bytes_of(entry.token_id)
    return TopLogprob(text_of(raw), finite(entry.logprob), list(raw))


def name_of(entry: TokenLogprob, bytes_of: BytesOf) -> str:
    """Return how completions name a token."""
    return text_of(bytes_of(entry.token_id), "bytes:")


def text_of(raw: bytes, mark: str = "") -> str:
    """Return a token's text; of part of a character its bytes in hexadecimal, so that different parts stay apart."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float) -> float:
    """Return a log-probability for JSON, which knows neither infinity nor what is no number."""
    return logprob if logprob > LOWEST else LOWEST

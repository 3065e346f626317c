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


def completion_logprobs(records: Sequence[TokenRecord], bytes_of: BytesOf, *, has_top: bool) -> CompletionLogprobs:
    """Return log-probabilities as completions give them.

    Args:
        records: one for each token.
        bytes_of: gives a token's bytes.
        has_top: whether alternatives were asked for.
    """
    return CompletionLogprobs(
        tokens=[_name(record.position.chosen, bytes_of) for record in records],
        token_logprobs=[_finite(record.position.chosen) for record in records],
        top_logprobs=[_alternatives(record, bytes_of) for record in records] if has_top else None,
        text_offset=[record.text_offset for record in records],
    )


def _alternatives(record: TokenRecord, bytes_of: BytesOf) -> dict[str, float]:
    """Return the likely tokens and the chosen one: one entry more when it is not among them."""
    found: dict[str, float] = {}
    for entry in (*record.position.top, record.position.chosen):
        found.setdefault(_name(entry, bytes_of), _finite(entry))
    return found


def _top(entry: TokenLogprob, bytes_of: BytesOf) -> TopLogprob:
    raw = bytes_of(entry.token_id)
    return TopLogprob(_text(raw), _finite(entry), list(raw))


def _name(entry: TokenLogprob, bytes_of: BytesOf) -> str:
    return _text(bytes_of(entry.token_id), "bytes:")


def _text(raw: bytes, mark: str = "") -> str:
    """Return a token's text; of part of a character its bytes in hexadecimal, so that different parts stay apart."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(entry: TokenLogprob) -> float:
    return max(entry.logprob, LOWEST)

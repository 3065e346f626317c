"""Remembers which grammars cannot be compiled, by their digests: whoever sends one again costs nothing."""

import hashlib
from collections import OrderedDict

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.guidance.grammar import INVALID_GRAMMAR, Grammar


class Refusals:
    """The last refusals. Event loop only."""

    def __init__(self, max_refusals: int) -> None:
        """Remember none yet, and at most so many at once."""
        self._max = max_refusals
        self._messages: OrderedDict[bytes, str] = OrderedDict()

    def check(self, grammar: Grammar) -> None:
        """Refuse a grammar that was refused before.

        Raises:
            RequestInvalid: as it was then.
        """
        message = self._messages.get(_digest(grammar))
        if message is not None:
            self._messages.move_to_end(_digest(grammar))
            raise RequestInvalid(message, param=grammar.param, code=INVALID_GRAMMAR)

    def note(self, grammar: Grammar, error: RequestInvalid) -> None:
        """Remember a refusal that the grammar itself is the reason of; others are forgotten."""
        if error.code != INVALID_GRAMMAR:
            return
        self._messages[_digest(grammar)] = str(error)
        if len(self._messages) > self._max:
            self._messages.popitem(last=False)


def _digest(grammar: Grammar) -> bytes:
    """Return what names a grammar and the field that it came from, which its refusal names as well."""
    text = "\0".join((grammar.kind, grammar.param, grammar.text))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()

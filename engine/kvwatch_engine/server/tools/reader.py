"""From a text that arrives in pieces to what is content and what belongs to calls.

What may still become the beginning of a call is held back. What began as one and turns out to be none is content after
all, as it was written, unless some of it was given out already.
"""

from dataclasses import dataclass
from typing import Final

from kvwatch_engine.server.tools.calls import BLANK, JsonCall, JsonScan
from kvwatch_engine.server.tools.families import Family

_MAX_NAME_CHARS: Final = 64


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What was added to a call."""

    index: int
    """Its place among the calls of the answer."""
    arguments: str
    id: str | None = None
    """With its name, in the first of a call's deltas."""
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """What became certain."""

    parts: tuple[str | CallDelta, ...] = ()
    """Content and what was added to calls, in the order in which the model wrote it."""

    @property
    def content(self) -> str:
        """All content."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> tuple[CallDelta, ...]:
        """All that was added to calls."""
        return tuple(part for part in self.parts if isinstance(part, CallDelta))


class ToolReader:
    """Reads one text. The pieces of all its answers joined do not depend on how the text was cut."""

    def __init__(self, family: Family, names: frozenset[str], max_calls: int | None = None) -> None:
        """Begin with a text.

        Args:
            family: how calls are written in it.
            names: functions that may be called; a call of another is content.
            max_calls: calls after so many are left out.
        """
        self._family = family
        self._names = names
        self._max_calls = max_calls
        self._held = ""
        """Not looked at yet, or not certain."""
        self._call: JsonCall | None = None
        self._opening = ""
        """What stood before the present call, blanks and marker, should it be none."""
        self._is_named = False
        self._in_calls = False
        """After a marker that begins calls, where the next call needs none."""
        self._parts: list[str | CallDelta] = []
        self._num_chars = 0
        self.num_calls = 0

    def push(self, text: str) -> Read:
        """Take a piece of text."""
        self._held += text
        while self._step():
            pass
        return self._certain()

    def flush(self) -> Read:
        """Return what is left; the text has ended."""
        if self._call is not None:
            self._abandon(self._call)
        rest = self._held.strip(BLANK)
        is_end_of_calls = self._in_calls and (not rest or any(end.startswith(rest) for end in self._family.ends))
        if not is_end_of_calls:
            self._say(self._held)
        self._held = ""
        return self._certain()

    # ------------------------------------------------------------------ parts

    def _certain(self) -> Read:
        read = Read(tuple(self._parts))
        self._parts = []
        return read

    def _step(self) -> bool:
        """Look at what is held; return whether there is more to look at."""
        if self._call is not None:
            return self._go_on(self._call)
        if self._in_calls:
            return self._between()
        return self._outside()

    def _outside(self) -> bool:
        """Find where calls begin; what stands before is content."""
        family = self._family
        if family.is_bare and self._num_chars == 0:
            rest = self._held.lstrip(BLANK)
            if not rest:
                return False
            if rest.startswith("{"):
                self._open(self._held[: len(self._held) - len(rest)], rest)
                return True
        place = self._held.find(family.begin)
        if place < 0:
            keep = _overlap(self._held, family.begin)
            self._say(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
            return False
        self._say(self._held[:place])
        self._held = self._held[place:]
        rest = self._held[len(family.begin) :].lstrip(BLANK + family.opening)
        if not rest:
            return False
        if not rest.startswith("{"):
            return self._named_outside(rest)
        self._open(self._held[: len(self._held) - len(rest)], rest)
        return True

    def _named_outside(self, rest: str) -> bool:
        """Read what follows the marker and is no object: a name and then its arguments, or no call at all."""
        name, brace, _ = rest.partition("{")
        name = name.removesuffix(self._family.before_arguments).strip(BLANK)
        if not brace and len(name) <= _MAX_NAME_CHARS + len(self._family.before_arguments):
            if self._family.names_first:
                return False
        elif self._family.names_first and name in self._names:
            arguments = rest[rest.index("{") :]
            scan = JsonScan()
            for place, character in enumerate(arguments):
                if scan.take(character) and scan.depth == 0:
                    self._open(self._held[: len(self._held) - len(rest)], _as_object(name, arguments[: place + 1]))
                    self._held += arguments[place + 1 :]
                    return True
            return False
        self._say(self._family.begin)
        self._held = self._held[len(self._family.begin) :]
        return True

    def _between(self) -> bool:
        """After a call: another one, the end of the calls, or content again."""
        rest = self._held.lstrip(BLANK + self._family.between)
        if not rest:
            return False
        if rest.startswith("{") and (self._family.is_bare or self._family.opening):
            self._open("", rest)
            return True
        for end in self._family.ends:
            if rest.startswith(end):
                self._held = rest[len(end) :]
                return True
            if end.startswith(rest):
                return False
        if rest.startswith(self._family.begin):
            self._in_calls = False
            self._held = rest
            return True
        if self._family.begin.startswith(rest):
            return False
        self._in_calls = False
        return True

    def _open(self, opening: str, rest: str) -> None:
        self._opening, self._held = opening, rest
        self._call, self._is_named = JsonCall(), False

    def _go_on(self, call: JsonCall) -> bool:
        taken = call.push(self._held)
        self._held = self._held[taken:]
        if call.name is not None and not self._is_named:
            if call.name not in self._names:
                self._abandon(call)
                return bool(self._held)
            self._is_named = not call.is_broken
        if self._is_named:
            self._give(call)
        if not call.is_complete:
            return False
        if not self._is_named:
            self._abandon(call)
            return bool(self._held)
        self._call, self._in_calls = None, True
        self.num_calls += 1
        return bool(self._held)

    def _give(self, call: JsonCall) -> None:
        is_first, arguments = not call.has_given, call.next_arguments()
        if not arguments or (self._max_calls is not None and self.num_calls >= self._max_calls):
            return
        if is_first:
            self._parts.append(CallDelta(self.num_calls, arguments, self._family.new_id(), call.name))
        else:
            self._parts.append(CallDelta(self.num_calls, arguments))

    def _abandon(self, call: JsonCall) -> None:
        """Let what began as a call be content, unless some of it was given out."""
        self._call = None
        if call.has_given:
            self.num_calls += 1
            return
        self._say(self._opening + call.raw)

    def _say(self, text: str) -> None:
        self._num_chars += len(text)
        if text:
            self._parts.append(text)


def _overlap(text: str, marker: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a marker."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


def _as_object(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'

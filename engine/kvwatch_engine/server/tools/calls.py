"""One call written as a JSON object, `{"name": ..., "arguments": {...}}`, read as it arrives.

The arguments are given out while they are written, as soon as the name is known; what they are is not looked into, but
for where they end. Constant work for each character.
"""

from typing import Final

import msgspec

ARGUMENT_KEYS: Final = ("arguments", "parameters")
BLANK: Final = " \t\r\n"


class JsonScan:
    """Follows JSON: how deep it is nested, and whether a text is open."""

    __slots__ = ("_is_escaped", "depth", "in_string")

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self._is_escaped = False

    def take(self, character: str) -> bool:
        """Take a character; return whether it stands outside of all texts, their quotes included."""
        if self.in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self.in_string = False
            return False
        if character == '"':
            self.in_string = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1
        return not self.in_string


class JsonCall:
    """Reads one object, from its brace on. After its end nothing more is taken."""

    __slots__ = ("_arguments", "_chars", "_key", "_num_given", "_scan", "_value", "is_broken", "is_complete", "name")

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_complete = False
        self.is_broken = False
        """It is complete and no call: it has no name, or is no JSON."""
        self._chars: list[str] = []
        self._scan = JsonScan()
        self._key: str | None = None
        self._value: list[str] = []
        """The present key or value of the object, without blanks before it."""
        self._arguments: str | None = None
        self._num_given = 0

    @property
    def raw(self) -> str:
        """All that was taken."""
        return "".join(self._chars)

    @property
    def has_given(self) -> bool:
        """Whether some of the arguments were given out."""
        return self._num_given > 0

    def push(self, text: str) -> int:
        """Take characters until the object ends; return how many."""
        for place, character in enumerate(text):
            if self.is_complete:
                return place
            self._take(character)
        return len(text)

    def next_arguments(self) -> str:
        """Return what of the arguments may be given out and was not."""
        if self.name is None or self.is_broken:
            return ""
        if self._arguments is None:
            if self.is_complete:
                self._arguments = "{}"
            elif self._key in ARGUMENT_KEYS and self._value[:1] == ["{"]:
                # A blank at the end belongs to them only if more comes.
                new = "".join(self._value[self._num_given :]).rstrip(BLANK)
                self._num_given += len(new)
                return new
            else:
                return ""
        new = self._arguments[self._num_given :]
        self._num_given = len(self._arguments)
        return new

    def _take(self, character: str) -> None:
        self._chars.append(character)
        is_outside = self._scan.take(character)
        if len(self._chars) == 1:
            return  # the brace
        if is_outside and self._scan.depth == 0:
            self._end_value()
            self.is_complete = True
            self.is_broken = self.name is None or not _is_object(self.raw)
        elif is_outside and self._scan.depth == 1 and character == ":" and self._key is None:
            self._key, self._value = _text("".join(self._value)) or "", []
        elif is_outside and self._scan.depth == 1 and character == ",":
            self._end_value()
        elif self._value or character not in BLANK:
            self._value.append(character)

    def _end_value(self) -> None:
        value = "".join(self._value).rstrip(BLANK)
        if self._key == "name" and self.name is None:
            self.name = _text(value)
        elif self._key in ARGUMENT_KEYS and self._arguments is None:
            # Some models write them as a text that is JSON.
            self._arguments = "{}" if value == "null" else value if value[:1] != '"' else _text(value) or "{}"
        self._key, self._value = None, []


def _text(json: str) -> str | None:
    """Return the text that a JSON string stands for; none if it is no string."""
    try:
        value = msgspec.json.decode(json)
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, str) else None


def _is_object(json: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(json), dict)
    except (msgspec.DecodeError, RecursionError):
        return False

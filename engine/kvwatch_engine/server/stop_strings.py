"""Stop strings, found in text that arrives in pieces.

The text ends before the stop string that is complete first; of several complete at the same character, before the
longest. That depends on the text alone, not on how it was split into tokens. Text that may still become a stop
string is held back, so that nothing of it is ever sent.

Each stop string is matched with the Knuth-Morris-Pratt automaton: constant work for each character, and its state is
exactly the number of characters to hold back.
"""

from collections.abc import Sequence


class StopStrings:
    """The stop strings of a request, prepared for matching. Immutable; shared by its choices."""

    __slots__ = ("patterns",)

    def __init__(self, strings: Sequence[str]) -> None:
        self.patterns = tuple((string, _borders(string)) for string in dict.fromkeys(strings))
        """Each string with its border table: `borders[k]` is the longest proper border of its first k characters."""


class StopMatcher:
    """Cuts one text at its first stop string."""

    __slots__ = ("_held", "_patterns", "_states", "is_stopped")

    def __init__(self, stops: StopStrings) -> None:
        self._patterns = stops.patterns
        self._states = [0] * len(stops.patterns)
        self._held = ""
        self.is_stopped = False
        """A stop string was found: the text is complete."""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Add text and return what is certain to belong to the output.

        Args:
            text: the next piece.
            may_stop: whether a stop string that becomes complete in this piece counts.
        """
        if not self._patterns or not text:
            return "" if self.is_stopped else text
        pending = self._held + text
        for place in range(len(self._held), len(pending)):
            length = self._advance(pending[place])
            if length and may_stop:
                self.is_stopped = True
                self._held = ""
                return pending[: place + 1 - length]
        keep = len(pending) - max(self._states)
        self._held = pending[keep:]
        return pending[:keep]

    def flush(self) -> str:
        """Return what was held back: the text has ended, it cannot become a stop string any more."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Advance every automaton by one character; return the length of the longest stop string now complete."""
        found = 0
        for number, (string, borders) in enumerate(self._patterns):
            state = self._states[number]
            while state and string[state] != character:
                state = borders[state]
            if string[state] == character:
                state += 1
            if state == len(string):
                found = max(found, state)
                state = borders[state]
            self._states[number] = state
        return found


def _borders(string: str) -> tuple[int, ...]:
    borders = [0, 0]
    state = 0
    for character in string[1:]:
        while state and string[state] != character:
            state = borders[state]
        if string[state] == character:
            state += 1
        borders.append(state)
    return tuple(borders)

"""How long a step takes, as fitted to the steps that this engine has done.

A step takes a base time, in which the weights are read, and a time for each token. What may be in a step so that it
ends in time follows from that; how long it may take says `step_bound.py`.
"""

from typing import Final

_MEMORY: Final = 0.97
"""Weight of what was measured before, against 1 for the newest step: some thirty of them count, of each kind."""
_LEAST_SPREAD: Final = 0.05
"""Standard deviation of the numbers of tokens, as part of their mean, below which two times cannot be told apart."""
_OUTLIER: Final = 3.0
"""A step counts as at most so many times its expected time: the machine may have been busy elsewhere."""
LEAST_PREFILL_TOKENS: Final = 16
"""Tokens of prefill that always fit: nobody waits for ever."""
FIRST_PREFILL_TOKENS: Final = 256
"""Tokens of prefill that fit while no step was done, and how long one takes is unknown."""
MOST_SLOWDOWN: Final = 2.0
"""Where decoding alone takes most of the time, a step with prefill may take so many times as long."""
_MANY: Final = 2**31
"""More tokens than a step ever has: what an endless time is enough for."""


class PrefillPace:
    """Fits the time of a step, and says how large one may be. Engine thread only."""

    def __init__(self) -> None:
        self._decoding, self._prefill = _Moments(), _Moments()
        """Of steps that only decode, and of the others: a thousand of one kind leave what is known of the other."""

    def note_step(self, num_tokens: int, seconds: float, *, has_prefill: bool) -> None:
        """Note a step that was done: its tokens, and the model's time for it."""
        if num_tokens < 1 or seconds <= 0:
            return
        kind = self._prefill if has_prefill else self._decoding
        if kind.weight > 1:
            seconds = min(seconds, _OUTLIER * self.expected_seconds(num_tokens))
        kind.add(num_tokens, seconds)

    def expected_seconds(self, num_tokens: int) -> float:
        """Return the expected time of a step; 0 before the first one."""
        base, each = self._fit()
        return base + each * num_tokens

    def most_prefill_tokens(self, num_decoding: int, longest_seconds: float) -> int:
        """Return how many tokens of prefill fit into a step, at least `LEAST_PREFILL_TOKENS`.

        Args:
            num_decoding: tokens of sequences that decode in this step.
            longest_seconds: time that it may take.
        """
        base, each = self._fit()
        if each <= 0:
            return FIRST_PREFILL_TOKENS
        decoding = base + each * num_decoding
        seconds = max(longest_seconds, MOST_SLOWDOWN * decoding) if num_decoding else longest_seconds
        return max(int(min((seconds - decoding) / each, _MANY)), LEAST_PREFILL_TOKENS)

    def _fit(self) -> tuple[float, float]:
        """Return seconds of a step without tokens, and of each token: weighted least squares, neither negative."""
        decoding, prefill = self._decoding, self._prefill
        weight = decoding.weight + prefill.weight
        if not weight:
            return 0.0, 0.0
        mean = (decoding.tokens + prefill.tokens) / weight
        mean_seconds = (decoding.seconds + prefill.seconds) / weight
        variance = (decoding.squares + prefill.squares) / weight - mean * mean
        if variance > (_LEAST_SPREAD * mean) ** 2:
            each = ((decoding.products + prefill.products) / weight - mean * mean_seconds) / variance
            base = mean_seconds - each * mean
            if each > 0 and base >= 0:
                return base, each
        return 0.0, mean_seconds / mean


class _Moments:
    """Sums over the newest steps of one kind."""

    __slots__ = ("products", "seconds", "squares", "tokens", "weight")

    def __init__(self) -> None:
        self.weight = self.tokens = self.seconds = self.squares = self.products = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        self.weight = self.weight * _MEMORY + 1
        self.tokens = self.tokens * _MEMORY + num_tokens
        self.seconds = self.seconds * _MEMORY + seconds
        self.squares = self.squares * _MEMORY + num_tokens * num_tokens
        self.products = self.products * _MEMORY + num_tokens * seconds

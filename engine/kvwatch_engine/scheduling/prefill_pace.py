"""How many tokens fit into a step beside sequences that decode, if these are to get their next tokens in time.

A step takes a base time, in which the weights are read, and a time for each token: both are fitted to the steps that
this engine has done. Prefill chunks are cut so that a step ends in time. Throughput loses little, since those who
decode go along in every step; without the bound all of them wait for each chunk of somebody else's prompt.
"""

from typing import Final

_MEMORY: Final = 0.97
"""Weight of what was measured before, against 1 for the newest step: some thirty of them count."""
_LEAST_SPREAD: Final = 0.05
"""Standard deviation of the numbers of tokens, as part of their mean, below which two times cannot be told apart."""
_OUTLIER: Final = 3.0
"""A step counts as at most so many times its expected time: the machine may have been busy elsewhere."""
LEAST_PREFILL_TOKENS: Final = 16
"""Tokens of prefill that always fit: nobody waits for ever."""
MOST_SLOWDOWN: Final = 2.0
"""Where decoding alone takes most of the time, a step with prefill may take so many times as long."""
_MANY: Final = 2**31
"""More tokens than a step ever has: what an endless time is enough for."""


class PrefillPace:
    """Fits the time of a step, and says how large one may be. Engine thread only."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._squares = 0.0
        self._products = 0.0

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Note a step that was done: its tokens, and the model's time for it."""
        if num_tokens < 1 or seconds <= 0:
            return
        if self._weight > 1:
            seconds = min(seconds, _OUTLIER * self.expected_seconds(num_tokens))
        self._weight = self._weight * _MEMORY + 1
        self._tokens = self._tokens * _MEMORY + num_tokens
        self._seconds = self._seconds * _MEMORY + seconds
        self._squares = self._squares * _MEMORY + num_tokens * num_tokens
        self._products = self._products * _MEMORY + num_tokens * seconds

    def expected_seconds(self, num_tokens: int) -> float:
        """Return the expected time of a step; 0 before the first one."""
        base, each = self._fit()
        return base + each * num_tokens

    def most_tokens(self, num_decoding: int, target_seconds: float) -> int | None:
        """Return how many tokens a step may have, those of decoding sequences among them; None while that is unknown.

        Args:
            num_decoding: tokens of sequences that decode in this step.
            target_seconds: time within which these should get their next tokens.
        """
        base, each = self._fit()
        if each <= 0:
            return None
        seconds = max(target_seconds, MOST_SLOWDOWN * (base + each * num_decoding))
        return max(int(min((seconds - base) / each, _MANY)), num_decoding + LEAST_PREFILL_TOKENS)

    def _fit(self) -> tuple[float, float]:
        """Return seconds of a step without tokens, and of each token: weighted least squares, neither negative."""
        if not self._weight:
            return 0.0, 0.0
        mean, mean_seconds = self._tokens / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - mean * mean
        if variance > (_LEAST_SPREAD * mean) ** 2:
            each = (self._products / self._weight - mean * mean_seconds) / variance
            base = mean_seconds - each * mean
            if each > 0 and base >= 0:
                return base, each
        return 0.0, mean_seconds / mean

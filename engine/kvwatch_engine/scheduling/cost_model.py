"""What a preemption costs: time to compute tokens again, fitted to the steps that this engine has done."""

_MEMORY = 0.9
"""Weight of what was measured before, against 1 for the newest measurement: some ten of them count."""


class CostModel:
    """Measured cost of recomputation. Engine thread only.

    Only steps whose tokens are mostly prefill are looked at: a step that decodes takes as long for one token as for
    many, and recomputation is prefill.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._lost = 0.0
        self._computed_again = 0.0

    def note_step(self, num_tokens: int, num_prefill_tokens: int, duration_ns: int) -> None:
        """Note a step that was done: its tokens, those of prefill chunks among them, and the model's time for it."""
        if 2 * num_prefill_tokens >= num_tokens and duration_ns > 0:
            self._tokens = self._tokens * _MEMORY + num_tokens
            self._seconds = self._seconds * _MEMORY + duration_ns * 1e-9

    def note_resumed(self, num_lost: int, num_computed_again: int) -> None:
        """Note how many of a recomputed request's lost tokens were not found in the prefix cache again."""
        self._lost = self._lost * _MEMORY + num_lost
        self._computed_again = self._computed_again * _MEMORY + num_computed_again

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Measured speed; None before the first prefill."""
        return self._tokens / self._seconds if self._seconds else None

    @property
    def share_computed_again(self) -> float:
        """Share of lost tokens that are computed again, as seen; all of them before any request resumed."""
        return self._computed_again / self._lost if self._lost else 1.0

    def recompute_seconds(self, num_tokens: int) -> float | None:
        """Return the expected time to get so many tokens back that are lost now; None before the first prefill."""
        speed = self.prefill_tokens_per_second
        return None if speed is None else num_tokens * self.share_computed_again / speed

"""What keeps a sequence within a grammar. Knows neither the library behind it nor the API."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]


class SequenceGuide(Protocol):
    """Follows one sequence through its grammar. Engine thread only.

    It depends on the sequence's tokens alone, so that a step may be composed twice, and a preempted sequence goes on.
    """

    @property
    def error(self) -> str:
        """Why the sequence cannot go on; empty while it can."""
        ...

    def prepare(self, output_token_ids: Sequence[int], num_tokens: int) -> None:
        """Begin to find out what may follow the first `num_tokens` generated tokens. Returns at once."""
        ...

    def allowed(self) -> BoolArray:
        """Return which tokens may follow what `prepare` was told: bool[vocab_size], end tokens included.

        Raises:
            GuideFailed: the grammar takes more work or time at this token than it may.
        """
        ...


class Guide(Protocol):
    """A compiled grammar."""

    def start(self) -> SequenceGuide:
        """Return a guide for one sequence that has no tokens yet. Any thread; takes microseconds."""
        ...

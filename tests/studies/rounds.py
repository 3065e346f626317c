"""How often a measurement is repeated: in rounds, each of which goes through all variants, until the time is up."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

V = TypeVar("V")


@dataclass(frozen=True)
class Limits:
    """What somebody allows a part of a study."""

    num_rounds: int | None = None
    """Most rounds; none for the part's own number."""
    seconds: float = 200.0
    """No further round begins that would not end within this time, if it takes as long as the longest so far."""

    def rounds(self, most: int) -> Iterator[int]:
        """Yield the rounds' numbers: at least one, at most `most` unless another number is asked for."""
        begin = before = time.monotonic()
        longest = 0.0
        for number in range(self.num_rounds or most):
            if number:
                now = time.monotonic()
                longest, before = max(longest, now - before), now
                if now - begin + longest > self.seconds:
                    return
            yield number


def rotated(variants: Sequence[V], number: int) -> list[V]:
    """Return the variants in the order of round `number`: each round begins with another one."""
    first = number % len(variants)
    return [*variants[first:], *variants[:first]]

"""When requests are sent, if not as soon as a client is free."""

import random
from collections.abc import Sequence

import msgspec

from kvwatch.bench.scenarios import RequestSpec


def poisson(specs: Sequence[RequestSpec], rate: float, seed: int) -> list[RequestSpec]:
    """Return the requests with times of a Poisson process of `rate` requests/s; the first is due at once."""
    rng = random.Random(f"{seed}/arrivals")  # noqa: S311 - a load, not a secret
    due, dated = 0.0, []
    for spec in specs:
        dated.append(msgspec.structs.replace(spec, due_seconds=due))
        due += rng.expovariate(rate)
    return dated

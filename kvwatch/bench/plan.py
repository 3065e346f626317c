"""What is going to be asked: decided by the seed and the target's limits before the first request is sent."""

import hashlib
import random
from collections.abc import Mapping, Sequence

import msgspec

from kvwatch.bench.scenarios import SCENARIOS, Draw, RequestSpec, Scale


def plan_requests(weights: Mapping[str, float], num_requests: int, seed: int, draw_from: Scale) -> list[RequestSpec]:
    """Return the requests of a run, in their order. Equal arguments give equal requests.

    Args:
        weights: Scenario name -> weight; each scenario gets its share exactly, up to rounding.
        num_requests: Requests in all.
        seed: Decides order, lengths and texts. A request depends on its own number only, not on those before it.
        draw_from: Limits of the target that lengths are scaled to.
    """
    order = _shares(weights, num_requests)
    random.Random(f"{seed}/order").shuffle(order)  # noqa: S311 - a load, not a secret
    return [
        msgspec.structs.replace(SCENARIOS[name].make(Draw(name, seed, index, draw_from)), index=index)
        for index, name in enumerate(order)
    ]


def fingerprint(spec: RequestSpec) -> str:
    """Return a hash of what a request asks, its number and time left out."""
    same = msgspec.structs.replace(spec, index=0, due_seconds=None)
    return hashlib.sha256(msgspec.json.encode(same)).hexdigest()[:16]


def _shares(weights: Mapping[str, float], num_requests: int) -> list[str]:
    """Return each name as often as its weight says: by largest remainder, so that the counts add up."""
    total = sum(weights.values())
    exact = {name: num_requests * weight / total for name, weight in weights.items()}
    counts = {name: int(share) for name, share in exact.items()}
    by_remainder: Sequence[str] = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in by_remainder[: num_requests - sum(counts.values())]:
        counts[name] += 1
    return [name for name, count in counts.items() for _ in range(count)]

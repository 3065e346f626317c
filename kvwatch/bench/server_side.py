"""What the target's own metrics say of the run."""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from kvwatch.bench.signals import Reading


class ServerSide(msgspec.Struct, frozen=True, kw_only=True):
    """Pressure on the KV cache. None: this server does not tell."""

    preemptions: float | None
    """vLLM, kvwatch: requests that lost their blocks. SGLang: retracted requests."""
    num_recomputed_tokens: float | None
    """SGLang: tokens of retracted requests, an upper bound."""
    hit_ratio: float | None
    """Prompt tokens found in the prefix cache, divided by those looked up."""
    waste_ratio: float | None
    """Slots of used blocks without a token, divided by all slots of used blocks: mean over the readings."""
    waste_ratio_max: float | None
    min_free_blocks: float | None
    """Cached blocks count as free. SGLang: pages."""
    is_min_free_exact: bool
    """True when the server itself kept the minimum over every step; False when it is the least of the readings."""
    used_blocks_after: float | None
    """Used blocks after the last request had ended; above 0 means a leak, or other clients."""
    max_running: float | None
    max_waiting: float | None
    num_readings: int
    num_failed_readings: int


def server_side(
    before: Reading | None, during: Sequence[Reading], after: Reading | None, num_failures: int
) -> ServerSide | None:
    """Return what changed between two readings, and the extremes of those between.

    Args:
        before: Taken just before the run; None where there are no metrics.
        during: Taken while it lasted.
        after: Taken when everything had ended and the server's page had been renewed.
        num_failures: Readings that did not come.
    """
    if before is None and after is None and not during:
        return None
    looks = list(during)
    lowest, is_exact = _lowest_free(before, looks, after)
    wastes = [waste for look in looks if (waste := _waste([look])) is not None]
    return ServerSide(
        preemptions=_gained(before, after, lambda reading: reading.num_preemptions),
        num_recomputed_tokens=_gained(before, after, lambda reading: reading.recomputed_tokens),
        hit_ratio=_hit_ratio(before, after),
        waste_ratio=_waste(looks),
        waste_ratio_max=max(wastes, default=None),
        min_free_blocks=lowest,
        is_min_free_exact=is_exact,
        used_blocks_after=after.used_blocks if after else None,
        max_running=_most(look.num_running for look in looks),
        max_waiting=_most(look.num_waiting for look in looks),
        num_readings=len(looks),
        num_failed_readings=num_failures,
    )


def _gained(before: Reading | None, after: Reading | None, of: Callable[[Reading], float | None]) -> float | None:
    """Return by how much a counter rose; None if it is not known or fell (the server was started anew)."""
    if before is None or after is None:
        return None
    first, last = of(before), of(after)
    if last is None:
        return None
    rise = last - (first or 0.0)  # a counter without series has not counted yet
    return rise if rise >= 0 else None


def _hit_ratio(before: Reading | None, after: Reading | None) -> float | None:
    queried = _gained(before, after, lambda reading: reading.queried_tokens)
    hit = _gained(before, after, lambda reading: reading.hit_tokens)
    return hit / queried if queried and hit is not None else None


def _waste(looks: Sequence[Reading]) -> float | None:
    known = [(look.held_slots, look.filled_slots) for look in looks]
    held = sum(held for held, filled in known if held is not None and filled is not None)
    filled = sum(filled for held, filled in known if held is not None and filled is not None)
    return 1 - filled / held if held else None


def _lowest_free(before: Reading | None, looks: Sequence[Reading], after: Reading | None) -> tuple[float | None, bool]:
    """Return the fewest free blocks, and whether the server's own window says so for the whole run.

    A window that reaches back before the run tells about the run only if it is lower than the one seen before it.
    """
    seen = [look.free_blocks for look in looks if look.free_blocks is not None]
    known = before.window_free_blocks if before else None
    windows: list[float] = []
    covered = 0.0
    for look in [*looks, *([after] if after else [])]:
        if look.window_free_blocks is None or look.window_seconds is None:
            continue
        is_ours = look.seconds >= look.window_seconds or (known is not None and look.window_free_blocks < known)
        if is_ours:
            windows.append(look.window_free_blocks)
            if look.seconds - look.window_seconds <= covered:
                covered = look.seconds
    is_exact = after is not None and bool(windows) and covered >= after.seconds
    return min([*seen, *windows], default=None), is_exact


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)

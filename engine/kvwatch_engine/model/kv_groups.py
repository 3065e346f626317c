"""Divides a model's layers into KV groups.

Layers of one kind of attention see the same tokens, so they can share block tables; all groups have the same number of
layers, so that a block has the same bytes whichever group uses it. Gemma 3 270M: 15 layers with a window and 3 without
make five sliding groups and one full group, of 3 layers each.

Where no number of layers divides all kinds, the last group of a kind has fewer: the rest of its blocks is padding. The
number is the one that leaves least padding, which counts eight times where layers see all tokens, since what they hold
grows with the context; of equals the largest, since each group costs a block table.
"""

from collections.abc import Sequence
from typing import Final

from kvwatch.telemetry.events.block import GROUPS
from kvwatch_engine.contracts.cache import KVGroup

_FULL_WEIGHT: Final = 8


class LayerPlaces:
    """Where each layer's keys and values lie: its KV group, and its place among the group's layers."""

    __slots__ = ("_places",)

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self._places = {
            layer: (number, place) for number, group in enumerate(groups) for place, layer in enumerate(group.layers)
        }

    def of(self, layer: int) -> tuple[int, int]:
        """Return group and place of a layer. A layer of no group is in the first, at the place of its index."""
        return self._places.get(layer, (0, layer))


ONE_GROUP = LayerPlaces(())


def kv_groups(windows: tuple[int | None, ...]) -> tuple[KVGroup, ...]:
    """Return the KV groups of layers with these windows, those with full attention first.

    Args:
        windows: of each layer; none sees all.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    size = _group_size({window: len(layers) for window, layers in kinds.items()})
    in_order = sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[0] or 0))
    return tuple(
        KVGroup(tuple(layers[first : first + size]), window)
        for window, layers in in_order
        for first in range(0, len(layers), size)
    )


def _group_size(counts: dict[int | None, int]) -> int:
    """Return the number of layers in a group, for so many layers of each window."""

    def num_groups(size: int) -> int:
        return sum(-(-count // size) for count in counts.values())

    def weighed(size: int) -> int:
        return sum(
            -(-count // size) * size * (_FULL_WEIGHT if window is None else 1) for window, count in counts.items()
        )

    sizes = range(min(counts.values()), max(counts.values()) + 1)
    return min((size for size in sizes if num_groups(size) <= len(GROUPS)), key=lambda size: (weighed(size), -size))

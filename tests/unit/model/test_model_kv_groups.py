"""How layers are divided into KV groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.telemetry.events.block import GROUPS
from kvwatch_engine.model.kv_groups import LayerPlaces, kv_groups


def layers_of(num_sliding: int, num_full: int, window: int = 512) -> tuple[int | None, ...]:
    return tuple([window] * num_sliding + [None] * num_full)


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        (layers_of(0, 30), [(30, None)]),
        (layers_of(32, 0), [(32, 512)]),
        (layers_of(15, 3), [(3, None)] + [(3, 512)] * 5),  # Gemma 3 270M
        (layers_of(22, 4), [(4, None)] + [(4, 512)] * 5 + [(2, 512)]),  # Gemma 3 1B: two layers of padding
        (layers_of(29, 5), [(5, None)] + [(5, 512)] * 5 + [(4, 512)]),  # Gemma 3 4B
        (layers_of(40, 8), [(8, None)] + [(8, 512)] * 5),  # Gemma 3 12B
        (layers_of(52, 10), [(10, None)] + [(10, 512)] * 5 + [(2, 512)]),  # Gemma 3 27B
        (layers_of(12, 13), [(13, None), (12, 512)]),  # nearly as many: one group of each
        (layers_of(13, 12), [(12, None), (13, 512)]),
        (layers_of(12, 12), [(12, None), (12, 512)]),
        (layers_of(60, 1), [(4, None)]),
    ],
)
def test_groups_have_equal_layers_and_leave_little_padding(
    windows: tuple[int | None, ...], expected: list[tuple[int, int | None]]
) -> None:
    groups = [(len(group.layers), group.window) for group in kv_groups(windows)]

    if windows == layers_of(60, 1):  # one layer in a group would make 61 groups
        assert len(groups) <= len(GROUPS)
        assert groups[0] == (1, None)
    else:
        assert groups == expected


@given(windows=st.lists(st.sampled_from([None, 4, 512]), min_size=1, max_size=80))
def test_each_layer_is_in_one_group_of_its_kind_at_a_place_of_its_own(windows: list[int | None]) -> None:
    groups = kv_groups(tuple(windows))
    places = LayerPlaces(groups)

    assert len(groups) <= len(GROUPS)
    assert [group.window is None for group in groups] == sorted(
        (group.window is None for group in groups), reverse=True
    )
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    size = max(len(group.layers) for group in groups)
    found = [places.of(layer) for layer in range(len(windows))]
    assert len(set(found)) == len(windows)
    assert all(groups[number].window == windows[layer] for layer, (number, _) in enumerate(found))
    assert all(place < size for _, place in found)

"""What a request holds is counted once, and what of it is shared is told apart."""

from hypothesis import given
from hypothesis import strategies as st

from kvwatch_engine.contracts.block import BlockId
from kvwatch_engine.memory.footprint import Footprint, footprint

tables = st.lists(st.lists(st.integers(1, 9).map(BlockId), max_size=6, unique=True), max_size=5)


def test_a_request_that_holds_nothing_has_an_empty_footprint() -> None:
    assert footprint([], [0, 0]) == footprint([[]], [0, 0]) == Footprint()


def test_blocks_shared_within_and_with_others_are_told_apart() -> None:
    own = [[BlockId(1), BlockId(2), BlockId(3)], [BlockId(1), BlockId(2), BlockId(4)]]
    others = [BlockId(1), BlockId(5)]
    ref_counts = [0, 3, 2, 1, 1, 1]

    assert footprint(own, ref_counts) == Footprint(
        num_blocks=4, num_shared_blocks=2, num_foreign_blocks=1, num_entries=6
    )
    assert footprint(own, ref_counts).num_saved_blocks == 2
    assert footprint([others], ref_counts) == Footprint(
        num_blocks=2, num_shared_blocks=1, num_foreign_blocks=1, num_entries=2
    )


@given(tables, tables)
def test_what_is_not_foreign_becomes_free_when_the_request_ends(
    own: list[list[BlockId]], others: list[list[BlockId]]
) -> None:
    def occurrences(of: list[list[BlockId]], block: int) -> int:
        return sum(table.count(BlockId(block)) for table in of)

    ref_counts = [occurrences([*own, *others], block) for block in range(10)]
    found = footprint(own, ref_counts)

    freed = [block for block in range(1, 10) if occurrences(own, block) and not occurrences(others, block)]
    assert found.num_blocks - found.num_foreign_blocks == len(freed)
    assert found.num_entries == sum(map(len, own))

"""What is remembered of evictions does not depend on when somebody asks."""

from hypothesis import given
from hypothesis import strategies as st

from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.memory.eviction_memory import EvictionMemory

NUMBERS = st.integers(0, 12)
STEPS: st.SearchStrategy[tuple[str, list[int]]] = st.one_of(
    st.tuples(st.just("evict"), st.lists(NUMBERS, min_size=1, max_size=5, unique=True)),
    st.tuples(st.just("lose"), st.lists(NUMBERS, max_size=3)),
    st.tuples(st.just("ask"), st.lists(NUMBERS, max_size=3)),
    st.tuples(st.just("clear"), st.just([])),
)


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


class EagerMemory:
    """Two sets, the older of which is forgotten when the younger one is full."""

    def __init__(self) -> None:
        self.sets: list[set[int]] = [set(), set()]
        self.num_recent = 0

    def evict(self, numbers: list[int], num_blocks: int) -> None:
        self.sets[0] |= set(numbers)
        self.num_recent += len(numbers)
        if self.num_recent >= num_blocks:
            self.sets, self.num_recent = [set(), self.sets[0]], 0

    def lose(self, numbers: list[int]) -> None:
        self.sets = [some - set(numbers) for some in self.sets]

    def clear(self) -> None:
        self.sets, self.num_recent = [set(), set()], 0


@given(steps=st.lists(STEPS, max_size=40), num_blocks=st.integers(1, 12))
def test_it_knows_what_two_sets_would_know_whenever_it_is_asked(
    steps: list[tuple[str, list[int]]], num_blocks: int
) -> None:
    memory, eager = EvictionMemory(), EagerMemory()
    for number in range(0, 13, 2):
        memory.note_first(name(number), ())
    for what, numbers in steps:
        hashes = [name(number) for number in numbers]
        if what == "evict":
            memory.add(hashes, num_blocks)
            eager.evict(numbers, num_blocks)
        elif what == "lose":
            memory.discard(hashes)
            eager.lose(numbers)
        elif what == "clear":
            memory.clear()
            eager.clear()
        for number in numbers if what == "ask" else ():
            known = any(number in some for some in eager.sets)
            assert memory.knows(name(number)) is known
            assert memory.knows(name(number), is_first=True) is (known and number % 2 == 0)

    known_at_last = {number for number in range(13) if memory.knows(name(number))}
    assert known_at_last == set.union(*eager.sets)


def test_first_blocks_are_known_while_they_are_here_or_remembered_however_many_there_were() -> None:
    memory = EvictionMemory()
    present = {name(number) for number in range(10)}
    for number in range(10):
        memory.note_first(name(number), present)
    memory.add([name(20)], 100)
    memory.note_first(name(20), present)

    for number in range(1000, 21_000):
        memory.note_first(name(number), present)

    memory.add([name(3), name(20_999)], 100)
    assert [number for number in (3, 20, 20_999) if memory.knows(name(number), is_first=True)] == [3, 20, 20_999]
    assert len(memory._firsts) < 5000

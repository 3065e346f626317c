"""The trace on which block managers are compared, ours and others': prompts and sizes. Knows none of them."""

from random import Random

BLOCK_SIZE = 16
NUM_REQUESTS = 2000
NUM_LIVE = 64
NUM_DECODE_STEPS = 32
SMALL = 10_001
"""Blocks of the pool, the null block included."""
SHARED_PREFIX = 0.8
"""Part of each prompt that all have in common, in the trace with sharing."""
SEED = 3


def prompts(count: int, *, shared: float = 0.0) -> list[list[int]]:
    """Return the prompts of a trace; a part `shared` of each is the beginning of one common text."""
    random = Random(SEED)
    text = [random.randrange(50_000) for _ in range(1536)]
    found = []
    for _ in range(count):
        length = random.randint(64, 1536)
        common = round(length * shared)
        found.append(text[:common] + [random.randrange(50_000) for _ in range(length - common)])
    return found


def num_blocks(prompt: list[int]) -> int:
    """Return how many blocks a request of the trace takes in the end."""
    return -(-(len(prompt) + NUM_DECODE_STEPS) // BLOCK_SIZE)

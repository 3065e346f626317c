"""A process that offloads to a disk folder as fast as it can, until somebody kills it. Run as a script."""

import sys
from itertools import count
from pathlib import Path

from tier_stage import BLOCK_SIZE, TierStage, content_of, hashes_of

from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.block_pool import Owner, StoredRun
from kvwatch_engine.memory.prefix import Prefix


def prompt_of(number: int) -> list[int]:
    """Tokens of two full blocks, different for each number below 2^24."""
    return [*number.to_bytes(BLOCK_SIZE, "big")] * 2


def fill(stage: TierStage, manager: BlockManager, number: int) -> None:
    """Compute one prompt and let it go: its blocks are cached until others need the room."""
    owner, tokens = Owner(f"r{number}", 0), prompt_of(number)
    while not manager.open(owner, Prefix(), len(tokens)):
        stage.tiers.wait(0.01)
        stage.tiers.poll()
    table, hashes = manager.table(owner), hashes_of(tokens)
    for index, block in enumerate(table):
        stage.memory[block] = content_of(tokens[: (index + 1) * BLOCK_SIZE])
    manager.pool.store(list(table), hashes, None, StoredRun(owner, 0))
    manager.release(owner, "finished")


def main(folder: Path, first: int) -> None:
    stage = TierStage(8, 4, 40, folder, is_threaded=True)
    print("ready", flush=True)
    for number in count(first):
        fill(stage, stage.manager, number)
        while stage.tiers.num_in_flight > 1:  # a model would take longer
            stage.tiers.wait(0.01)
            stage.tiers.poll()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

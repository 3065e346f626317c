"""A process is killed at random while it offloads to disk, and files are damaged: no wrong block ever comes back."""

import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tier_stage import BLOCK_SIZE, TierStage, content_of, hashes_of
from tier_victim import fill, prompt_of

from kvwatch_engine.contracts.tiers import TransferOutcome
from kvwatch_engine.memory.block_pool import Owner
from kvwatch_engine.memory.prefix import Prefix

TESTS = Path(__file__).parent.parent
MOST_PROMPTS = 3_000
"""More than a process computes before it is killed."""


def run_and_kill(folder: Path, first: int, seconds: float) -> None:
    command = [sys.executable, str(TESTS / "tier_victim.py"), str(folder), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=TESTS, env={"PYTHONPATH": str(TESTS)}) as victim:
        assert victim.stdout is not None
        for line in victim.stdout:  # after what it logs about the files that it found
            if line == b"ready\n":
                break
        time.sleep(seconds)
        victim.kill()


def damage(folder: Path, chance: random.Random) -> int:
    """Flip, cut, empty and misplace some files; return how many."""
    files = sorted(folder.glob("blocks/*/*.kvb"))
    victims = chance.sample(files, min(4, len(files)))
    for path, how in zip(victims, ["flip", "cut", "empty", "misplace"], strict=False):
        content = bytearray(path.read_bytes())
        if how == "flip":
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        elif how == "cut":
            del content[chance.randrange(len(content)) :]
        elif how == "empty":
            content.clear()
        else:  # the file that was chosen may be the one that was emptied just now
            content = bytearray(chance.choice(files).read_bytes())
        path.write_bytes(content)
    (folder / "blocks" / "stray").write_bytes(chance.randbytes(700))
    return len(victims)


def restore_all(stage: TierStage, first: int, end: int) -> tuple[int, int]:
    """Ask for every prompt that was ever computed; return the blocks that came back, all of them right, and misses."""
    num_good = num_bad = 0
    for number in range(first, end):
        tokens = prompt_of(number)
        hits = stage.tiers.find(hashes_of(tokens))
        if not hits:
            continue
        owner = Owner(f"again-{number}", 0)
        assert stage.manager.open(owner, Prefix(), len(tokens))
        stage.tiers.begin_restore(owner.request, 0, 0, hits)
        outcomes: list[TransferOutcome] = []
        while not outcomes:
            assert stage.tiers.wait(10)
            outcomes = stage.tiers.poll()
        for index in range(outcomes[0].num_blocks):
            block = stage.manager.table(owner)[index]
            assert np.array_equal(stage.memory[block], content_of(tokens[: (index + 1) * BLOCK_SIZE]))
        num_good += outcomes[0].num_blocks
        num_bad += bool(outcomes[0].error)
        stage.manager.release(owner, "finished")
    return num_good, num_bad


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_kills", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_kills_and_damaged_files_bring_no_wrong_block(tmp_path: Path, num_kills: int) -> None:
    chance = random.Random(num_kills)
    num_good = num_bad = num_damaged = num_torn = 0
    for kill in range(num_kills):
        first = kill * 100_000
        run_and_kill(tmp_path, first, chance.uniform(0.0, 0.3))
        if kill % 2:
            num_damaged += damage(tmp_path, chance)
        stage = TierStage(8, 4, 40, tmp_path, is_threaded=True)
        try:
            ignored = stage.tiers.states()[1].ignored_files
            num_torn += ignored.get("torn", 0)
            good, bad = restore_all(stage, first, first + MOST_PROMPTS)
            num_good, num_bad = num_good + good, num_bad + bad
            # The tier is as usable as before.
            for number in range(first + 90_000, first + 90_030):
                fill(stage, stage.manager, number)
                stage.tiers.poll()
            while stage.tiers.num_in_flight:
                stage.tiers.wait(1)
                stage.tiers.poll()
            stage.check_integrity()
            assert any(stage.tiers.find(hashes_of(prompt_of(first + 90_000 + number))) for number in range(30))
        finally:
            stage.tiers.close()
    print({"good": num_good, "bad": num_bad, "damaged": num_damaged, "torn": num_torn})
    assert num_good > 5 * num_kills
    assert num_bad or num_kills < 50

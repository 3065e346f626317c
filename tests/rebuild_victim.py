"""A process that rebuilds its cache under load and is killed at a phase of that. Run as a script.

    python rebuild_victim.py MODEL DISK PHASE|none

Prints the block size of the pool and of the memory at the end, and the texts of its requests as JSON.
"""

import json
import os
import signal
import sys
from pathlib import Path

from live_load import LiveLoad

from kvwatch_engine.model.loader import load_model
from kvwatch_engine.model.runner import ModelRunner


def main(model: str, disk: Path, phase: str) -> None:
    load = LiveLoad(load_model(model, dtype="float32"), disk)

    def kill(reached: str) -> None:
        if reached == phase:
            os.kill(os.getpid(), signal.SIGKILL)

    load.on_phase = kill
    load.reach_full_load()
    found = [load.core.settings.block_size]
    load.change({"block_size": 32})
    kill("told")
    load.run()
    load.core.close()
    runner = load.core.memory
    assert isinstance(runner, ModelRunner)
    found += [load.core.manager.block_size, runner.kv_cache.spec.block_size]
    texts = {f"{name} {number}": tokens for (name, number), tokens in load.texts.items()}
    print(json.dumps({"block_sizes": found, "texts": texts}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])

"""The null model's naive cache as a device whose blocks tiers read and write, and a worker without a thread."""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from builders import NullModel

from kvwatch_engine.memory.tiers.stores import Bytes
from kvwatch_engine.memory.tiers.worker import Job, Mover

NOTHING = -1


class SlotStore:
    """Blocks of a null model: eight bytes a slot, its token or `NOTHING`."""

    def __init__(self, model: NullModel) -> None:
        self._model = model
        self.before: Callable[[], None] = lambda: None
        """Called before blocks are read or written; may raise."""

    def read(self, keys: Sequence[int], out: Bytes) -> None:
        self.before()
        size = self._model.block_size
        for place, block in enumerate(keys):
            tokens = [self._model.slots.get(block * size + offset, NOTHING) for offset in range(size)]
            out[place] = np.array(tokens, np.int64).view(np.uint8)

    def write(self, keys: Sequence[int], data: Bytes) -> None:
        self.before()
        size = self._model.block_size
        for block, content in zip(keys, data, strict=True):
            for offset, token in enumerate(content.view(np.int64).tolist()):
                self._model.slots.pop(block * size + offset, None)
                if token != NOTHING:
                    self._model.slots[block * size + offset] = token


class InlineWorker:
    """A worker whose jobs are carried out when somebody looks for ended ones: so that runs are the same each time."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._jobs: deque[Job] = deque()

    def submit(self, job: Job) -> None:
        self._jobs.append(job)

    def take_ended(self) -> list[Job]:
        ended = list(self._jobs)
        self._jobs.clear()
        for job in ended:
            self._mover.carry_out(job)
        return ended

    def wait(self, seconds: float) -> bool:  # noqa: ARG002 - nothing is ever on its way
        return bool(self._jobs)

    def stop(self) -> None:
        self._jobs.clear()

"""The embedded model with one pool, on which engines of different settings follow one another. Real time."""

import time
from typing import Any

from embedded_engine import load_embedded
from load import Load
from outcome import Outcome, drive

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.memory.tiers.tiers import TierSettings
from kvwatch_engine.model.runner import ModelRunner
from kvwatch_engine.serve.tiers import tiers_factory

MAX_BATCH_TOKENS = 256
BLOCK_SIZE = 16

PRESSURE = Load(num_requests=48, num_clients=28, prompt=(3.6, 0.5), answer=(4.3, 0.5), longest=300)
"""Prompts of 42 and answers of 83 tokens on average: 28 clients want about one and a half times `PRESSED_BLOCKS`."""
PRESSED_BLOCKS = 101
"""Of the pool, the null block included."""


class EmbeddedEngine:
    """The model, warmed up, and its pool."""

    def __init__(self, num_blocks: int) -> None:
        """Load the model."""
        self._model = load_embedded()
        self._num_blocks = num_blocks
        self._runner = ModelRunner(self._model, KVCache(self._model.cache_spec(BLOCK_SIZE), num_blocks))
        self._runner.warm_up(MAX_BATCH_TOKENS)

    def serve(self, load: Load, *, tiers: TierSettings | None = None, **settings: Any) -> Outcome:
        """Serve a load with a new engine; return what it was like.

        Args:
            load: the requests.
            tiers: tiers behind the device; none without.
            settings: fields of `EngineSettings` that differ from those of all studies.
        """
        info = self._model.info
        values = {
            "num_blocks": self._num_blocks, "block_size": BLOCK_SIZE, "max_model_len": info.max_position,
            "max_num_seqs": 64, "max_batch_tokens": MAX_BATCH_TOKENS, "eos_token_ids": info.eos_token_ids,
            "vocab_size": info.vocab_size, "weights_fingerprint": info.weights_fingerprint, **settings,
        }  # fmt: skip
        log = EventLog()
        make_tiers = tiers_factory(tiers, self._runner, info, log) if tiers is not None else None
        core = EngineCore(EngineSettings(**values), self._runner, log, make_tiers=make_tiers)
        try:
            return drive(core, load, time.monotonic_ns)
        finally:
            core.close()

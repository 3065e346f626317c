"""Models whose layers see different windows, served by a real engine and watched by a mirror, against transformers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from builders import LedgerFollower, make_request
from transformers import AutoModelForCausalLM

from kvwatch.ledger.mirror import Mirror
from kvwatch.ledger.view import View
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.loader import LoadedModel
from kvwatch_engine.model.runner import ModelRunner

NEAR_TIE = 1e-4


@dataclass
class Reference:
    """transformers' model in float32."""

    model: Any
    num_excused: int = field(default=0, init=False)
    """Answers that differ at a near tie of the two best tokens."""

    @classmethod
    def load(cls, folder: Path) -> "Reference":
        return cls(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())

    def answer(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return the greedy continuation."""
        with torch.inference_mode():
            output = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        found: list[int] = output[0, len(prompt) :].tolist()
        return found

    def check(self, prompt: Sequence[int], answer: list[int], expected: list[int]) -> None:
        """Compare an answer with the reference's; only where its two best tokens are nearly tied may they part."""
        if answer == expected:
            return
        assert len(answer) == len(expected)
        self.num_excused += 1
        with torch.inference_mode():
            logits = self.model(torch.tensor([[*prompt, *answer]])).logits[0][len(prompt) - 1 : -1]
        for position, token in enumerate(answer):
            loss = float(logits[position].max() - logits[position, token])
            assert loss < NEAR_TIE, f"token {position} of the answer to {len(prompt)} tokens is not the reference's"


class WatchedEngine:
    """A real engine over a cache full of NaN, and a mirror that follows its events."""

    def __init__(self, model: LoadedModel, **settings: Any) -> None:
        self.log = EventLog(200_000)
        config = EngineSettings(groups=model.info.groups, weights_fingerprint="w", **settings)
        cache = KVCache(model.cache_spec(config.block_size), config.num_blocks)
        cache.data.fill_(float("nan"))
        runner = ModelRunner(model, cache)
        self.core = EngineCore(config, runner, self.log, memory=runner)
        self._cursor = self.log.subscribe("mirror")
        self.mirror = Mirror(self.log.clock, 0)
        self.mirror.load(self.core.snapshot())
        self.follower = LedgerFollower(self.log, self.core.snapshot)
        self.on_view: Callable[[View], None] = lambda _view: None
        """Called after each step."""
        self.most_held: dict[int, int] = {}
        """By KV group: most blocks that a sequence held between two steps."""

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int, **sampling: Any) -> list[list[list[int]]]:
        """Answer prompts together; return the tokens of each one's sequences."""
        answers: dict[tuple[str, int], list[int]] = {}
        n = sampling.get("n", 1)
        for index, prompt in enumerate(prompts):
            request = make_request(f"r{index}", prompt, max_tokens=num_tokens, ignore_eos=True, **sampling)
            self.core.add(request, self.log.clock.monotonic_ns())
        while self.core.has_work:
            for output in self.core.step():
                assert not output.error
                answers.setdefault((output.request_id, output.sequence), []).extend(output.token_ids)
            self.check()
        assert self.core.manager.pool.num_used == 0
        return [[answers[f"r{index}", sequence] for sequence in range(n)] for index in range(len(prompts))]

    def check(self) -> None:
        """Between two steps: bounds of what sliding groups hold, and what the metrics say of each group."""
        manager, core = self.core.manager, self.core
        core.check_integrity()
        self.follower.catch_up()
        self.mirror.apply(self._cursor.read(200_000))
        self.mirror.publish()
        assert self.mirror.num_violations == 0
        view, capacity = self.mirror.view, manager.pool.capacity
        of_groups = 0.0
        for group in manager.groups:
            held = [group.held(owner) for owner in group.tables]
            most = max(map(len, held), default=0)
            self.most_held[group.number] = max(most, self.most_held.get(group.number, 0))
            if group.window is not None:
                assert most <= -(-group.window // group.block_size) + 2
            used = view.value(m.KV_BLOCKS, "device", str(group.number), "used")
            cached = view.value(m.KV_BLOCKS, "device", str(group.number), "cached")
            assert used == len({block for blocks in held for block in blocks})
            assert cached is not None
            of_groups += used + cached
        empty = view.value(m.KV_BLOCKS, "device", "", "empty")
        assert empty is not None
        assert capacity == empty + of_groups
        self.on_view(view)

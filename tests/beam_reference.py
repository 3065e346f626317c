"""Beam search as transformers does it, and as this engine does it: sequences with their scores, the best first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from builders import make_request

from kvwatch_engine.contracts.request import SequenceOutput
from kvwatch_engine.contracts.sampling import BeamParams
from kvwatch_engine.core import EngineCore

SCORE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Found:
    """One sequence that a search found."""

    token_ids: list[int]
    """Generated tokens, the end token included."""
    score: float


@torch.inference_mode()
def reference_beams(
    model: Any, prompt: Sequence[int], beams: BeamParams, *, max_tokens: int, ends: Sequence[int] = (), **more: Any
) -> list[Found]:
    """Return what `generate` finds; `more` are arguments of it."""
    output = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=beams.width,
        num_return_sequences=beams.width,
        length_penalty=beams.length_penalty,
        early_stopping=beams.early_stopping,
        max_new_tokens=max_tokens,
        eos_token_id=list(ends) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **more,
    )
    found = []
    for row, score in zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        length = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
        found.append(Found(tokens[:length], score))
    return found


def engine_beams(core: EngineCore, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[Found]]:
    """Run a search for each prompt, all at once; return what each found."""
    for index, prompt in enumerate(prompts):
        core.add(make_request(str(index), prompt, **sampling), 0)
    outputs: list[SequenceOutput] = []
    while core.has_work:
        outputs += core.step()
        core.check_integrity()
    assert core.manager.pool.num_used == 0
    found: list[list[Found]] = [[] for _ in prompts]
    for output in sorted(outputs, key=lambda each: each.sequence):
        assert not output.error
        assert output.score is not None
        found[int(output.request_id)].append(Found(list(output.token_ids), output.score))
    return found

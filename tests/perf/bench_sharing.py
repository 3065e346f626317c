"""How many blocks sharing saves, with parallel samples and with beams. Prints JSON.

python tests/perf/bench_sharing.py

The real block manager and scheduler with a model that is arithmetic. Saved is what sharing saves over what would be
held without it: (table entries - distinct blocks) / table entries, summed over all steps. Only sharing within a request
counts: all prompts differ, and the prefix cache is off. Lengths are lognormal with about the means of two well-known
mixes: short instructions (Alpaca: 19 tokens in, 58 out) and conversations (ShareGPT: 161 in, 338 out).

How often beams part depends on the model. `candidate_rows.json` holds the eight best log-probabilities of 256 positions
of SmolLM2-135M-Instruct to which a beam search over the prompts of `tests/prompts.py` had led; a beam's position and
its last two tokens choose one of these rows. With that model itself, short prompts and answers of 90 tokens, 2, 4 and 6
beams save 33, 51 and 57 %.

The PagedAttention paper (Kwon et al., 2023, figure 15) gives for its traces, with 2 to 6 sequences: samples 6.1 to
9.8 % and 16.2 to 30.5 %, beams 37.6 to 55.2 % and 44.3 to 66.3 %.
"""

import json
import sys
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.request import GenerationRequest
from kvwatch_engine.contracts.sampling import BeamParams, SamplingParams
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.contracts.step import Candidates, SampleRow, StepInput, StepResult
from kvwatch_engine.core import EngineCore

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
NUMBERS = (2, 4, 6)
CONCURRENCY = 16
SEED = 7


@dataclass(frozen=True)
class Mix:
    """Lengths of prompts and answers: (mean of the logarithm, its standard deviation)."""

    num_requests: int
    prompt: tuple[float, float]
    answer: tuple[float, float]
    paper_samples: tuple[float, float]
    paper_beams: tuple[float, float]


MIXES = {
    # exp(mean + deviation^2 / 2) is the mean length.
    "alpaca": Mix(120, (2.78, 0.6), (3.69, 1.0), (0.061, 0.098), (0.376, 0.552)),
    "sharegpt": Mix(80, (4.45, 1.2), (5.74, 0.8), (0.162, 0.305), (0.443, 0.663)),
}


@cache
def candidate_rows() -> list[list[float]]:
    """Return measured log-probabilities, the most likely first."""
    rows: list[list[float]] = json.loads(Path(__file__).with_name("candidate_rows.json").read_text())
    return rows


class MeasuredModel:
    """An executor whose beams have the candidates of a measured row, which their own tokens choose."""

    def execute(self, step: StepInput) -> StepResult:
        """Return words and candidates."""
        candidates = {place: self._candidates(row) for place, row in enumerate(step.sample_rows) if row.num_candidates}
        tokens = [
            candidates[place].token_ids[0] if place in candidates else 1 for place in range(len(step.sample_rows))
        ]
        return StepResult(
            token_ids=tokens, logprobs=[None] * len(tokens), forward_ns=0, sample_ns=0, candidates=candidates
        )

    def _candidates(self, row: SampleRow) -> Candidates:
        rows = candidate_rows()
        last = tuple(row.output_token_ids[max(0, row.position - 2) : row.position])
        state = hash((tuple(row.prompt_token_ids[:4]), row.position, last))
        scores = rows[state % len(rows)][: row.num_candidates]
        return Candidates(list(range(len(scores))), scores)


def draw_length(random: Random, shape: tuple[float, float], highest: int) -> int:
    """Draw a length."""
    return max(1, min(highest, round(random.lognormvariate(*shape))))


def make_requests(mix: Mix, number: int, *, is_beams: bool) -> list[GenerationRequest]:
    """Return the load."""
    random, requests = Random(SEED), []
    for index in range(mix.num_requests):
        length = draw_length(random, mix.prompt, MAX_MODEL_LEN // 2)
        answer = draw_length(random, mix.answer, MAX_MODEL_LEN // 2)
        beams = BeamParams(width=number, early_stopping=True) if is_beams else None
        sampling = SamplingParams(n=number, beams=beams, max_tokens=answer, ignore_eos=True, seed=index)
        prompt = tuple((index * 7919 + place) % 10_000 for place in range(length))
        requests.append(GenerationRequest(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    return requests


def saved_ratio(requests: list[GenerationRequest]) -> float:
    """Serve the load; return the part of the blocks held without sharing that sharing saves."""
    settings = EngineSettings(
        num_blocks=20_000,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=CONCURRENCY * max(NUMBERS),
        max_batch_tokens=4096,
        enable_prefix_cache=False,
    )
    core = EngineCore(settings, MeasuredModel(), EventLog())
    for request in requests:
        core.add(request, 0)
    pool, num_entries, num_saved = core.manager.pool, 0, 0
    while core.has_work:
        core.step()
        num_entries += pool.num_references
        num_saved += pool.num_references - pool.num_used
    core.check_integrity()
    return num_saved / num_entries


def measure(mix: Mix) -> dict[str, object]:
    """Return what one mix of lengths saves."""
    prompts = make_requests(mix, 1, is_beams=False)
    found: dict[str, object] = {
        "mean_prompt_tokens": round(sum(len(each.prompt_token_ids) for each in prompts) / len(prompts), 1),
        "mean_answer_tokens": round(sum(each.sampling.max_tokens for each in prompts) / len(prompts), 1),
    }
    for name, is_beams, paper in (("samples", False, mix.paper_samples), ("beams", True, mix.paper_beams)):
        found[name] = {n: round(saved_ratio(make_requests(mix, n, is_beams=is_beams)), 3) for n in NUMBERS}
        found[f"{name}_in_the_paper"] = list(paper)
    return found


def main() -> None:
    """Print the table as JSON; exit 1 when beams save less than samples do, or more numbers save less than fewer."""
    table = {name: measure(mix) for name, mix in MIXES.items()}
    print(json.dumps({"block_size": BLOCK_SIZE, "saved_ratio": table}))
    is_sound = all(_is_sound(found) for found in table.values())
    sys.exit(not is_sound)


def _is_sound(found: dict[str, object]) -> bool:
    samples, beams = found["samples"], found["beams"]
    assert isinstance(samples, dict)
    assert isinstance(beams, dict)
    grows = all(each[few] < each[more] for each in (samples, beams) for few, more in pairwise(NUMBERS))
    return grows and all(samples[number] < beams[number] for number in NUMBERS)


if __name__ == "__main__":
    main()

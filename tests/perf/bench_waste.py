"""How much of the held memory holds no token, with paging and with a reservation for each request. Prints JSON.

python tests/perf/bench_waste.py

One engine with a null model serves a mixed load: prompts and answers of lognormal length, mean prompt above 256 tokens,
callers who allow longer answers than they get. Paging is what the ledger counts at each step. The reservations are
computed from the same steps: the memory that the running requests would take had each reserved its maximum at
admission, up to what its caller allows or up to the longest sequence that the engine allows.
"""

import json
import math
import sys
from dataclasses import dataclass
from random import Random

from kvwatch.ledger.ledger import Ledger
from kvwatch.telemetry.events import StepCompleted
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.request import GenerationRequest
from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.contracts.step import StepInput, StepResult
from kvwatch_engine.core import EngineCore

BUDGET = 0.04
BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
NUM_REQUESTS = 400
SEED = 7
END, WORD = 0, 1
PROMPT = (5.7, 0.7)
"""Logarithm of a prompt's length: mean and standard deviation. The mean length is 380 tokens."""
ANSWER = (4.5, 0.8)
"""The same of an answer's length: 120 tokens."""
ALLOWED = (256, 512, 1024)
"""What callers allow an answer to have."""


class EndingModel:
    """A null model whose answers have the length that the prompt's first token says."""

    def execute(self, step: StepInput) -> StepResult:
        """Return words, and the end where it is due."""
        tokens = [END if row.position + 1 >= row.prompt_token_ids[0] else WORD for row in step.sample_rows]
        return StepResult(token_ids=tokens, logprobs=[None] * len(tokens), forward_ns=0, sample_ns=0)


@dataclass
class Memory:
    """Slots held and filled, summed over steps."""

    held: int = 0
    filled: int = 0

    @property
    def waste(self) -> float:
        """Part of the held slots that holds no token."""
        return 1 - self.filled / self.held


def lognormal(random: Random, shape: tuple[float, float], highest: int) -> int:
    """Draw a length."""
    return max(1, min(highest, round(random.lognormvariate(*shape))))


def make_requests() -> list[GenerationRequest]:
    """Return the load."""
    random = Random(SEED)
    requests = []
    for number in range(NUM_REQUESTS):
        allowed = random.choice(ALLOWED)
        answer = lognormal(random, ANSWER, allowed)
        length = lognormal(random, PROMPT, MAX_MODEL_LEN - max(ALLOWED))
        # Each prompt is another one: what is measured is paging, not sharing.
        prompt = (answer, *(2 + (number * 7919 + place) % 10_000 for place in range(length - 1)))
        sampling = SamplingParams(temperature=0.0, max_tokens=allowed)
        requests.append(GenerationRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
    return requests


def serve(block_size: int, requests: list[GenerationRequest]) -> tuple[Memory, Memory, Memory]:
    """Serve the load; return the memory of paging, of reserving what is allowed, and of reserving the longest."""
    log = EventLog()
    settings = EngineSettings(
        num_blocks=1 + 48_000 // block_size,
        block_size=block_size,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=64,
        max_batch_tokens=2048,
        watermark_blocks=960 // block_size,
        eos_token_ids=(END,),
    )
    core = EngineCore(settings, EndingModel(), log)
    cursor, ledger = log.subscribe("bench"), Ledger()
    ledger.load(core.snapshot())
    allowed = {r.request_id: len(r.prompt_token_ids) + r.sampling.max_tokens for r in requests}
    paged, to_allowed, to_longest = Memory(), Memory(), Memory()
    for request in requests:
        core.add(request, 0)
    while core.has_work:
        core.step()
        for event in cursor.read(1000):
            ledger.apply(event)
            if isinstance(event, StepCompleted) and ledger.num_running:
                assert ledger.check(event) == []
                pool = ledger.pool("device")
                running = [name for name, request in ledger.requests.items() if request.state == "running"]
                paged.held += pool.num_used * block_size
                to_allowed.held += sum(allowed[name] for name in running)
                to_longest.held += MAX_MODEL_LEN * len(running)
                for memory in (paged, to_allowed, to_longest):
                    memory.filled += pool.num_filled_slots
    return paged, to_allowed, to_longest


def main() -> None:
    """Print the result as JSON; exit 1 when the budget is missed."""
    requests = make_requests()
    prompts = [len(request.prompt_token_ids) for request in requests]
    paged, to_allowed, to_longest = serve(BLOCK_SIZE, requests)
    print(
        json.dumps(
            {
                "num_requests": NUM_REQUESTS,
                "mean_prompt_tokens": round(math.fsum(prompts) / len(prompts), 1),
                "mean_answer_tokens": round(math.fsum(r.prompt_token_ids[0] for r in requests) / len(requests), 1),
                "block_size": BLOCK_SIZE,
                "paged_waste": round(paged.waste, 4),
                "paged_budget": BUDGET,
                "paged_waste_by_block_size": {
                    size: round(serve(size, requests)[0].waste, 4) for size in (1, 8, 32, 128)
                },
                "reserved_allowed_waste": round(to_allowed.waste, 4),
                "reserved_longest_waste": round(to_longest.waste, 4),
            }
        )
    )
    sys.exit(paged.waste >= BUDGET)


if __name__ == "__main__":
    main()

"""A mixed load for a pool that is far too small."""

from random import Random
from typing import Any

from kvwatch_engine.contracts.request import GenerationRequest
from kvwatch_engine.contracts.sampling import SamplingParams

LONGEST = 300
"""Tokens of prompt and answer: about half of a pool of 40 blocks of 16."""

KINDS = ("short", "short", "long", "shared", "parallel", "sampled", "early")


def mixed_requests(count: int, seed: int, vocab_size: int, max_answer: int = 60) -> list[tuple[str, GenerationRequest]]:
    """Return (class, request): short, long, shared prefix, several sequences, seeded sampling with penalties."""
    random = Random(seed)
    prefix = [random.randrange(5, vocab_size - 5) for _ in range(70)]
    made: list[tuple[str, GenerationRequest]] = []
    for number in range(count):
        kind = random.choice(KINDS)
        length = {"long": random.randint(120, 200), "shared": random.randint(5, 30)}.get(kind, random.randint(5, 60))
        prompt = [random.randrange(5, vocab_size - 5) for _ in range(length)]
        if kind == "shared":
            prompt = prefix + prompt
        params: dict[str, Any] = {
            "temperature": 0.0,
            "max_tokens": min(random.randint(4, max_answer), LONGEST - len(prompt)),
            "seed": number,
            "logprobs": 1,
            "ignore_eos": kind != "early",
        }
        if kind == "parallel":
            params |= {"n": 2, "temperature": 0.8}
        if kind == "sampled":
            params |= {"temperature": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
        request = GenerationRequest(
            request_id=f"{kind}{number}", prompt_token_ids=tuple(prompt), sampling=SamplingParams(**params)
        )
        made.append((kind, request))
    return made

"""A mixed load for a pool that is far too small, and what its clients may expect."""

from collections.abc import Sequence
from random import Random
from statistics import median
from typing import Any

from kvwatch.telemetry.events import RequestFinished, RequestResumed
from kvwatch.telemetry.schema import Event
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


def check_waits(requests: Sequence[tuple[str, GenerationRequest]], events: Sequence[Event]) -> None:
    """Nobody waits longer than five times the median of its class, or two seconds.

    Time before the first admission counts, and time away after preemptions.
    """
    waits: dict[str, float] = {}
    for event in events:
        if isinstance(event, RequestFinished):
            assert event.queue_ns is not None, f"{event.request} never ran"
            waits[event.request] = waits.get(event.request, 0.0) + event.queue_ns / 1e9
        if isinstance(event, RequestResumed):
            waits[event.request] = waits.get(event.request, 0.0) + event.away_ns / 1e9
    by_class: dict[str, list[float]] = {}
    for kind, request in requests:
        by_class.setdefault(kind, []).append(waits[request.request_id])
    for kind, found in by_class.items():
        print(f"{kind}: {len(found)} requests waited {median(found):.3f} s in the middle, {max(found):.3f} s at most")
        assert max(found) <= max(5 * median(found), 2.0)

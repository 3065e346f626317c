"""The requests of a study: lengths drawn from a seed, no two with a prefix in common."""

from dataclasses import dataclass
from random import Random

from kvwatch_engine.contracts.request import GenerationRequest
from kvwatch_engine.contracts.sampling import SamplingParams

VOCABULARY = 10_000
MAX_MODEL_LEN = 4096


@dataclass(frozen=True)
class Load:
    """Requests of clients that each send one after the other."""

    num_requests: int = 600
    num_clients: int = 64
    prompt: tuple[float, float] = (5.3, 0.7)
    """Logarithm of a prompt's length: mean and standard deviation."""
    answer: tuple[float, float] = (5.0, 0.7)
    """The same of an answer's length, which the engine does not know in advance."""
    low_priority_share: float = 0.0
    """Part of the requests that have priority 1 instead of 0."""
    longest: int = MAX_MODEL_LEN // 2
    """Most tokens of a prompt, and of an answer."""
    seed: int = 7

    def requests(self) -> list[GenerationRequest]:
        """Return the requests."""
        random, dice = Random(self.seed), Random(self.seed)
        made = []
        for number in range(self.num_requests):
            length, answer = (
                max(4, min(self.longest, round(random.lognormvariate(*shape)))) for shape in (self.prompt, self.answer)
            )
            prompt = tuple((number * 7919 + place) % VOCABULARY for place in range(length))
            sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, seed=0)
            priority = int(dice.random() < self.low_priority_share)
            made.append(
                GenerationRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling, priority=priority)
            )
        return made

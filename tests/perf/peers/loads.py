"""The loads that every side is put under, and their texts: each prompt has exactly the wanted number of tokens.

Prompts are texts, since not every side takes token ids. Their words are those of the model's vocabulary that are one
token each, wherever they stand. Knows no server.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from kvwatch.bench.scenarios import RequestSpec

_WORD = re.compile(r"[a-z]{3,12}")
_MIN_WORDS = 1000


@dataclass(frozen=True)
class Load:
    """Requests of equal lengths, asked greedily by a fixed number of clients."""

    name: str
    num_prompt_tokens: int
    num_output_tokens: int
    concurrency: int
    num_requests: int
    num_shared_tokens: int = 0
    """So many tokens begin every prompt of a round; nothing is shared between rounds."""

    def __str__(self) -> str:
        shared = f", {self.num_shared_tokens} of them shared" if self.num_shared_tokens else ""
        return (
            f"{self.num_requests} x {self.num_prompt_tokens} tokens in{shared}, {self.num_output_tokens} out, "
            f"{self.concurrency} at a time"
        )


LOADS = {
    load.name: load
    for load in (
        Load("serving", 256, 64, concurrency=16, num_requests=48),
        Load("long", 1024, 128, concurrency=8, num_requests=16),
        Load("shared-prefix", 1024, 64, concurrency=16, num_requests=48, num_shared_tokens=922),
        Load("single-stream", 128, 256, concurrency=1, num_requests=3),
        Load("burst", 32, 32, concurrency=64, num_requests=64),
    )
}


class Words:
    """Writes texts of an exact number of tokens."""

    def __init__(self, model: Path) -> None:
        """Find the model's words.

        Args:
            model: Hugging Face folder with a tokenizer.
        """
        self._tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        found = sorted(word for token in self._tokenizer.get_vocab() if _WORD.fullmatch(word := token[1:]))
        self._words = [word for word in found if self.count(f" {word}") == 1]
        if len(self._words) < _MIN_WORDS:
            raise ValueError(f"the tokenizer of {model} has {len(self._words)} words of one token: too few for texts")

    def count(self, text: str) -> int:
        """Return how many tokens a server makes of a text."""
        return len(self._tokenizer(text)["input_ids"])

    def text(self, rng: random.Random, num_tokens: int) -> str:
        """Return words that are so many tokens."""
        return "".join(f" {word}" for word in rng.choices(self._words, k=num_tokens))

    def requests(self, load: Load, seed: int, *, num_requests: int | None = None) -> Sequence[RequestSpec]:
        """Return the requests of one round; another seed shares nothing with it.

        Raises:
            ValueError: a text does not have its number of tokens.
        """
        rng = random.Random(f"{load.name}/{seed}")
        shared = self.text(rng, load.num_shared_tokens)
        specs = []
        for index in range(num_requests or load.num_requests):
            prompt = shared + self.text(rng, load.num_prompt_tokens - load.num_shared_tokens)
            if self.count(prompt) != load.num_prompt_tokens:
                raise ValueError(f"a prompt has {self.count(prompt)} tokens instead of {load.num_prompt_tokens}")
            specs.append(
                RequestSpec(
                    scenario=load.name, prompt=prompt, max_tokens=load.num_output_tokens, index=index,
                    is_fixed_length=True,
                )
            )  # fmt: skip
        return specs

"""The kinds of requests. Lengths are scaled to the longest sequence that the target takes."""

import random
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from kvwatch.bench.words import TextScale, make_text


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """What lengths are scaled to."""

    limit_tokens: int
    """Longest sequence, prompt and answer together: the smaller of the model's and the pool's limit."""
    pressure_tokens: int
    """Length of a `pressure` request: so long that the clients together outgrow the pool."""
    text: TextScale = TextScale()
    variations: "tuple[Variation, ...]" = ()
    """What `isolation` varies; never empty in a plan that has isolation."""


class Variation(msgspec.Struct, frozen=True):
    """One way to ask what must not mix with any other way."""

    name: str
    model: str = ""
    """Served name, which may be a LoRA adapter's; empty for the run's model."""
    salt: str = ""
    """Cache salt; empty for none."""
    image: int | None = None
    """Number of the picture shown; None for none."""


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One request, independent of how the target wants it written."""

    scenario: str
    prompt: str
    max_tokens: int
    index: int = 0
    temperature: float = 0.0
    n: int = 1
    seed: int = 0
    stop: tuple[str, ...] = ()
    is_fixed_length: bool = False
    """Go on to `max_tokens` whatever the model says, where the target can be told so."""
    is_uncached: bool = False
    """Nothing of it may come from the prefix cache."""
    variation: Variation = Variation("plain")
    hang_up_after: int | None = None
    """Pieces of text after which the client closes the connection; None: it reads to the end."""
    due_seconds: float | None = None
    """When it is to be sent; None: as soon as a client is free."""


class Draw:
    """The dice of one request."""

    def __init__(self, scenario: str, seed: int, index: int, scale: Scale) -> None:
        self.scenario = scenario
        self.seed = seed
        self.scale = scale
        self.limit = scale.limit_tokens
        self.index = index
        self.rng = random.Random(f"{seed}/{scenario}/{index}")  # noqa: S311 - a load, not a secret

    def between(self, low: float, high: float, most: int) -> int:
        """Return a length between two shares of the limit, at most `most` and at least 4 tokens."""
        low_tokens, high_tokens = (max(4, min(most, int(self.limit * share))) for share in (low, high))
        return self.rng.randint(low_tokens, max(low_tokens, high_tokens))

    def text(self, num_tokens: int) -> str:
        """Return text that no other request has."""
        return make_text(self.rng, num_tokens, self.scale.text)

    def shared_text(self, num_tokens: int, num_texts: int) -> str:
        """Return one of `num_texts` texts that all requests of this scenario share."""
        which = self.rng.randrange(num_texts)
        shared = random.Random(f"{self.seed}/{self.scenario}/shared/{which}")  # noqa: S311
        return make_text(shared, num_tokens, self.scale.text)

    def spec(self, prompt: str, max_tokens: int) -> RequestSpec:
        """Return a greedy request."""
        return RequestSpec(
            scenario=self.scenario, prompt=prompt, max_tokens=max_tokens, seed=self.rng.randrange(2**31)
        )  # fmt: skip


def _short(draw: Draw) -> RequestSpec:
    return draw.spec(draw.text(draw.between(0.02, 0.125, 96)), draw.between(0.01, 0.06, 32))


def _long(draw: Draw) -> RequestSpec:
    # At most 0.9: words vary in tokens, and a request that is too long is refused.
    num_output = max(4, min(128, draw.limit // 8))
    return draw.spec(draw.text(draw.between(0.8, 0.9, draw.limit) - num_output), num_output)


def _early_stop(draw: Draw) -> RequestSpec:
    spec = draw.spec(draw.text(draw.between(0.1, 0.3, 512)), draw.between(0.2, 0.3, 256))
    return msgspec.structs.replace(spec, stop=("e", "o", "\n", "."))


def _max_tokens(draw: Draw) -> RequestSpec:
    spec = draw.spec(draw.text(draw.between(0.05, 0.3, 512)), draw.between(0.1, 0.3, 256))
    return msgspec.structs.replace(spec, is_fixed_length=True)


def _shared_prefix(draw: Draw) -> RequestSpec:
    prefix = draw.shared_text(min(2048, int(draw.limit * 0.4)), 4)
    return draw.spec(prefix + draw.text(draw.between(0.05, 0.1, 128)), draw.between(0.03, 0.1, 64))


def _distinct(draw: Draw) -> RequestSpec:
    return draw.spec(draw.text(draw.between(0.4, 0.5, 2048)), draw.between(0.03, 0.1, 64))


def _parallel(draw: Draw) -> RequestSpec:
    n = draw.rng.randint(2, 4)
    num_prompt = draw.between(0.05, 0.15, 512)
    # The server must find room for all n at their longest, each rounded up to whole blocks.
    room = (int(draw.limit * 0.8) - num_prompt) // n - 32
    spec = draw.spec(draw.text(num_prompt), max(4, min(64, room)))
    return msgspec.structs.replace(spec, n=n, temperature=0.8)


def _cold(draw: Draw) -> RequestSpec:
    spec = draw.spec(draw.text(draw.between(0.3, 0.3, 1024)), draw.between(0.03, 0.03, 16))
    return msgspec.structs.replace(spec, is_uncached=True)


def _warm(draw: Draw) -> RequestSpec:
    return draw.spec(draw.shared_text(draw.between(0.3, 0.3, 1024), 4), draw.between(0.03, 0.03, 16))


def _pressure(draw: Draw) -> RequestSpec:
    total = min(int(draw.limit * 0.9), draw.scale.pressure_tokens)
    num_prompt = max(4, total // 5)
    spec = draw.spec(draw.text(num_prompt), max(4, total - num_prompt))
    return msgspec.structs.replace(spec, is_fixed_length=True)


def _hang_up(draw: Draw) -> RequestSpec:
    spec = draw.spec(draw.text(draw.between(0.1, 0.3, 512)), draw.between(0.2, 0.4, 256))
    return msgspec.structs.replace(spec, is_fixed_length=True, hang_up_after=draw.rng.randint(0, 8))


def _isolation(draw: Draw) -> RequestSpec:
    variations = draw.scale.variations
    prompt = draw.shared_text(draw.between(0.1, 0.1, 128), 3)
    spec = draw.spec(prompt, draw.between(0.03, 0.03, 16))
    return msgspec.structs.replace(spec, seed=0, variation=variations[draw.index % len(variations)])


class Scenario(NamedTuple):
    """One kind of requests."""

    make: Callable[[Draw], RequestSpec]
    mixed_weight: int
    """Weight in `mixed`."""
    brief: str


MIXED = "mixed"
ISOLATION = "isolation"
TRACE = "trace"
WARM = "warm"
RESETTING = frozenset({"cold", WARM})
"""Scenarios for which the prefix cache is reset before the run, where the target offers that."""

SCENARIOS = {
    "short": Scenario(_short, 4, "small prompts, small answers"),
    "long": Scenario(_long, 2, "80 to 90 % of the longest sequence that the target takes"),
    "early-stop": Scenario(_early_stop, 2, "stop strings that nearly every text meets soon"),
    "max-tokens": Scenario(_max_tokens, 2, "answers of a fixed length; a shorter one is an error"),
    "shared-prefix": Scenario(_shared_prefix, 3, "four long prefixes, each shared by many requests"),
    "distinct": Scenario(_distinct, 2, "prompts as long, that share nothing"),
    "parallel": Scenario(_parallel, 1, "two to four sampled answers to one prompt (n > 1)"),
    "cold": Scenario(_cold, 1, "prompts of which nothing may be in the prefix cache"),
    WARM: Scenario(_warm, 1, "prompts that were asked once before the run"),
    "pressure": Scenario(_pressure, 2, "small prompts, answers so long that the clients together outgrow the pool"),
    "hang-up": Scenario(_hang_up, 1, "clients that close the connection in mid-answer"),
    ISOLATION: Scenario(_isolation, 1, "one prompt by several models, LoRA adapters, cache salts, images"),
}

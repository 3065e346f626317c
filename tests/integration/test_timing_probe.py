"""Can somebody find out by timing whether another one has sent a prompt? With the same salt yes, with another one no.

The attacker has many guesses; half of them the victim has sent. He asks for each once and looks at how long the answer
takes. How well that tells the two kinds apart is the area under the ROC curve (AUC): 1 is always, 0.5 is never.

Where nothing leaks, the AUC of n guesses of each kind has the standard deviation 0.41 / sqrt(n): with 1,200 of each the
band from 0.45 to 0.55 is four of them wide to each side. Guesses of both kinds are asked in one random order, so
that a machine that becomes slower or faster meanwhile treats both alike.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import httpx
import pytest
from builders import NullModel
from openai_server import MODEL, RunningServer, arithmetic_server, byte_level_tokenizer, save_tokenizer

from kvwatch_engine.contracts.step import StepInput
from kvwatch_engine.server.api_keys import ApiKeys

VICTIM, COLLEAGUE, ATTACKER = "v" * 20, "c" * 20, "a" * 20
KEYS = f"""
[keys.victim]
key = "{VICTIM}"
tenant = "blue"
[keys.colleague]
key = "{COLLEAGUE}"
tenant = "blue"
[keys.attacker]
key = "{ATTACKER}"
"""
NUM_PROMPT_TOKENS = 65
SECONDS_PER_TOKEN = 0.0005
"""A step of the model takes that much for each token: a hit saves 64 of them."""
NUM_CONTROL_GUESSES = 200
NUM_FOREIGN_GUESSES = 1200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer())


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[RunningServer]:
    """Serve a model whose steps take as long as their tokens are many; nothing is evicted."""
    key_file = tmp_path / "keys.toml"
    key_file.write_text(KEYS)
    model = NullModel(401)

    def take_time(step: StepInput) -> None:
        time.sleep(len(step.token_ids) * SECONDS_PER_TOKEN)

    model.on_step = take_time
    with arithmetic_server(
        folder,
        model,
        api_keys=ApiKeys(str(key_file)),
        block_size=16,
        num_blocks=20_000,
        max_batch_tokens=128,
    ) as running:
        yield running


class Client:
    """Somebody with a key, on a connection of his own."""

    def __init__(self, server: RunningServer, key: str, salt: str | None) -> None:
        self._http = httpx.Client(
            base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=60, trust_env=False
        )
        self._salt = salt
        self.num_cached_tokens = 0

    def ask(self, prompt: list[int]) -> float:
        """Send a prompt; return how long the answer took."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "cache_salt": self._salt}
        begin = time.perf_counter()
        answer = self._http.post("/v1/completions", json=body)
        seconds = time.perf_counter() - begin
        assert answer.status_code == 200
        self.num_cached_tokens += answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._http.close()


def area_under_roc(hits: list[float], misses: list[float]) -> float:
    """Return how probable it is that an answer to a guess that hits comes sooner than one to a guess that does not."""
    ranked = sorted([(seconds, True) for seconds in hits] + [(seconds, False) for seconds in misses])
    num_misses_before = won = 0
    for _, is_hit in ranked:
        if is_hit:
            won += len(misses) - num_misses_before
        else:
            num_misses_before += 1
    return won / (len(hits) * len(misses))


def probe(victim: Client, attacker: Client, num_guesses: int, seed: int) -> float:
    """Let the victim send half of the guesses; return the attacker's AUC."""
    rng = random.Random(seed)
    guesses = [[rng.randrange(4, 400) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(2 * num_guesses)]
    sent = guesses[:num_guesses]
    for prompt in sent:
        victim.ask(prompt)
    in_order = [(prompt, place < num_guesses) for place, prompt in enumerate(guesses)]
    rng.shuffle(in_order)
    for _ in range(20):  # the attacker's connection is warm before it counts
        attacker.ask([rng.randrange(4, 400) for _ in range(NUM_PROMPT_TOKENS)])
    times: dict[bool, list[float]] = {True: [], False: []}
    for prompt, was_sent in in_order:
        times[was_sent].append(attacker.ask(prompt))
    return area_under_roc(times[True], times[False])


def test_the_area_is_what_it_should_be() -> None:
    assert area_under_roc([1, 2], [3, 4]) == 1
    assert area_under_roc([3, 4], [1, 2]) == 0
    assert area_under_roc([1, 4], [2, 3]) == 0.5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_within_a_tenant_a_hit_can_be_seen(server: RunningServer) -> None:
    """The positive control: the probe finds what is there to be found."""
    with Client(server, VICTIM, None) as victim, Client(server, COLLEAGUE, None) as attacker:
        area = probe(victim, attacker, NUM_CONTROL_GUESSES, 1)
    print(f"same tenant, no salt: AUC {area:.3f}")
    assert area >= 0.9
    assert attacker.num_cached_tokens == NUM_CONTROL_GUESSES * 64


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("attackers_key", "victims_salt", "attackers_salt"),
    [
        pytest.param(ATTACKER, None, None, id="another tenant"),
        pytest.param(COLLEAGUE, "mine", "yours", id="another salt within the tenant"),
        pytest.param(ATTACKER, "mine", "mine", id="another tenant that knows the salt"),
    ],
)
def test_with_another_salt_nothing_can_be_seen(
    server: RunningServer, attackers_key: str, victims_salt: str | None, attackers_salt: str | None
) -> None:
    with Client(server, VICTIM, victims_salt) as victim, Client(server, attackers_key, attackers_salt) as attacker:
        area = probe(victim, attacker, NUM_FOREIGN_GUESSES, 2)
    print(f"another salt: AUC {area:.3f}")
    assert 0.45 <= area <= 0.55
    assert attacker.num_cached_tokens == 0

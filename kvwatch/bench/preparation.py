"""What is asked before the run and not measured: tokens of words, an empty cache, warm prompts, lone answers."""

import asyncio
from collections.abc import Iterable, Sequence

import httpx
import msgspec

from kvwatch.bench.client import Client
from kvwatch.bench.errors import TargetUnreachable
from kvwatch.bench.outcome import RequestOutcome
from kvwatch.bench.plan import fingerprint
from kvwatch.bench.scenarios import ISOLATION, WARM, RequestSpec, Variation
from kvwatch.bench.target import Target
from kvwatch.bench.words import WORDS, TextScale

ASSUMED_TOKENS_PER_WORD = 1.4
"""Where the server does not count tokens."""
MAX_VARIED_MODELS = 4
_RESET_SECONDS = 30.0


async def measure_text(client: Client, limit_tokens: int) -> TextScale:
    """Return how many tokens the target makes of words.

    Every word is asked for once, so that the mean is that of the words, not of a sample; a part is asked for twice in
    a row, which tells the words' tokens from those that the server puts around them.

    Raises:
        TargetUnreachable: it does not answer such a request.
    """
    size = min(64, max(4, limit_tokens // 16))
    parts = [WORDS[start : start + size] for start in range(0, len(WORDS), size)]
    counts = [await _count(client, part) for part in parts]
    twice = await _count(client, parts[0] * 2)
    known = [count for count in counts if count is not None]
    if twice is None or len(known) < len(counts):
        return TextScale(ASSUMED_TOKENS_PER_WORD, 0)
    overhead = max(0, 2 * known[0] - twice)
    tokens_per_word = round((sum(known) - overhead * len(parts)) / len(WORDS), 4)
    if tokens_per_word <= 0:  # it says the same number of every prompt
        return TextScale(ASSUMED_TOKENS_PER_WORD, 0)
    return TextScale(tokens_per_word, overhead)


async def reset_cache(http: httpx.AsyncClient, target: Target, token: str | None) -> str:
    """Empty the prefix cache; return `done`, `not offered`, or why it failed."""
    if target.reset_url is None:
        return "not offered"
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        answer = await http.post(target.reset_url, headers=headers, timeout=_RESET_SECONDS)
    except httpx.HTTPError as error:
        return f"failed: {type(error).__name__}"
    if answer.status_code == 404:
        return "not offered"
    return "done" if answer.is_success else f"failed: status {answer.status_code}"


async def warm_up(client: Client, specs: Iterable[RequestSpec]) -> None:
    """Ask each `warm` prompt once, so that the cache holds it."""
    prompts = {spec.prompt: spec for spec in specs if spec.scenario == WARM}
    for spec in prompts.values():
        await _ask(client, msgspec.structs.replace(spec, max_tokens=1))


async def lone_answers(client: Client, specs: Iterable[RequestSpec]) -> dict[str, list[str]]:
    """Return what each `isolation` request is answered when nothing else runs: fingerprint -> texts."""
    asked = {fingerprint(spec): spec for spec in specs if spec.scenario == ISOLATION}
    answers = {name: await _ask(client, spec) for name, spec in asked.items()}
    return {name: outcome.texts for name, outcome in answers.items() if outcome.status == "ok"}


def variations(models: Sequence[str], *, has_salt: bool, has_images: bool) -> tuple[Variation, ...]:
    """Return what `isolation` varies at a target.

    Args:
        models: Served names, LoRA adapters among them.
        has_salt: Whether it knows cache salts.
        has_images: Whether to show it pictures.
    """
    found = [Variation(f"model {name}", model=name) for name in models[:MAX_VARIED_MODELS]]
    if has_salt:
        found += [Variation(f"salt {salt}", salt=salt) for salt in ("one", "two")]
    if has_images:
        found += [Variation(f"image {number}", image=number) for number in (0, 1)]
    return tuple(found)


async def _count(client: Client, words: Sequence[str]) -> int | None:
    prompt = "".join(f" {word}" for word in words)
    outcome = await _ask(client, RequestSpec(scenario="preparation", prompt=prompt, max_tokens=1))
    if outcome.status != "ok":
        what = f"{outcome.error_kind}: {outcome.error}"
        remedy = "use --endpoint chat" if outcome.error_kind == "http_404" else "see its log"
        raise TargetUnreachable(f"the target lists models but does not answer a first request ({what}); {remedy}")
    return outcome.prompt_tokens


async def _ask(client: Client, spec: RequestSpec) -> RequestOutcome:
    outcome = await client.send(spec, 0.0, lambda: 0.0)
    if outcome.status == "interrupted":
        raise asyncio.CancelledError
    return outcome

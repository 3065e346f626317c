"""What a request must be to be let in: valid, and possible in this engine. Any thread."""

from bisect import bisect_right
from dataclasses import replace

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.contracts.request import GenerationRequest
from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.scheduling.policy import most_blocks


def max_model_len(settings: EngineSettings) -> int:
    """Return the longest possible sequence in tokens: min(model, pool)."""
    capacity = settings.num_usable_blocks
    if settings.windows == (None,):
        return min(settings.max_model_len, capacity * settings.block_size)
    lengths = range(1, settings.max_model_len + 1)  # the last token is counted: a block more at most
    return bisect_right(lengths, capacity, key=lambda length: most_blocks(settings, length, 1, 1))


def numbers_in_force(settings: EngineSettings) -> dict[str, float]:
    """Return the settings in force as numbers; `max_model_len` is what the pool, without pins, allows of it."""
    return {**settings.numbers(), "max_model_len": float(max_unpinned_len(settings))}


def max_unpinned_len(settings: EngineSettings) -> int:
    """Return the longest possible sequence in tokens while nothing is pinned."""
    return max_model_len(replace(settings, num_pinned_blocks=0))


def max_new_tokens(num_prompt_tokens: int, num_sequences: int, settings: EngineSettings) -> int:
    """Return the largest `max_tokens` with which such a request can run; below 1 when it cannot run at all."""
    size, capacity = settings.block_size, settings.num_usable_blocks
    longest = max_model_len(settings) - num_prompt_tokens
    if settings.windows != (None,):
        answers = range(1, max(0, longest) + 1)
        return bisect_right(
            answers, capacity, key=lambda answer: most_blocks(settings, num_prompt_tokens, answer, num_sequences)
        )
    full_prompt_blocks = num_prompt_tokens // size
    blocks_each = full_prompt_blocks + (capacity - full_prompt_blocks) // num_sequences
    return min(longest, blocks_each * size - num_prompt_tokens + 1)


def check_valid(request: GenerationRequest, settings: EngineSettings) -> None:
    """Refuse at once what can never run, instead of queueing it for ever.

    Raises:
        RequestInvalid: so.
    """
    sampling, num_prompt_tokens = request.sampling, len(request.prompt_token_ids)
    if num_prompt_tokens > settings.max_queued_tokens:
        limit = settings.max_queued_tokens
        raise RequestInvalid(
            f"the prompt has {num_prompt_tokens} tokens, but the queue takes {limit}; shorten it, or raise "
            "--max-queued-tokens",
            param="prompt",
            code="context_length_exceeded",
        )
    if num_prompt_tokens == 0:
        raise RequestInvalid("the prompt is empty; it needs at least one token", param="prompt")
    lowest, highest = min(request.prompt_token_ids), max(request.prompt_token_ids)
    if lowest < 0 or highest >= settings.vocab_size:
        wrong = lowest if lowest < 0 else highest
        limit = settings.vocab_size - 1
        raise RequestInvalid(f"token id {wrong} is outside the vocabulary (0 to {limit})", param="prompt")
    _check_images(request)
    if request.guide is not None and sampling.beams is not None:
        raise RequestInvalid("a beam search cannot keep to a grammar; leave one of them out", param="use_beam_search")
    _check_number(sampling, settings)
    if sampling.max_tokens < 1:
        raise RequestInvalid(f"max_tokens is {sampling.max_tokens}; it must be at least 1", param="max_tokens")
    if request.priority < 0:
        raise RequestInvalid(f"priority is {request.priority}; it must be at least 0, which is first", param="priority")
    if request.deadline_seconds is not None and not request.deadline_seconds > 0:
        raise RequestInvalid(
            f"deadline_seconds is {request.deadline_seconds:g}; it must be above 0", param="deadline_seconds"
        )


def _check_number(sampling: SamplingParams, settings: EngineSettings) -> None:
    name, number, limit = _name_of_number(sampling), sampling.num_sequences, settings.max_num_seqs
    if not 1 <= number <= limit:
        raise RequestInvalid(f"{name} is {number}, but 1 to {limit} sequences can run", param=name)
    if sampling.beams is None:
        return
    if not 1 <= sampling.n <= number:
        raise RequestInvalid(f"n is {sampling.n}, but a beam search of width {number} finds 1 to {number}", param="n")
    needed = number + len(sampling.end_token_ids(settings.eos_token_ids))
    if needed > settings.vocab_size:
        raise RequestInvalid(
            f"beam_width is {number}, which takes {needed} tokens with those that end a sequence, but the vocabulary "
            f"has {settings.vocab_size}; lower it",
            param=name,
        )


def _name_of_number(sampling: SamplingParams) -> str:
    """Return the field that says how many sequences a request has."""
    return "n" if sampling.beams is None else "beam_width"


def _check_images(request: GenerationRequest) -> None:
    """Refuse images that do not lie one behind the other in the prompt.

    Raises:
        RequestInvalid: so.
    """
    free = 0
    for image in request.images:
        if image.num_tokens < 1 or not free <= image.position <= image.end <= len(request.prompt_token_ids):
            raise RequestInvalid(
                f"an image has tokens {image.position} to {image.end}, but {free} to {len(request.prompt_token_ids)} "
                "are what is left of the prompt for it",
                param="messages",
            )
        free = image.end


def check_length(request: GenerationRequest, settings: EngineSettings) -> None:
    """Refuse what is too long for the model, or could never end in the pool.

    Raises:
        RequestInvalid: so.
    """
    num_prompt_tokens, n = len(request.prompt_token_ids), request.sampling.num_sequences
    max_tokens = request.sampling.max_tokens
    total, longest = num_prompt_tokens + max_tokens, max_model_len(settings)
    if total > longest:
        raise RequestInvalid(
            f"prompt ({num_prompt_tokens} tokens) and max_tokens ({max_tokens}) are {total} tokens together, but "
            f"the longest possible sequence has {longest}; shorten the prompt or lower max_tokens",
            param="max_tokens" if num_prompt_tokens < longest else "prompt",
            code="context_length_exceeded",
        )
    name, capacity = _name_of_number(request.sampling), settings.num_usable_blocks
    needed = most_blocks(settings, num_prompt_tokens, max_tokens, n)
    if needed > capacity:
        raise RequestInvalid(
            f"{n} sequences of up to {total} tokens may need {needed} blocks, but the pool has {capacity}"
            f"{_beside_pinned(settings)}; lower {name} or max_tokens",
            param=name if n > 1 else "max_tokens",
            code="context_length_exceeded",
        )


def _beside_pinned(settings: EngineSettings) -> str:
    return f" beside {settings.num_pinned_blocks} pinned ones" if settings.num_pinned_blocks else ""

"""`/v1/completions`: from its body to a plan, and from generated text to its shape."""

from collections.abc import Sequence

from msgspec import UNSET, Struct

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.server.beams import beam_params
from kvwatch_engine.server.bodies import decode_body
from kvwatch_engine.server.choice import ChoiceDelta
from kvwatch_engine.server.generation import Job
from kvwatch_engine.server.guided import requested_grammar
from kvwatch_engine.server.logprobs import completion_logprobs, joined
from kvwatch_engine.server.planning import Incoming, Planner
from kvwatch_engine.server.prompt_logprobs import Echo, PromptForm
from kvwatch_engine.server.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from kvwatch_engine.server.protocol.reply import Usage
from kvwatch_engine.server.refusals import refuse_unsupported
from kvwatch_engine.server.sampling import (
    check_prompt_length,
    check_token_id,
    num_choices,
    sampling_params,
    stop_strings,
    too_long,
    wants_prompt_only,
)
from kvwatch_engine.server.shapes import ChunkShape, Head, Plan
from kvwatch_engine.server.tokenizer import Tokenizer

Prompt = str | list[int]


class CompletionPlanner(Planner):
    """Plans completions."""

    operation = "text_completion"

    async def plan(self, incoming: Incoming) -> Plan:
        """Check a body and return what to do; see `Planner.plan`."""
        request = decode_body(incoming.body, CompletionRequest)
        adapter = self.adapter_of(request.model)
        refuse_unsupported(request)
        grammar = requested_grammar(request, self.guides.limits)
        head = self.head(request, "cmpl-", adapter)
        _refuse_combinations(request, num_choices(request, self.settings))
        prompts = self._prompts(request)
        stops = stop_strings(request, self.settings)
        urgency = self.urgency(request)
        # Checked with the shortest prompt before the real ones are tokenised: a bad value costs nothing.
        sampling_params(request, 1, self.bounds())
        tokens = tuple([await self._tokens(prompt) for prompt in prompts])
        for prompt in tokens:
            check_prompt_length(len(prompt), self.max_model_len, "prompt")
            self.prompts.refuse_placeholders(prompt, "prompt")
        sampling = sampling_params(request, max(map(len, tokens)), self.bounds())
        job = Job(
            id=head.id,
            prompts=tokens,
            sampling=sampling,
            stops=stops,
            cache_salt=self.salt(request),
            urgency=urgency,
            adapter=adapter,
            guide=await self.guide(grammar),
            is_prompt_only=wants_prompt_only(request),
        )
        pairs = zip(prompts, tokens, strict=True) if request.echo else ()
        echoes = [Echo(await self._text(prompt), token_ids) for prompt, token_ids in pairs]
        shape = CompletionShape(head, sampling, self.tokenizer, echoes, request.prompt_logprobs)
        return Plan(job=job, shape=shape, is_stream=bool(request.stream))

    def _prompts(self, request: CompletionRequest) -> list[Prompt]:
        prompts = split_prompts(request.prompt)
        limit = self.settings.max_choices
        n = num_choices(request, self.settings)
        beams = beam_params(request, n, self.settings)
        name, each = ("n", n) if beams is None else ("beam_width", beams.width)
        if len(prompts) * each > limit:
            raise RequestInvalid(
                f"prompt has {len(prompts)} prompts, times {name} = {each} choices; the limit is {limit} choices "
                "in all",
                param="prompt",
            )
        if len(prompts) > self.max_prompts:  # more could never be queued, not even when nothing else is
            raise RequestInvalid(
                f"prompt has {len(prompts)} prompts, but the queue takes {self.max_prompts}; send fewer at once, "
                "or raise --max-queued-requests",
                param="prompt",
            )
        return prompts

    async def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            self.log_prompt(prompt)
            return await self.prompts.encode_text(prompt, "prompt")
        if len(prompt) > self.max_model_len:  # before each of them is looked at
            raise too_long(f"prompt has {len(prompt)} tokens", self.max_model_len, "prompt")
        return tuple(check_token_id(token_id, self.model.vocab_size, "prompt") for token_id in prompt)

    async def _text(self, prompt: Prompt) -> str:
        return prompt if isinstance(prompt, str) else await self.prompts.decode(prompt)


def split_prompts(prompt: str | list[str | int | list[int]]) -> list[Prompt]:
    """Return the single prompts of a request.

    Raises:
        RequestInvalid: there is none, or texts and token ids are mixed.
    """
    if isinstance(prompt, str):
        return [prompt]
    token_ids = [entry for entry in prompt if isinstance(entry, int)]
    prompts: list[Prompt] = [entry for entry in prompt if not isinstance(entry, int)]
    if token_ids and prompts:
        raise RequestInvalid("prompt mixes token ids with prompts; send token ids as a list of lists", param="prompt")
    if token_ids:
        return [token_ids]
    if not prompts:
        raise RequestInvalid("prompt is empty; send at least one token", param="prompt")
    return prompts


def _refuse_combinations(request: CompletionRequest, n: int) -> None:
    if request.best_of is not None and request.best_of != n:
        raise RequestInvalid(
            "best_of other than n is not supported by this server; remove it", param="best_of", code="unsupported"
        )


class CompletionShape(ChunkShape):
    """Completions and their chunks."""

    def __init__(
        self,
        head: Head,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        echoes: Sequence[Echo] = (),
        num_prompt_logprobs: int | None = None,
    ) -> None:
        """Create the shape of one answer.

        Args:
            head: what every chunk repeats.
            sampling: the request's parameters.
            tokenizer: names tokens.
            echoes: the prompts, if they shall stand before the generated texts.
            num_prompt_logprobs: `prompt_logprobs` of the request.
        """
        super().__init__(head)
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._prompt_form = (
            None if num_prompt_logprobs is None else PromptForm(num_prompt_logprobs, tokenizer.token_bytes)
        )

    def chunks(self, delta: ChoiceDelta) -> list[Struct]:
        """Return one chunk."""
        return [self._completion([self._choice(delta)])]

    def text_chunk(self, index: int) -> tuple[Struct, str] | None:
        """See `ChunkShape.text_chunk`."""
        if self._sampling.logprobs is not None or self._sampling.beams is not None or self._prompt_form is not None:
            return None
        return self._completion([CompletionChoice(index, "", None, None)]), "text"

    def usage_chunk(self, usage: Usage) -> Struct:
        """See `ChunkShape.usage_chunk`."""
        chunk = self._completion([])
        chunk.usage = usage
        return chunk

    def answer(self, choices: Sequence[ChoiceDelta], usage: Usage) -> Struct:
        """Return the whole completion."""
        whole = self._completion([self._choice(choice) for choice in choices])
        whole.usage = usage
        return whole

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.fingerprint,
            choices=choices,
            usage=self.head.chunk_usage,
        )

    def _choice(self, delta: ChoiceDelta) -> CompletionChoice:
        echo = self._echoes[delta.index // self._sampling.n] if self._echoes else None
        text = echo.text + delta.text if echo is not None and delta.is_first else delta.text
        return CompletionChoice(
            delta.index,
            text,
            self._logprobs(delta, echo),
            delta.finish_reason,
            UNSET if delta.score is None else delta.score,
            UNSET if self._prompt_form is None else self._prompt_form.of(delta.prompt),
        )

    def _logprobs(self, delta: ChoiceDelta, echo: Echo | None) -> CompletionLogprobs | None:
        num_top, bytes_of = self._sampling.logprobs, self._tokenizer.token_bytes
        if num_top is None:
            return None
        num_echoed = 0 if echo is None else len(echo.text)
        generated = completion_logprobs(delta.records, bytes_of, has_top=num_top > 0, first_offset=num_echoed)
        if echo is None or not delta.is_first:
            return generated
        return joined(echo.logprobs(delta.prompt, num_top, bytes_of, self._tokenizer.detokenizer()), generated)

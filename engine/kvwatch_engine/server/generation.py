"""One HTTP request in the engine: submitted, read step by step, and aborted whenever nobody wants it any more."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from msgspec import structs
from starlette.types import Receive

from kvwatch_engine.contracts.adapter import Adapter
from kvwatch_engine.contracts.errors import rejection_reason
from kvwatch_engine.contracts.guidance import Guide
from kvwatch_engine.contracts.image import PromptImage
from kvwatch_engine.contracts.model import ModelInfo
from kvwatch_engine.contracts.request import (
    EngineClient,
    FinishReason,
    GenerationRequest,
    PromptLogprobs,
    RequestOrigin,
    SequenceOutput,
)
from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.server.choice import Choice, ChoiceDelta, PromptOnlyChoice
from kvwatch_engine.server.dispatcher import Mailbox, OutputDispatcher
from kvwatch_engine.server.errors import GenerationFailed, GuideGaveUp
from kvwatch_engine.server.protocol.reply import PromptTokensDetails, Usage
from kvwatch_engine.server.settings import ServerSettings
from kvwatch_engine.server.stop_strings import StopMatcher, StopStrings
from kvwatch_engine.server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Urgency:
    """Who goes first, and how long anybody cares; see `GenerationRequest`."""

    priority: int = 0
    deadline_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one HTTP request wants from the engine: each prompt continued `sampling.n` times.

    Choice `prompt * n + sequence` of the answer is that sequence of that prompt.
    """

    id: str
    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    stops: tuple[str, ...]
    cache_salt: str = ""
    tenant_salt: str = ""
    images: tuple[PromptImage, ...] = ()
    """Images in its only prompt."""
    urgency: Urgency = Urgency()
    adapter: Adapter | None = None
    """LoRA adapter that computes it; none is the base model."""
    guide: Guide | None = None
    """Grammar that each text keeps to; none if they are free."""
    shown_tokens: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that have a text all the same."""
    is_prompt_only: bool = False
    """Whether nothing is shown of what is generated."""
    origin: RequestOrigin = field(default_factory=RequestOrigin)

    def requests(self) -> list[GenerationRequest]:
        """Return one engine request for each prompt, with ids derived from the job's."""
        names = [self.id] if len(self.prompts) == 1 else [f"{self.id}-{place}" for place in range(len(self.prompts))]
        return [
            GenerationRequest(
                request_id=name,
                prompt_token_ids=prompt,
                sampling=self.sampling,
                images=self.images,
                cache_salt=self.cache_salt,
                tenant_salt=self.tenant_salt,
                origin=self.origin,
                load_id=None if self.adapter is None else self.adapter.load_id,
                guide=self.guide,
                priority=self.urgency.priority,
                deadline_seconds=self.urgency.deadline_seconds,
            )
            for name, prompt in zip(names, self.prompts, strict=True)
        ]


class Run:
    """A job under way. Event loop only."""

    def __init__(self, job: Job, mailbox: Mailbox, engine: EngineClient, keepalive_seconds: float) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._keepalive_seconds = keepalive_seconds
        self._num_prompt_tokens = sum(map(len, job.prompts))
        self._is_end_in_text = bool(job.stops)
        self._has_prompt_logprobs = job.sampling.prompt_logprobs is not None
        self._cached: dict[str, int] = {}
        self._scored: dict[str, list[PromptLogprobs]] = {}
        self.choices: dict[tuple[str, int], Choice] = {}
        """Request id and sequence -> choice."""

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        for choice in self.choices.values():  # noqa: SIM110 - asked for every token
            if choice.finish_reason is None:
                return False
        return True

    async def deltas(self) -> AsyncIterator[list[ChoiceDelta]]:
        """Give what each step added, until all choices have ended; an empty list after a long silence.

        Raises:
            ClientGone: the client hung up.
            GenerationFailed: the engine ended the request.
        """
        while not self.is_finished:
            outputs = await self._mailbox.get(self._keepalive_seconds)
            found = [delta for output in outputs if (delta := self.add(output)) is not None]
            if found or not outputs:
                yield found

    def usage(self) -> Usage:
        """Return the token counts so far."""
        generated = sum(choice.num_tokens for choice in self.choices.values())
        details = PromptTokensDetails(sum(self._cached.values()))
        return Usage(self._num_prompt_tokens, generated, self._num_prompt_tokens + generated, details)

    def give_to(self, taker: Callable[[SequenceOutput], bool]) -> None:
        """Offer outputs to `taker` while `deltas` waits for them; see `Mailbox.taker`.

        What ends a choice must not be taken, since `deltas` has to see it; so nothing is offered where a text may be
        its own end. Nor is anything with log-probabilities of a prompt, which take long to write.
        """
        if not self._is_end_in_text and not self._has_prompt_logprobs:
            self._mailbox.taker = taker

    def add(self, output: SequenceOutput) -> ChoiceDelta | None:
        """Add an output to its choice; return what can be shown of it, None when there is nothing yet.

        Raises:
            GenerationFailed: the engine ended the request.
        """
        if output.finish_reason is not None:
            _raise_if_failed(output)
        if output.prompt_logprobs is not None:
            self._scored.setdefault(output.request_id, []).append(output.prompt_logprobs)
            return None
        if output.num_cached_tokens > self._cached.get(output.request_id, 0):
            self._cached[output.request_id] = output.num_cached_tokens
        choice = self.choices[output.request_id, output.sequence]
        was_open = choice.finish_reason is None
        delta = choice.add(output)
        if delta is not None and delta.is_first and self._scored:
            delta = structs.replace(delta, prompt=tuple(self._scored.get(output.request_id, ())))
        if was_open and choice.is_stopped_by_string and output.finish_reason is None:
            self._engine.stop_sequence(output.request_id, output.sequence)
        return delta


class Generations:
    """Starts jobs."""

    def __init__(
        self,
        engine: EngineClient,
        dispatcher: OutputDispatcher,
        model: ModelInfo,
        tokenizer: Tokenizer,
        settings: ServerSettings,
    ) -> None:
        self._engine = engine
        self._dispatcher = dispatcher
        self._model = model
        self._tokenizer = tokenizer
        self._settings = settings

    def note_rejection(self, request_id: str, error: Exception, origin: RequestOrigin, arrived_ns: int) -> None:
        """Count a request that was refused before it became a job. It arrived at that monotonic time in ns."""
        self._engine.note_rejection(request_id, rejection_reason(error), origin, arrived_ns)

    @asynccontextmanager
    async def start(self, job: Job, receive: Receive) -> AsyncIterator[Run]:
        """Submit a job; whatever ends the block, nothing of the job stays in the engine.

        Args:
            job: what to generate.
            receive: the request's ASGI channel, its body already read: watched for the client's hang-up.

        Raises:
            RequestInvalid: a prompt can never run.
            EngineOverloaded: the engine's queue is full.
        """
        names: list[str] = []
        mailbox = Mailbox(self._settings.max_unread_tokens, lambda: self._abort(names))
        run = Run(job, mailbox, self._engine, self._settings.keepalive_seconds)
        watcher = asyncio.create_task(_watch(receive, mailbox))
        try:
            for place, request in enumerate(job.requests()):
                self._add_choices(run, job, request.request_id, place)
                names.append(request.request_id)
                self._dispatcher.open(request.request_id, mailbox)
                self._engine.submit(request)
            yield run
        finally:
            watcher.cancel()
            mailbox.close()
            for name in names:
                self._dispatcher.close(name)
            if not run.is_finished:
                self._abort(names)

    def _abort(self, names: list[str]) -> None:
        for name in names:
            self._engine.abort(name)

    def _add_choices(self, run: Run, job: Job, name: str, place: int) -> None:
        stops = StopStrings(job.stops)
        ends = frozenset(self._model.eos_token_ids) | frozenset(job.sampling.stop_token_ids)
        make = PromptOnlyChoice if job.is_prompt_only else Choice
        for sequence in range(job.sampling.n):
            run.choices[name, sequence] = make(
                place * job.sampling.n + sequence,
                self._tokenizer.detokenizer(job.shown_tokens),
                StopMatcher(stops),
                job.sampling,
                ends,
            )


async def _watch(receive: Receive, mailbox: Mailbox) -> None:
    """Wait for the client to hang up."""
    while (await receive())["type"] != "http.disconnect":
        pass
    mailbox.hang_up("the client hung up")


def _raise_if_failed(output: SequenceOutput) -> None:
    if output.finish_reason is FinishReason.DEADLINE:
        raise GenerationFailed(
            f"{output.error}; ask for fewer tokens, or give it more time with deadline_seconds",
            status=504,
            code="deadline_exceeded",
        )
    if output.finish_reason is FinishReason.ABORT:
        raise GenerationFailed(
            "the server ended this request before it was complete; send it again", status=503, code="aborted"
        )
    if output.is_guide_error:
        raise GuideGaveUp(output.error)
    if output.finish_reason is FinishReason.ERROR:
        # The engine's own words may name files of this machine; they are in its log.
        raise GenerationFailed("the engine failed on this request", status=500, code="engine_error")

"""`/v1/chat/completions`: from its body to a plan, and from generated text to its shape."""

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType

from kvwatch_engine.server.bodies import decode_body
from kvwatch_engine.server.choice import ChoiceDelta
from kvwatch_engine.server.conversation import conversation
from kvwatch_engine.server.generation import Job
from kvwatch_engine.server.guided import requested_grammar
from kvwatch_engine.server.logprobs import BytesOf, chat_logprobs
from kvwatch_engine.server.planning import Planner
from kvwatch_engine.server.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    ChunkChoice,
    Delta,
)
from kvwatch_engine.server.protocol.reply import Usage
from kvwatch_engine.server.refusals import refuse_unsupported, template_variables
from kvwatch_engine.server.sampling import check_prompt_length, sampling_params, stop_strings
from kvwatch_engine.server.shapes import Head, Plan


class ChatPlanner(Planner):
    """Plans chat completions."""

    operation = "chat"

    async def plan(self, body: bytes) -> Plan:
        """Check a body and return what to do; see `Planner.plan`."""
        request = decode_body(body, ChatRequest)
        adapter = self.adapter_of(request.model)
        refuse_unsupported(request)
        grammar = requested_grammar(request, self.guides.limits)
        head = self.head(request, "chatcmpl", adapter)
        stops = stop_strings(request, self.settings)
        urgency = self.urgency(request)
        # Checked with the shortest prompt before the real one is tokenised: a bad value costs nothing.
        sampling_params(request, 1, self.bounds())
        turns = conversation(
            request.messages, takes_images=self.model.images is not None, max_model_len=self.max_model_len
        )
        prompt = await self.prompts.encode_chat(turns, template_variables(request.chat_template_kwargs))
        self.log_prompt(prompt.text)
        check_prompt_length(len(prompt.token_ids), self.max_model_len, "messages")
        sampling = sampling_params(request, len(prompt.token_ids), self.bounds())
        job = Job(
            id=head.id,
            prompts=(prompt.token_ids,),
            images=prompt.images,
            sampling=sampling,
            stops=stops,
            cache_salt=self.salt(request),
            urgency=urgency,
            adapter=adapter,
            guide=await self.guide(grammar),
        )
        bytes_of = self.tokenizer.token_bytes if sampling.logprobs is not None else None
        return Plan(job=job, shape=ChatShape(head, bytes_of), is_stream=bool(request.stream))


class ChatShape:
    """Chat completions and their chunks."""

    def __init__(self, head: Head, bytes_of: BytesOf | None) -> None:
        """Create the shape of one answer.

        Args:
            head: what every chunk repeats.
            bytes_of: gives the bytes of a token; none when no log-probabilities were asked for.
        """
        self.head = head
        self._bytes_of = bytes_of

    def chunks(self, delta: ChoiceDelta) -> list[Struct]:
        """Return the role before the first text, the text, and the reason after the last."""
        choices: list[ChunkChoice] = []
        if delta.is_first:
            choices.append(ChunkChoice(delta.index, Delta(role="assistant", content="")))
        if delta.text or delta.records:
            choices.append(ChunkChoice(delta.index, Delta(content=delta.text), self._logprobs(delta)))
        if delta.finish_reason is not None:
            choices.append(ChunkChoice(delta.index, Delta(), None, delta.finish_reason, _score(delta)))
        return [self._chunk([choice]) for choice in choices]

    def usage_chunk(self, usage: Usage) -> Struct:
        """Return the chunk without choices that carries the usage."""
        chunk = self._chunk([])
        chunk.usage = usage
        return chunk

    def answer(self, choices: Sequence[ChoiceDelta], usage: Usage) -> Struct:
        """Return the whole completion."""
        return ChatCompletion(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.fingerprint,
            choices=[
                ChatChoice(
                    choice.index,
                    AnswerMessage(choice.text),
                    self._logprobs(choice),
                    choice.finish_reason or "stop",
                    _score(choice),
                )
                for choice in choices
            ],
            usage=usage,
        )

    def _chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.fingerprint,
            choices=choices,
            usage=self.head.chunk_usage,
        )

    def _logprobs(self, delta: ChoiceDelta) -> ChatLogprobs | None:
        return None if self._bytes_of is None else chat_logprobs(delta.records, self._bytes_of)


def _score(delta: ChoiceDelta) -> float | UnsetType:
    return UNSET if delta.score is None else delta.score

"""`/v1/responses`: from its body to a plan, with the conversation that it continues."""

import itertools

import msgspec

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.contracts.request import EngineClient
from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.guidance import GuideCompiler
from kvwatch_engine.server.bodies import decode_body
from kvwatch_engine.server.conversation import TextPart, Turn
from kvwatch_engine.server.conversation_planning import ConversationPlanner
from kvwatch_engine.server.errors import shorten
from kvwatch_engine.server.guided import requested_grammar
from kvwatch_engine.server.models import ServedModels
from kvwatch_engine.server.planning import Incoming
from kvwatch_engine.server.prompts import ChatPrompt, PromptEncoder
from kvwatch_engine.server.protocol.responses import (
    FormatEcho,
    InputItem,
    Response,
    ResponseRequest,
    ResponseToolChoice,
    TextEcho,
)
from kvwatch_engine.server.refusals import refuse_unsupported, template_variables
from kvwatch_engine.server.responses.fields import check_fields, response_format, response_offer
from kvwatch_engine.server.responses.items import normal_items, num_parts, turns_of
from kvwatch_engine.server.responses.output import ResponseOutput
from kvwatch_engine.server.responses.shape import ResponseShape
from kvwatch_engine.server.responses.store import KeptItem, KeptResponse, Owner, ResponseStore, Transcript, owner_of
from kvwatch_engine.server.sampling import check_prompt_length, too_long
from kvwatch_engine.server.settings import ServerSettings
from kvwatch_engine.server.shapes import Head, Plan
from kvwatch_engine.server.tokenizer import Tokenizer
from kvwatch_engine.server.tools.offer import Offer

_ANSWER_SHARE = 8
"""`truncation: auto` leaves an eighth of the context for the answer, if the request does not say how much."""
_FIELD = "input"
_CUT_CALL = ("function_call", "incomplete")

_decode_item = msgspec.json.Decoder(InputItem).decode


class ResponsePlanner(ConversationPlanner):
    """Plans responses, and keeps those that have ended."""

    operation = "chat"

    def __init__(  # noqa: PLR0913 - what every planner needs, and the store
        self,
        engine: EngineClient,
        models: ServedModels,
        tokenizer: Tokenizer,
        prompts: PromptEncoder,
        guides: GuideCompiler,
        settings: ServerSettings,
        store: ResponseStore,
    ) -> None:
        """Create it; `store` keeps the responses."""
        super().__init__(engine, models, tokenizer, prompts, guides, settings)
        self._store = store

    async def plan(self, incoming: Incoming) -> Plan:
        """Check a body and return what to do; see `Planner.plan`."""
        request = decode_body(incoming.body, ResponseRequest)
        adapter = self.adapter_of(request.model)
        check_fields(request)
        refuse_unsupported(request)
        limits = self.guides.limits
        offer = response_offer(request, limits)
        grammar = self.grammar(request, offer, requested_grammar(request, limits, response_format(request, limits)))
        head = self.head(request, "resp_", adapter)
        self.check_values(request)
        owner = owner_of(incoming.caller)
        before = self._previous(request.previous_response_id, owner)
        given = normal_items(request.input, lambda item_id: self._kept_item(item_id, owner))
        prompt = await self._prompt(request, given, before, offer)
        job = await self.job(request, head, prompt, adapter=adapter, offer=offer, grammar=grammar)
        draft = _draft(request, head, job.sampling, is_kept=request.store is not False and not self._store.is_off)

        def keep(response: Response) -> None:
            if not draft.store:
                return
            items = [KeptItem(item.id or "", msgspec.json.encode(item)) for item in (*given, *response.output)]
            transcript = Transcript(None if before is None else before.transcript, owner, items)
            self._store.keep(KeptResponse(response.id, msgspec.json.encode(response), len(given), transcript))

        output = ResponseOutput(
            reader=None if offer is None else self.readers(offer)(),
            bytes_of=None if job.sampling.logprobs is None else self.tokenizer.token_bytes,
        )
        return Plan(job=job, shape=ResponseShape(draft, output, keep), is_stream=bool(request.stream))

    def _previous(self, response_id: str | None, owner: Owner | None) -> KeptResponse | None:
        if response_id is None:
            return None
        found = self._store.find(response_id, owner)
        if found is None:
            raise RequestInvalid(
                f"previous_response_id is {shorten(response_id)!r}, which is not kept (any more); send the whole "
                "conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found

    def _kept_item(self, item_id: str, owner: Owner | None) -> InputItem | None:
        found = self._store.find_item(item_id, owner)
        return None if found is None else _decode_item(found.body)

    async def _prompt(
        self, request: ResponseRequest, given: list[InputItem], before: KeptResponse | None, offer: Offer | None
    ) -> ChatPrompt:
        is_cut = request.truncation == "auto"
        turns = self._turns(given, before, is_cut=is_cut)
        fixed = [Turn("system", (TextPart(request.instructions, "instructions"),))] if request.instructions else []
        variables = template_variables(request.chat_template_kwargs)
        if is_cut:
            limit = self.max_model_len - (request.max_output_tokens or -(-self.max_model_len // _ANSWER_SHARE))
            num_beyond = await self.prompts.num_beyond(fixed, turns, variables, offer, limit, _FIELD)
            if num_beyond is None:
                raise too_long(f"even its newest items alone have more than {limit} tokens", self.max_model_len, _FIELD)
            turns = turns[num_beyond:]
        prompt = await self.prompts.encode_chat([*fixed, *turns], variables, offer=offer, param=_FIELD)
        check_prompt_length(len(prompt.token_ids), self.max_model_len, _FIELD)
        return prompt

    def _turns(self, given: list[InputItem], before: KeptResponse | None, *, is_cut: bool) -> list[Turn]:
        """Return the whole conversation, but for items that are certain not to fit where it may be cut."""
        limit = self.max_model_len
        newest = [] if before is None else list(itertools.islice(before.transcript.backwards(), limit + 1))
        kept = [_decode_item(item.body) for item in reversed(newest)]
        # A call that was cut short has arguments that nobody can read.
        items = [(item, "previous_response_id") for item in kept if (item.type, item.status) != _CUT_CALL]
        items += [(item, f"{_FIELD}[{place}]") for place, item in enumerate(given)]
        if is_cut:
            items = items[-limit:]
        elif (found := num_parts([item for item, _ in items])) > limit:
            raise too_long(f"there are {found} items and parts of items", limit, _FIELD)
        return turns_of(items, takes_images=self.model.images is not None)


def _draft(request: ResponseRequest, head: Head, sampling: SamplingParams, *, is_kept: bool) -> Response:
    """Return the response before anything was generated."""
    wanted = request.text.format if request.text is not None else None
    choice: str | ResponseToolChoice = "auto" if request.tool_choice is None else request.tool_choice
    return Response(
        id=head.id,
        created_at=head.created,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        model=head.model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        safety_identifier=request.safety_identifier,
        store=is_kept,
        system_fingerprint=head.fingerprint,
        temperature=sampling.temperature,
        text=TextEcho(
            FormatEcho("text")
            if wanted is None
            else FormatEcho(wanted.type, wanted.name, wanted.description, wanted.schema, wanted.strict)
        ),
        tool_choice=choice,
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=sampling.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
    )

"""`/v1/chat/completions`: from its body to a plan."""

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.guidance import Grammar
from kvwatch_engine.server.bodies import decode_body
from kvwatch_engine.server.chat_shape import ChatShape
from kvwatch_engine.server.conversation import conversation
from kvwatch_engine.server.generation import Job
from kvwatch_engine.server.guided import refuse_beside, requested_grammar
from kvwatch_engine.server.logprobs import BytesOf
from kvwatch_engine.server.planning import Planner
from kvwatch_engine.server.prompt_logprobs import PromptForm
from kvwatch_engine.server.protocol.chat import ChatRequest
from kvwatch_engine.server.refusals import refuse_unsupported, template_variables
from kvwatch_engine.server.sampling import check_prompt_length, sampling_params, stop_strings
from kvwatch_engine.server.shapes import Head, Plan
from kvwatch_engine.server.tool_shape import ToolShape
from kvwatch_engine.server.tools.offer import Offer, offer_of
from kvwatch_engine.server.tools.reader import ToolReader


class ChatPlanner(Planner):
    """Plans chat completions."""

    operation = "chat"

    async def plan(self, body: bytes) -> Plan:
        """Check a body and return what to do; see `Planner.plan`."""
        request = decode_body(body, ChatRequest)
        adapter = self.adapter_of(request.model)
        refuse_unsupported(request)
        offer = offer_of(request.tools, request.tool_choice, request.parallel_tool_calls, self.guides.limits)
        grammar = self._grammar(request, offer)
        head = self.head(request, "chatcmpl", adapter)
        stops = stop_strings(request, self.settings)
        urgency = self.urgency(request)
        # Checked with the shortest prompt before the real one is tokenised: a bad value costs nothing.
        sampling_params(request, 1, self.bounds())
        turns = conversation(
            request.messages, takes_images=self.model.images is not None, max_model_len=self.max_model_len
        )
        prompt = await self.prompts.encode_chat(turns, template_variables(request.chat_template_kwargs), offer=offer)
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
            shown_tokens=self._shown_tokens() if offer is not None else {},
        )
        bytes_of = self.tokenizer.token_bytes if sampling.logprobs is not None else None
        num_top = request.prompt_logprobs
        form = None if num_top is None else PromptForm(num_top, self.tokenizer.token_bytes)
        shape = ChatShape(head, bytes_of, form) if offer is None else self._tool_shape(head, bytes_of, offer, form)
        return Plan(job=job, shape=shape, is_stream=bool(request.stream))

    def _grammar(self, request: ChatRequest, offer: Offer | None) -> Grammar | None:
        """Return what the text must be: what the request says, or calls if there have to be some."""
        grammar = requested_grammar(request, self.guides.limits)
        if offer is None:
            return grammar
        if grammar is not None:
            raise RequestInvalid(
                f"{grammar.param} does not go together with tools, whose calls are none of such texts; remove one, or "
                "set tool_choice to none",
                param=grammar.param,
            )
        calls = self.prompts.tools.grammar(offer, self._token_of_grammar)
        if calls is not None:
            refuse_beside(request, calls)
        return calls

    def _token_of_grammar(self, marker: str) -> int | None:
        """Return the token that a grammar must name instead of its text; none if the text will do."""
        token_id = self.tokenizer.id_of(marker)
        return token_id if token_id is not None and self.guides.has_no_text(token_id) else None

    def _shown_tokens(self) -> dict[int, str]:
        """Return the special tokens that belong to calls."""
        ids = {self.tokenizer.special_id(marker): marker for marker in self.prompts.tools.family.markers}
        return {token_id: marker for token_id, marker in ids.items() if token_id is not None}

    def _tool_shape(
        self, head: Head, bytes_of: BytesOf | None, offer: Offer, prompt_form: PromptForm | None
    ) -> ToolShape:
        family, max_calls = self.prompts.tools.family, None if offer.is_parallel else 1
        return ToolShape(head, bytes_of, lambda: ToolReader(family, offer.names, max_calls), prompt_form)

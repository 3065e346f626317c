"""`/v1/chat/completions`: from its body to a plan."""

from kvwatch_engine.server.bodies import decode_body
from kvwatch_engine.server.chat_shape import ChatShape
from kvwatch_engine.server.conversation import conversation
from kvwatch_engine.server.conversation_planning import ConversationPlanner
from kvwatch_engine.server.guided import requested_grammar
from kvwatch_engine.server.planning import Incoming
from kvwatch_engine.server.prompt_logprobs import PromptForm
from kvwatch_engine.server.protocol.chat import ChatRequest
from kvwatch_engine.server.refusals import refuse_unsupported, template_variables
from kvwatch_engine.server.sampling import check_prompt_length
from kvwatch_engine.server.shapes import Plan
from kvwatch_engine.server.tool_shape import ToolShape
from kvwatch_engine.server.tools.offer import offer_of


class ChatPlanner(ConversationPlanner):
    """Plans chat completions."""

    operation = "chat"

    async def plan(self, incoming: Incoming) -> Plan:
        """Check a body and return what to do; see `Planner.plan`."""
        request = decode_body(incoming.body, ChatRequest)
        adapter = self.adapter_of(request.model)
        refuse_unsupported(request)
        limits = self.guides.limits
        offer = offer_of(request.tools, request.tool_choice, request.parallel_tool_calls, limits)
        grammar = self.grammar(request, offer, requested_grammar(request, limits))
        head = self.head(request, "chatcmpl-", adapter)
        self.check_values(request)
        turns = conversation(
            request.messages, takes_images=self.model.images is not None, max_model_len=self.max_model_len
        )
        prompt = await self.prompts.encode_chat(turns, template_variables(request.chat_template_kwargs), offer=offer)
        check_prompt_length(len(prompt.token_ids), self.max_model_len, "messages")
        job = await self.job(request, head, prompt, adapter=adapter, offer=offer, grammar=grammar)
        bytes_of = self.tokenizer.token_bytes if job.sampling.logprobs is not None else None
        num_top = request.prompt_logprobs
        form = None if num_top is None else PromptForm(num_top, self.tokenizer.token_bytes)
        shape = (
            ChatShape(head, bytes_of, form) if offer is None else ToolShape(head, bytes_of, self.readers(offer), form)
        )
        return Plan(job=job, shape=shape, is_stream=bool(request.stream))

"""What the planners of conversations share, whatever form their messages have: chat completions and responses."""

from collections.abc import Callable

from kvwatch_engine.contracts.adapter import Adapter
from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.guidance import Grammar
from kvwatch_engine.server.generation import Job
from kvwatch_engine.server.guided import refuse_beside
from kvwatch_engine.server.planning import Planner
from kvwatch_engine.server.prompts import ChatPrompt
from kvwatch_engine.server.protocol.chat import ChatRequest
from kvwatch_engine.server.protocol.responses import ResponseRequest
from kvwatch_engine.server.sampling import sampling_params, stop_strings
from kvwatch_engine.server.shapes import Head
from kvwatch_engine.server.tools.offer import Offer
from kvwatch_engine.server.tools.reader import ToolReader

ConversationRequest = ChatRequest | ResponseRequest


class ConversationPlanner(Planner):
    """Plans answers to conversations, in which functions may be called."""

    def check_values(self, request: ConversationRequest) -> None:
        """Check what can be checked before the prompt is tokenised: a bad value costs nothing.

        Raises:
            RequestInvalid: a value is out of its range.
        """
        stop_strings(request, self.settings)
        self.urgency(request)
        self.salt(request)
        sampling_params(request, 1, self.bounds())

    async def job(
        self,
        request: ConversationRequest,
        head: Head,
        prompt: ChatPrompt,
        *,
        adapter: Adapter | None,
        offer: Offer | None,
        grammar: Grammar | None,
    ) -> Job:
        """Return what the engine is to do.

        Raises:
            RequestInvalid: prompt and answer do not fit, or the grammar cannot be compiled.
            EngineOverloaded: too many grammars wait to be compiled.
        """
        self.log_prompt(prompt.text)
        return Job(
            id=head.id,
            prompts=(prompt.token_ids,),
            images=prompt.images,
            sampling=sampling_params(request, len(prompt.token_ids), self.bounds()),
            stops=stop_strings(request, self.settings),
            cache_salt=self.salt(request),
            urgency=self.urgency(request),
            adapter=adapter,
            guide=await self.guide(grammar),
            shown_tokens=self._shown_tokens() if offer is not None else {},
        )

    def grammar(self, request: ConversationRequest, offer: Offer | None, requested: Grammar | None) -> Grammar | None:
        """Return what the text must be: what the request says, or calls if there have to be some.

        Raises:
            RequestInvalid: it says both, or something beside that cannot be kept.
        """
        if offer is None:
            return requested
        if requested is not None:
            raise RequestInvalid(
                f"{requested.param} does not go together with tools, whose calls are none of such texts; remove one, "
                "or set tool_choice to none",
                param=requested.param,
            )
        calls = self.prompts.tools.grammar(offer, self._token_of_grammar)
        if calls is not None:
            refuse_beside(request, calls)
        return calls

    def readers(self, offer: Offer) -> Callable[[], ToolReader]:
        """Return what begins to read a text in which there may be calls."""
        family, max_calls = self.prompts.tools.family, None if offer.is_parallel else 1
        return lambda: ToolReader(family, offer.names, max_calls)

    def _token_of_grammar(self, marker: str) -> int | None:
        """Return the token that a grammar must name instead of its text; none if the text will do."""
        token_id = self.tokenizer.id_of(marker)
        return token_id if token_id is not None and self.guides.has_no_text(token_id) else None

    def _shown_tokens(self) -> dict[int, str]:
        """Return the special tokens that belong to calls."""
        ids = {self.tokenizer.special_id(marker): marker for marker in self.prompts.tools.family.markers}
        return {token_id: marker for token_id, marker in ids.items() if token_id is not None}

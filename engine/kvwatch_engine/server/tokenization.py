"""`/tokenize` and `/detokenize`: what the server makes of a prompt, without generating anything."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.guidance import GuidanceLimits
from kvwatch_engine.server.bodies import decode_body, read_body
from kvwatch_engine.server.conversation import conversation
from kvwatch_engine.server.models import ServedModels, json_response
from kvwatch_engine.server.prompts import PromptEncoder
from kvwatch_engine.server.protocol.tokenization import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from kvwatch_engine.server.refusals import template_variables
from kvwatch_engine.server.sampling import check_token_id, too_long
from kvwatch_engine.server.settings import ServerSettings
from kvwatch_engine.server.tokenizer import Tokenizer
from kvwatch_engine.server.tools.offer import offer_of

_NOT_SUPPORTED: dict[str, tuple[object, ...]] = {
    "chat_template": (),
    "continue_final_message": (False,),
    "mm_processor_kwargs": ({},),
}
"""Fields that would change the answer, and values of them that ask for nothing."""


class Tokenization:
    """Tokens of prompts as generation makes them. Event loop only."""

    def __init__(
        self,
        models: ServedModels,
        tokenizer: Tokenizer,
        prompts: PromptEncoder,
        max_model_len: Callable[[], int],
        limits: GuidanceLimits,
    ) -> None:
        self._models = models
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._max_model_len = max_model_len
        self._limits = limits

    async def tokenize(self, body: bytes) -> TokenizeAnswer:
        """Return the tokens of a text or a conversation.

        Raises:
            RequestInvalid: neither or both are given, or it is too long.
            UnknownModel: it names a model that is not served.
            EngineOverloaded: too many prompts wait to be tokenised.
        """
        request = decode_body(body, TokenizeRequest)
        self._find(request.model)
        for name, harmless in _NOT_SUPPORTED.items():
            value = getattr(request, name)
            if value is not None and value not in harmless:
                raise RequestInvalid(
                    f"{name} is not supported by this server; remove it", param=name, code="unsupported"
                )
        tokens = await self._tokens(request)
        names = [self._tokenizer.name_of(token) for token in tokens] if request.return_token_strs else None
        return TokenizeAnswer(
            count=len(tokens), max_model_len=self._max_model_len(), tokens=list(tokens), token_strs=names
        )

    async def detokenize(self, body: bytes) -> DetokenizeAnswer:
        """Return the text of tokens.

        Raises:
            RequestInvalid: a token is none of the model's, or there are more than fit.
            UnknownModel: it names a model that is not served.
            EngineOverloaded: too many prompts wait to be tokenised.
        """
        request = decode_body(body, DetokenizeRequest)
        self._find(request.model)
        limit = self._max_model_len()
        if len(request.tokens) > limit:
            raise too_long(f"tokens has {len(request.tokens)} tokens", limit, "tokens")
        for token_id in request.tokens:
            check_token_id(token_id, self._models.base.vocab_size, "tokens")
        return DetokenizeAnswer(prompt=await self._prompts.decode(request.tokens, skip_special_tokens=False))

    async def _tokens(self, request: TokenizeRequest) -> tuple[int, ...]:
        if (request.prompt is None) == (request.messages is None):
            raise RequestInvalid("send either prompt or messages", param="prompt")
        if request.prompt is not None:
            add_special_tokens = request.add_special_tokens is not False
            return await self._prompts.encode_text(request.prompt, "prompt", add_special_tokens=add_special_tokens)
        if request.add_special_tokens:
            raise RequestInvalid(
                "add_special_tokens is not supported for messages: their template writes what the model wants",
                param="add_special_tokens",
                code="unsupported",
            )
        images = self._models.base.images
        turns = conversation(
            request.messages or [], takes_images=images is not None, max_model_len=self._max_model_len()
        )
        prompt = await self._prompts.encode_chat(
            turns,
            template_variables(request.chat_template_kwargs),
            offer=offer_of(request.tools, None, None, self._limits),
            add_generation_prompt=request.add_generation_prompt is not False,
        )
        return prompt.token_ids

    def _find(self, name: str | None) -> None:
        if name is not None:
            self._models.find(name)


def tokenization_routes(tokenization: Tokenization, settings: ServerSettings) -> list[Route]:
    """Return the two routes."""

    async def tokenize(request: Request) -> Response:
        return json_response(await tokenization.tokenize(await read_body(request, settings)))

    async def detokenize(request: Request) -> Response:
        return json_response(await tokenization.detokenize(await read_body(request, settings)))

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]

"""Chat templates and tokenisation off the event loop, lengths checked first.

A text that cannot fit is refused before it costs anything: a token has at most so many characters as the longest one
of the vocabulary, so the number of characters bounds the number of tokens from below.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from kvwatch_engine.contracts.errors import EngineOverloaded, RequestInvalid
from kvwatch_engine.contracts.image import PromptImage
from kvwatch_engine.server.chat_template import ChatMessage
from kvwatch_engine.server.conversation import Turn, images_of
from kvwatch_engine.server.image_prompts import ImagePrompts
from kvwatch_engine.server.sampling import check_prompt_length, is_too_long, too_long
from kvwatch_engine.server.settings import ServerSettings
from kvwatch_engine.server.tokenizer import Tokenizer
from kvwatch_engine.server.tools.offer import Offer
from kvwatch_engine.server.tools.prompting import ToolPrompting
from kvwatch_engine.server.truncation import first_that_fits

_SHRINKING = 4
"""How much a normaliser may shorten a text (composed characters) before it is cut into tokens."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt of a conversation."""

    text: str
    """As the template wrote it: an image is a single placeholder."""
    token_ids: tuple[int, ...]
    images: tuple[PromptImage, ...] = ()


class _LaidOut(NamedTuple):
    """A prompt before its images are decoded."""

    text: str
    token_ids: tuple[int, ...]
    image_begins: list[int]


class PromptEncoder:
    """Turns prompts into token ids in a few threads of its own. Methods belong to the event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: ServerSettings,
        max_model_len: Callable[[], int],
        images: ImagePrompts | None = None,
        tools: ToolPrompting | None = None,
    ) -> None:
        """Start the threads.

        Args:
            tokenizer: the model's.
            settings: limits.
            max_model_len: gives the longest sequence in tokens.
            images: what images in prompts need; none if the model takes none.
            tools: how its template takes tools; found out if it is not given.
        """
        self.tools = tools or ToolPrompting.of_template(tokenizer.chat_template)
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._max_pending = settings.max_pending_prompts
        self._num_pending = 0
        self._images = images
        self._max_pending_bytes = max(settings.max_pending_image_bytes, settings.max_image_bytes)
        self._num_pending_bytes = 0
        self._threads = ThreadPoolExecutor(settings.prompt_threads, thread_name_prefix="prompts")

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode_text(self, text: str, param: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the tokens of a plain prompt.

        Args:
            text: the prompt.
            param: field of the request that it came from.
            add_special_tokens: whether the tokenizer adds its own begin token.

        Raises:
            RequestInvalid: it is too long.
            EngineOverloaded: too many prompts wait for the threads.
        """
        self._check_chars(len(text), param)
        return await self._run(lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def encode_chat(
        self,
        turns: Sequence[Turn],
        variables: dict[str, bool],
        *,
        offer: Offer | None = None,
        add_generation_prompt: bool = True,
        param: str = "messages",
    ) -> ChatPrompt:
        """Return the prompt of a conversation.

        Args:
            turns: its messages.
            variables: further variables of the template.
            offer: functions that the model may call.
            add_generation_prompt: whether the assistant's answer is opened.
            param: field of the request that the conversation came from.

        Raises:
            RequestInvalid: it is too long, the template refuses the messages, or an image is not as it should be.
            EngineOverloaded: too many prompts, or too many bytes of images, wait for the threads.
        """
        self._check_chars(sum(turn.num_chars for turn in turns), param)
        num_bytes = self._images.check(turns, param) if self._images is not None else 0
        if self._num_pending_bytes + num_bytes > self._max_pending_bytes:
            raise EngineOverloaded(
                f"images of {self._num_pending_bytes} bytes wait to be decoded, the limit is "
                f"{self._max_pending_bytes}; retry later",
                reason="queue_full",
            )
        self._num_pending_bytes += num_bytes
        try:
            return await self._run(lambda: self._encode_chat(turns, variables, offer, add_generation_prompt, param))
        finally:
            self._num_pending_bytes -= num_bytes

    async def num_beyond(
        self,
        fixed: Sequence[Turn],
        turns: Sequence[Turn],
        variables: dict[str, bool],
        offer: Offer | None,
        limit: int,
        param: str,
    ) -> int | None:
        """Return how many of the oldest turns must go so that the prompt has at most `limit` tokens.

        Args:
            fixed: turns that stay, before the others.
            turns: the conversation, the oldest first. What is left begins with the user or a system message.
            variables: further variables of the template.
            offer: functions that the model may call.
            limit: most tokens of the prompt.
            param: field of the request that the conversation came from.

        Returns:
            None if even the newest turns that can stand alone are too long.

        Raises:
            RequestInvalid: the template refuses the messages.
            EngineOverloaded: too many prompts wait for the threads.
        """

        def fits(num_dropped: int) -> bool:
            left = [*fixed, *turns[num_dropped:]]
            try:
                return len(self._lay_out(left, variables, offer, param=param).token_ids) <= limit
            except RequestInvalid as error:  # with so many characters nobody counts tokens
                if is_too_long(error):
                    return False
                raise

        return await self._run(lambda: first_that_fits(turns, self._num_tokens, limit, fits))

    def refuse_placeholders(self, token_ids: Sequence[int], param: str) -> None:
        """Refuse tokens that stand for an image where none can be.

        Raises:
            RequestInvalid: there are some.
        """
        if self._images is not None:
            self._images.refuse_placeholders(token_ids, param)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a prompt that was given as tokens.

        Raises:
            EngineOverloaded: too many prompts wait for the threads.
        """
        return await self._run(lambda: self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def _encode_chat(
        self,
        turns: Sequence[Turn],
        variables: dict[str, bool],
        offer: Offer | None,
        add_generation_prompt: bool,  # noqa: FBT001 (private)
        param: str,
    ) -> ChatPrompt:
        laid_out = self._lay_out(turns, variables, offer, add_generation_prompt, param)
        if self._images is None:
            return ChatPrompt(laid_out.text, laid_out.token_ids)
        num_tokens = len(laid_out.token_ids)
        check_prompt_length(num_tokens, self._max_model_len(), param)  # before anything large is decoded
        images = self._images.prepare(images_of(turns), laid_out.image_begins)
        return ChatPrompt(laid_out.text, laid_out.token_ids, images)

    def _lay_out(
        self,
        turns: Sequence[Turn],
        variables: dict[str, bool],
        offer: Offer | None,
        add_generation_prompt: bool = True,  # noqa: FBT001 (private)
        param: str = "messages",
    ) -> _LaidOut:
        images = self._images
        messages: list[ChatMessage] = [
            images.message(turn) if images is not None else turn.for_template(turn.as_lines()) for turn in turns
        ]
        messages, tools = self.tools.prepare(messages, offer)
        text = self._tokenizer.chat_template.render(
            messages, variables, add_generation_prompt=add_generation_prompt, tools=tools, param=param
        )
        self._check_chars(len(text), param)
        # The template wrote the begin token where the model wants one.
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if images is None:
            return _LaidOut(text, token_ids, [])
        return _LaidOut(text, *images.expand(token_ids, len(images_of(turns)), param))

    def _num_tokens(self, turn: Turn) -> int:
        """Return the tokens of a turn's content, without what the template writes around it."""
        text = turn.as_lines()
        num_tokens = len(self._tokenizer.encode(text, add_special_tokens=False))
        if self._images is not None:
            num_tokens += self._images.num_tokens * len(images_of([turn]))
        return num_tokens

    def _check_chars(self, num_chars: int, param: str) -> None:
        limit = self._max_model_len()
        if num_chars > limit * self._tokenizer.max_token_chars * _SHRINKING:
            raise too_long(f"{param} has {num_chars} characters", limit, param)

    async def _run(self, work: Callable[[], Result]) -> Result:
        if self._num_pending >= self._max_pending:
            raise EngineOverloaded(
                f"{self._num_pending} prompts wait to be tokenised, the limit is {self._max_pending}; retry later",
                reason="queue_full",
            )
        self._num_pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_pending -= 1

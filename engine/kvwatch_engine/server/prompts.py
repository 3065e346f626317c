"""Chat templates and tokenisation off the event loop, lengths checked first.

A text that cannot fit is refused before it costs anything: a token has at most so many characters as the longest one
of the vocabulary, so the number of characters bounds the number of tokens from below.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvwatch_engine.contracts.errors import EngineOverloaded
from kvwatch_engine.server.sampling import too_long
from kvwatch_engine.server.settings import ServerSettings
from kvwatch_engine.server.tokenizer import Tokenizer

_SHRINKING = 4
"""How much a normaliser may shorten a text (composed characters) before it is cut into tokens."""

Result = TypeVar("Result")


class PromptEncoder:
    """Turns prompts into token ids in a few threads of its own. Methods belong to the event loop."""

    def __init__(self, tokenizer: Tokenizer, settings: ServerSettings, max_model_len: Callable[[], int]) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._max_pending = settings.max_pending_prompts
        self._num_pending = 0
        self._threads = ThreadPoolExecutor(settings.prompt_threads, thread_name_prefix="prompts")

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode_text(self, text: str, param: str) -> tuple[int, ...]:
        """Return the tokens of a plain prompt.

        Raises:
            RequestInvalid: it is too long.
            EngineOverloaded: too many prompts wait for the threads.
        """
        self._check_chars(len(text), param)
        return await self._run(lambda: self._tokenizer.encode(text, add_special_tokens=True))

    async def encode_chat(
        self, messages: Sequence[dict[str, str]], variables: dict[str, bool]
    ) -> tuple[str, tuple[int, ...]]:
        """Return the prompt text of messages and its tokens.

        Raises:
            RequestInvalid: it is too long, or the template refuses the messages.
            EngineOverloaded: too many prompts wait for the threads.
        """
        self._check_chars(sum(len(message["content"]) for message in messages), "messages")
        return await self._run(lambda: self._encode_chat(messages, variables))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a prompt that was given as tokens."""
        return await self._run(lambda: self._tokenizer.decode(token_ids))

    def _encode_chat(
        self, messages: Sequence[dict[str, str]], variables: dict[str, bool]
    ) -> tuple[str, tuple[int, ...]]:
        text = self._tokenizer.chat_template.render(messages, variables)
        self._check_chars(len(text), "messages")
        # The template wrote the begin token where the model wants one.
        return text, self._tokenizer.encode(text, add_special_tokens=False)

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

"""The model's own chat template. A template never comes from a request: it is code."""

from collections.abc import Sequence
from typing import Any, Protocol

from jinja2 import TemplateError

from kvwatch_engine.contracts.errors import RequestInvalid

ChatMessage = dict[str, object]
"""A message as templates take it: `role`, `content` (text or parts, as the template wants), and what belongs to calls:
`tool_calls` of the assistant, whose arguments are objects; `tool_call_id` of a result."""


class _TemplateOwner(Protocol):
    """What is used of transformers' tokenizer."""

    chat_template: Any

    def apply_chat_template(self, conversation: list[ChatMessage], **options: Any) -> Any:
        """Render a conversation."""
        ...


class ChatTemplate:
    """Renders messages to the prompt text that the model was trained on."""

    def __init__(self, owner: _TemplateOwner) -> None:
        self._owner = owner

    @property
    def source(self) -> str:
        """The template itself; of several all of them."""
        return str(self._owner.chat_template or "")

    def render(
        self,
        messages: Sequence[ChatMessage],
        variables: dict[str, bool],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, object]] | None = None,
        param: str = "messages",
    ) -> str:
        """Return the prompt: the messages and the opening of the assistant's answer. Any thread.

        Args:
            messages: the conversation.
            variables: further variables of the template, already checked (see `refusals.py`).
            add_generation_prompt: whether the answer is opened.
            tools: functions that may be called, for a template that knows them.
            param: field of the request that the messages came from.

        Raises:
            RequestInvalid: the model has no template, or its template refuses these messages.
        """
        if not self._owner.chat_template:
            raise RequestInvalid(
                "this model has no chat template; use /v1/completions with a prompt, or start the server with "
                "--chat-template",
                param=param,
            )
        try:
            text = self._owner.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, tools=tools, **variables
            )
        except Exception as error:  # a template is a program: besides refusing, it can fail in any way
            reason = (error.message if isinstance(error, TemplateError) else None) or type(error).__name__
            raise RequestInvalid(f"the model's chat template refuses these messages: {reason}", param=param) from error
        return str(text)

    def takes_parts(self, placeholder: str) -> bool:
        """Whether the template wants content as parts, and writes `placeholder` for one of type `image`."""
        probe: ChatMessage = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "kvwatch"}]}
        try:
            text = self.render([probe], {})
        except RequestInvalid:
            return False
        return text.count(placeholder) == 1 and "kvwatch" in text

"""Whose chat template knows tools, how its family writes calls, and what stands in the prompt where it knows none."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.contracts.tools import ToolParser
from kvwatch_engine.guidance import Grammar
from kvwatch_engine.server.chat_template import ChatMessage, ChatTemplate
from kvwatch_engine.server.tools.families import FAMILIES, HERMES, LLAMA3, MISTRAL, Family, quoted
from kvwatch_engine.server.tools.offer import Offer

_PROBE: Final = "probe_of_tools"
_PROBE_TOOLS: Final[list[dict[str, object]]] = [
    {
        "type": "function",
        "function": {
            "name": _PROBE,
            "description": "Probes.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "Anything."}}},
        },
    }
]
_PROBE_MESSAGES: Final[list[ChatMessage]] = [
    {"role": "user", "content": "Probe."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": _PROBE, "arguments": {"x": "y"}}}],
    },
]


@dataclass(frozen=True, slots=True)
class ToolPrompting:
    """How one model is told of tools, and calls them."""

    family: Family
    is_known: bool
    """Whether its template knows tools. If not, they are described in the system message."""

    @classmethod
    def of_template(cls, template: ChatTemplate, parser: ToolParser = "auto") -> "ToolPrompting":
        """Find out what a template knows, by rendering a conversation with a tool that is called."""
        try:
            is_known = _PROBE in template.render(_PROBE_MESSAGES[:1], {}, tools=_PROBE_TOOLS)
        except RequestInvalid:
            is_known = False
        if not is_known:
            return cls(HERMES, is_known=False)
        return cls(_family_of(template) if parser == "auto" else FAMILIES[parser], is_known=True)

    def prepare(
        self, messages: list[ChatMessage], offer: Offer | None
    ) -> tuple[list[ChatMessage], list[dict[str, object]] | None]:
        """Return the messages as the template takes them, and the tools that it takes beside them."""
        if self.is_known:
            return messages, offer.for_template() if offer is not None else None
        written = _without_calls(messages)
        if offer is not None:
            text = _description(offer)
            if written and written[0]["role"] == "system" and isinstance(written[0]["content"], str):
                first: ChatMessage = {**written[0], "content": f"{written[0]['content']}\n\n{text}"}
                written = [first, *written[1:]]
            else:
                written = [{"role": "system", "content": text}, *written]
        return written, None

    def grammar(self, offer: Offer, token_of: Callable[[str], int | None]) -> Grammar | None:
        """Return the grammar of texts that call what is offered; none if the model may write what it likes.

        What need not be called is kept to from a call's marker on, if one of the functions is strict and there is a
        marker.

        Args:
            offer: what may be called.
            token_of: gives the token that a grammar must name instead of a marker's text; none if the text will do.
        """
        is_free = offer.choice == "auto"
        if is_free and (self.family.is_bare or not any(tool.is_strict for tool in offer.callable)):
            return None

        def written(marker: str) -> str:
            token_id = token_of(marker)
            return quoted(marker) if token_id is None else f"<[{token_id}]>"

        write = self.family.grammar_of_texts if is_free else self.family.grammar
        return Grammar("lark", write(offer.callable, written, is_parallel=offer.is_parallel), "tools")


def _family_of(template: ChatTemplate) -> Family:
    try:
        text = template.render(_PROBE_MESSAGES, {}, tools=_PROBE_TOOLS, add_generation_prompt=False)
    except RequestInvalid:
        text = template.source
    for family in (MISTRAL, HERMES, LLAMA3):
        if family.begin in text:
            return family
    return LLAMA3 if '"parameters": {"x"' in text else HERMES


def _description(offer: Offer) -> str:
    functions = "\n".join(msgspec.json.encode(tool["function"]).decode() for tool in offer.for_template())
    return (
        "You can call functions. Each line describes one of them in JSON:\n"
        f"{functions}\n"
        "To call a function, write its name and arguments like this:\n"
        '<tool_call>\n{"name": "a function", "arguments": {"an argument": "its value"}}\n</tool_call>'
    )


def _without_calls(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Write calls and results as texts of the assistant and the user."""
    written: list[ChatMessage] = []
    was_result = False
    for message in messages:
        content = message["content"]
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{content}\n</tool_response>"
            if was_result:  # many templates want users and assistants to take turns
                written[-1] = {"role": "user", "content": f"{written[-1]['content']}\n{text}"}
            else:
                written.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            calls = "\n".join(_call_text(call) for call in _calls(message))
            written.append({"role": "assistant", "content": f"{content}\n{calls}" if content else calls})
        else:
            written.append(message)
        was_result = is_result
    return written


def _calls(message: ChatMessage) -> list[dict[str, object]]:
    calls = message["tool_calls"]
    assert isinstance(calls, list), "conversation.py wrote them"
    return calls


def _call_text(call: dict[str, object]) -> str:
    return f"<tool_call>\n{msgspec.json.encode(call['function']).decode()}\n</tool_call>"

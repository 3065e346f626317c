"""The messages of a chat request as turns of text and images, checked. Looks into no image and knows no template."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.server.errors import shorten
from kvwatch_engine.server.protocol.chat import ContentPart, Message
from kvwatch_engine.server.protocol.tools import CalledFunction, MessageToolCall
from kvwatch_engine.server.sampling import too_long

ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Role in a request -> role in chat templates; `developer` is OpenAI's newer word for `system`."""
_DETAILS: Final = (None, "auto", "low", "high")


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image in a message, not looked at yet."""

    url: str = field(repr=False)
    param: str
    """Where it stands in the request."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text in a message."""

    text: str
    param: str
    """Where it stands in the request."""


@dataclass(frozen=True, slots=True)
class PastCall:
    """A call that the assistant made."""

    id: str
    name: str
    arguments: dict[str, object]
    num_chars: int
    """Characters of its arguments as JSON."""

    def for_template(self) -> dict[str, object]:
        """Return it as chat templates take it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Turn:
    """One message; its role is one that chat templates know."""

    role: str
    parts: tuple[TextPart | ImagePart, ...]
    calls: tuple[PastCall, ...] = ()
    call_id: str = ""
    """Of role `tool`: the call whose result it is."""

    @property
    def num_chars(self) -> int:
        """Characters of its texts and calls."""
        texts = sum(len(part.text) for part in self.parts if isinstance(part, TextPart))
        return texts + sum(call.num_chars for call in self.calls)

    def for_template(self, content: object) -> dict[str, object]:
        """Return it as chat templates take it; `content` is text or parts, as the template wants."""
        message: dict[str, object] = {"role": self.role, "content": content}
        if self.calls:
            message["tool_calls"] = [call.for_template() for call in self.calls]
        if self.call_id:
            message["tool_call_id"] = self.call_id
        return message

    def as_lines(self, placeholder: str = "") -> str:
        """Return its content as one text: several parts become lines, an image the placeholder."""
        return "\n".join(part.text if isinstance(part, TextPart) else placeholder for part in self.parts)


def images_of(turns: Sequence[Turn]) -> list[ImagePart]:
    """Return all images of a conversation, in order."""
    return [part for turn in turns for part in turn.parts if isinstance(part, ImagePart)]


def conversation(messages: Sequence[Message], *, takes_images: bool, max_model_len: int) -> list[Turn]:
    """Return the turns of a request.

    Args:
        messages: its messages.
        takes_images: whether the model does.
        max_model_len: more messages and parts than this are refused before each of them is looked at.

    Raises:
        RequestInvalid: no message, too many, an unknown role, missing content, or a part of a kind that the model does
            not take.
    """
    if not messages:
        raise RequestInvalid("messages is empty; send at least one message", param="messages")
    num_parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    if len(messages) + num_parts > max_model_len:
        raise too_long(f"there are {len(messages)} messages of {num_parts} parts", max_model_len, "messages")
    return [_turn(message, f"messages[{place}]", takes_images) for place, message in enumerate(messages)]


def _turn(message: Message, param: str, takes_images: bool) -> Turn:  # noqa: FBT001 (private)
    role = ROLES.get(message.role)
    if role is None:
        raise RequestInvalid(
            f"{param}.role is {shorten(message.role)!r}; supported are {', '.join(ROLES)}", param=f"{param}.role"
        )
    for name in ("function_call", "audio"):
        if getattr(message, name) is not None:
            raise RequestInvalid(f"{param}.{name} is not supported by this server", param=f"{param}.{name}")
    calls = _calls(message, param)
    call_id = message.tool_call_id or ""
    if (role == "tool") != bool(call_id):
        field = f"{param}.tool_call_id"
        what = "is missing; send the id of the call" if role == "tool" else "belongs to messages of role tool"
        raise RequestInvalid(f"{field} {what}", param=field)
    return Turn(role, _content(message, f"{param}.content", takes_images), calls, call_id)


def _calls(message: Message, param: str) -> tuple[PastCall, ...]:
    if message.tool_calls and message.role != "assistant":
        raise RequestInvalid(f"{param}.tool_calls belongs to messages of role assistant", param=f"{param}.tool_calls")
    return tuple(_call(call, f"{param}.tool_calls[{place}]") for place, call in enumerate(message.tool_calls or ()))


def _call(call: MessageToolCall, param: str) -> PastCall:
    if call.type != "function":
        raise RequestInvalid(f"{param}.type is {shorten(call.type)!r}; only functions are", param=f"{param}.type")
    return past_call(call.id, call.function, f"{param}.function.arguments")


def past_call(call_id: str, called: CalledFunction, param: str) -> PastCall:
    """Return a call that was made.

    Raises:
        RequestInvalid: its arguments, which `param` names, are no JSON object.
    """
    try:
        arguments = msgspec.json.decode(called.arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestInvalid(f"{param} is no JSON object", param=param)
    return PastCall(call_id, called.name, arguments, len(called.arguments))


def _content(
    message: Message,
    param: str,
    takes_images: bool,  # noqa: FBT001 (private)
) -> tuple[TextPart | ImagePart, ...]:
    if message.content is None:
        if message.tool_calls:
            return ()
        raise RequestInvalid(f"{param} is missing; send text", param=param)
    if isinstance(message.content, str):
        return (TextPart(message.content, param),)
    return tuple(_part(part, f"{param}[{place}]", takes_images) for place, part in enumerate(message.content))


def _part(part: ContentPart, param: str, takes_images: bool) -> TextPart | ImagePart:  # noqa: FBT001 (private)
    if part.type == "image_url" and takes_images:
        return _image(part, f"{param}.image_url")
    if part.type != "text":
        kinds = "text and image_url parts" if takes_images else "text parts"
        hint = "; this model takes no images" if part.type == "image_url" else ""
        raise RequestInvalid(
            f"{param}.type is {shorten(part.type)!r}; only {kinds} are supported by this server{hint}",
            param=f"{param}.type",
            code="unsupported",
        )
    if part.text is None:
        raise RequestInvalid(f"{param}.text is missing", param=f"{param}.text")
    return TextPart(part.text, f"{param}.text")


def _image(part: ContentPart, param: str) -> ImagePart:
    if part.image_url is None:
        raise RequestInvalid(f"{param} is missing; send {{'url': 'data:image/png;base64,...'}}", param=param)
    check_detail(part.image_url.detail, f"{param}.detail")
    return ImagePart(part.image_url.url, f"{param}.url")


def check_detail(detail: str | None, param: str) -> None:
    """Refuse a detail that does not exist; those that do ask for nothing, since the model has one resolution.

    Raises:
        RequestInvalid: so.
    """
    if detail not in _DETAILS:
        raise RequestInvalid(f"{param} is {shorten(str(detail))!r}; it may be auto, low or high", param=param)

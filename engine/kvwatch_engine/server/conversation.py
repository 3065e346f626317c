"""The messages of a chat request as turns of text and images, checked. Looks into no image and knows no template."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.server.errors import shorten
from kvwatch_engine.server.protocol.chat import ContentPart, Message
from kvwatch_engine.server.sampling import too_long

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role in a request -> role in chat templates; `developer` is OpenAI's newer word for `system`."""
_DETAILS = (None, "auto", "low", "high")


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
class Turn:
    """One message; its role is one that chat templates know."""

    role: str
    parts: tuple[TextPart | ImagePart, ...]

    @property
    def num_chars(self) -> int:
        """Characters of its texts."""
        return sum(len(part.text) for part in self.parts if isinstance(part, TextPart))

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
    role = _ROLES.get(message.role)
    if role is None:
        raise RequestInvalid(
            f"{param}.role is {shorten(message.role)!r}; supported are {', '.join(_ROLES)}", param=f"{param}.role"
        )
    for name in ("tool_calls", "function_call", "audio"):
        if getattr(message, name) not in (None, []):
            raise RequestInvalid(f"{param}.{name} is not supported by this server", param=f"{param}.{name}")
    content = f"{param}.content"
    if message.content is None:
        raise RequestInvalid(f"{content} is missing; send text", param=content)
    if isinstance(message.content, str):
        return Turn(role, (TextPart(message.content, content),))
    parts = [_part(part, f"{content}[{place}]", takes_images) for place, part in enumerate(message.content)]
    return Turn(role, tuple(parts))


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
    # The model sees every image at its one resolution, so that `detail` asks for nothing.
    if part.image_url.detail not in _DETAILS:
        raise RequestInvalid(
            f"{param}.detail is {shorten(str(part.image_url.detail))!r}; it may be auto, low or high",
            param=f"{param}.detail",
        )
    return ImagePart(part.image_url.url, f"{param}.url")

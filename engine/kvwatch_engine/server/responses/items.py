"""Items of `/v1/responses` as they are kept, and as turns of a conversation.

Looks into no image and knows no template.
"""

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.server.conversation import ROLES, ImagePart, TextPart, Turn, check_detail, past_call
from kvwatch_engine.server.errors import shorten
from kvwatch_engine.server.protocol.responses import InputItem, InputPart
from kvwatch_engine.server.protocol.tools import CalledFunction

_ID_PREFIXES: Final = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}
"""The kinds of items that are implemented, and what ids of them begin with."""
_REFERENCE: Final = "item_reference"
_MESSAGE_ROLES: Final = tuple(role for role in ROLES if role != "tool")
_TEXT_PARTS: Final = ("input_text", "output_text")


def normal_items(given: str | list[InputItem], find: Callable[[str], InputItem | None]) -> list[InputItem]:
    """Return the items of a request in the one form in which they are kept: with a kind, an id, content in parts.

    Args:
        given: text, or items.
        find: gives a kept item by its id; none if there is none.

    Raises:
        RequestInvalid: there is none, one is of a kind that is not implemented or lacks what its kind needs, or refers
            to an item that is not kept.
    """
    if isinstance(given, str):
        given = [InputItem(role="user", content=given)]
    if not given:
        raise RequestInvalid("input is empty; send at least one item", param="input")
    return [_normal(_followed(item, f"input[{place}]", find), f"input[{place}]") for place, item in enumerate(given)]


def _followed(item: InputItem, param: str, find: Callable[[str], InputItem | None]) -> InputItem:
    """Return the item that a reference stands for, and every other item itself."""
    is_bare = item.type is None and item.role is None and item.id is not None
    if item.type != _REFERENCE and not is_bare:
        return item
    found = find(item.id or "")
    if found is None:
        raise RequestInvalid(
            f"{param}.id is {shorten(item.id or '')!r}, and no item of this id is kept (any more); send it itself",
            param=f"{param}.id",
            code="previous_response_not_found",
        )
    return found


def _normal(item: InputItem, param: str) -> InputItem:
    kind = item.type or "message"
    prefix = _ID_PREFIXES.get(kind)
    if prefix is None:
        supported = ", ".join((*_ID_PREFIXES, _REFERENCE))
        raise RequestInvalid(
            f"{param}.type is {shorten(kind)!r}; supported are {supported}; remove it",
            param=f"{param}.type",
            code="unsupported",
        )
    named = msgspec.structs.replace(
        item, type=kind, id=item.id or f"{prefix}_{secrets.token_hex(16)}", status=item.status or "completed"
    )
    if kind == "message":
        return _normal_message(named, param)
    needed = ("call_id", "name", "arguments") if kind == "function_call" else ("call_id", "output")
    for name in needed:
        if not getattr(item, name) and (name in ("call_id", "name") or getattr(item, name) is None):
            raise RequestInvalid(f"{param}.{name} is missing; an item of type {kind} needs it", param=f"{param}.{name}")
    return named


def _normal_message(item: InputItem, param: str) -> InputItem:
    if item.role not in _MESSAGE_ROLES:
        raise RequestInvalid(
            f"{param}.role is {shorten(str(item.role))!r}; supported are {', '.join(_MESSAGE_ROLES)}",
            param=f"{param}.role",
        )
    if item.content is None:
        raise RequestInvalid(f"{param}.content is missing; send text", param=f"{param}.content")
    kind = "output_text" if item.role == "assistant" else "input_text"
    parts = [InputPart(type=kind, text=item.content)] if isinstance(item.content, str) else item.content
    return msgspec.structs.replace(item, content=[_normal_part(part) for part in parts])


def _normal_part(part: InputPart) -> InputPart:
    """Return a part with what clients expect to read of it."""
    if part.type == "output_text":
        return msgspec.structs.replace(part, annotations=part.annotations or [])
    if part.type == "input_image":
        return msgspec.structs.replace(part, detail=part.detail or "auto")
    return part


def turns_of(items: Iterable[tuple[InputItem, str]], *, takes_images: bool) -> list[Turn]:
    """Return the turns of a conversation: a message and the calls after it are one.

    Args:
        items: in their normal form, each with its place in the request.
        takes_images: whether the model does.

    Raises:
        RequestInvalid: a part is of a kind that the model does not take, or the arguments of a call are no JSON object.
    """
    turns: list[Turn] = []
    for item, param in items:
        match item.type:
            case "function_call":
                called = CalledFunction(item.name or "", item.arguments or "")
                call = past_call(item.call_id or "", called, f"{param}.arguments")
                if turns and turns[-1].role == "assistant":
                    turns[-1] = replace(turns[-1], calls=(*turns[-1].calls, call))
                else:
                    turns.append(Turn("assistant", (), (call,)))
            case "function_call_output":
                result = _parts(item.output or "", f"{param}.output", takes_images)
                turns.append(Turn("tool", result, call_id=item.call_id or ""))
            case _:
                content = _parts(item.content or "", f"{param}.content", takes_images)
                turns.append(Turn(ROLES[item.role or "user"], content))
    return turns


def num_parts(items: Sequence[InputItem]) -> int:
    """Return how many items and parts of items there are."""
    contents = [item.content if item.content is not None else item.output for item in items]
    return len(items) + sum(len(content) for content in contents if isinstance(content, list))


def _parts(
    content: str | list[InputPart],
    param: str,
    takes_images: bool,  # noqa: FBT001 (private)
) -> tuple[TextPart | ImagePart, ...]:
    if isinstance(content, str):
        return (TextPart(content, param),)
    return tuple(_part(part, f"{param}[{place}]", takes_images) for place, part in enumerate(content))


def _part(part: InputPart, param: str, takes_images: bool) -> TextPart | ImagePart:  # noqa: FBT001 (private)
    if part.type == "input_image" and takes_images:
        return _image(part, param)
    if part.type == "refusal":
        return TextPart(part.refusal or "", f"{param}.refusal")
    if part.type not in _TEXT_PARTS:
        kinds = "input_text, output_text and input_image" if takes_images else "input_text and output_text"
        hint = "; this model takes no images" if part.type == "input_image" else ""
        raise RequestInvalid(
            f"{param}.type is {shorten(part.type)!r}; only {kinds} parts are supported by this server{hint}",
            param=f"{param}.type",
            code="unsupported",
        )
    if part.text is None:
        raise RequestInvalid(f"{param}.text is missing", param=f"{param}.text")
    return TextPart(part.text, f"{param}.text")


def _image(part: InputPart, param: str) -> ImagePart:
    if part.file_id is not None:
        raise RequestInvalid(
            f"{param}.file_id is not supported by this server; send the image itself as image_url",
            param=f"{param}.file_id",
            code="unsupported",
        )
    if part.image_url is None:
        raise RequestInvalid(
            f"{param}.image_url is missing; send 'data:image/png;base64,...'", param=f"{param}.image_url"
        )
    check_detail(part.detail, f"{param}.detail")
    return ImagePart(part.image_url, f"{param}.image_url")

"""Reads what was set beside the model itself: its names, tokenizer and chat template; part of the composition root."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from kvwatch.errors import ConfigError
from kvwatch_engine.contracts.model import TextSource
from kvwatch_engine.model.sources import resolve_tokenizer
from kvwatch_engine.serve.lora import Loras
from kvwatch_engine.serve.settings import ServeSettings

_MAX_NAME_CHARS: Final = 256
_MAX_NAMES: Final = 16
_MAX_TEMPLATE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class AskedModel:
    """What was set beside the model itself."""

    names: tuple[str, ...]
    """Under which it is served; none takes its own."""
    texts: TextSource


def asked_model(settings: ServeSettings, loras: Loras) -> AskedModel:
    """Read and check the settings, before a model is loaded for them.

    Raises:
        ConfigError: a name or the template is none.
        ModelError: there is no such tokenizer.
    """
    tokenizer = None if settings.tokenizer is None else resolve_tokenizer(settings.tokenizer)
    return AskedModel(_served_names(settings, loras), TextSource(tokenizer, _read_template(settings)))


def _served_names(settings: ServeSettings, loras: Loras) -> tuple[str, ...]:
    """Return the names that were set; none if the model keeps its own.

    Raises:
        ConfigError: one is none, is given twice or is an adapter's, or there are too many.
    """
    names = settings.served_model_name
    if len(names) > _MAX_NAMES:
        raise ConfigError(f"--served-model-name: {len(names)} names, the limit is {_MAX_NAMES}; give fewer")
    adapters = {name for name, _ in loras}
    for name in names:
        if not name.strip() or not name.isprintable() or len(name) > _MAX_NAME_CHARS:
            raise ConfigError(
                f"--served-model-name {name[:_MAX_NAME_CHARS]!r} is no name; use 1 to {_MAX_NAME_CHARS} printable "
                "characters"
            )
        if names.count(name) > 1:
            raise ConfigError(f"--served-model-name: {name!r} is given twice; give each name once")
        if name in adapters:
            raise ConfigError(
                f"--served-model-name {name!r} is the name of a --lora as well; choose another for one of them"
            )
    return names


class _GenerationBlock(Extension):
    """The block with which templates mark what the assistant says; it means nothing here."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Take the block for its content."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _read_template(settings: ServeSettings) -> str | None:
    """Return the chat template that was set, none if there is none.

    Raises:
        ConfigError: it cannot be read, or is no template.
    """
    if settings.chat_template is None:
        return None
    path = _expanded(settings.chat_template, "--chat-template")
    try:
        if path.stat().st_size > _MAX_TEMPLATE_BYTES:
            raise ConfigError(f"--chat-template: {path} is larger than {_MAX_TEMPLATE_BYTES} bytes; give a template")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(
            f"--chat-template: {settings.chat_template!r} cannot be read ({error}); give a file with a Jinja template"
        ) from error
    if not text.strip():
        raise ConfigError(f"--chat-template: {path} is empty; give a file with a Jinja template")
    try:
        Environment(extensions=["jinja2.ext.loopcontrols", _GenerationBlock]).parse(text)  # noqa: S701 (not rendered)
    except TemplateSyntaxError as error:
        raise ConfigError(f"--chat-template: {path}, line {error.lineno}: {error.message}; correct it") from error
    return text


def _expanded(text: str, flag: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{flag}: the ~ of {text!r} names nobody here; write the path in full") from error

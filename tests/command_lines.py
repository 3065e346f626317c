"""Reads the command lines of manifests with the parsers and checks of the commands themselves."""

import argparse
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points

import msgspec

from kvwatch.config import resolve
from kvwatch.sources.engines import EngineSpec, parse_engine

COMMANDS = ("serve", "sidecar")
_VARIABLE = re.compile(r"\$\((\w+)\)")


def understood(words: Sequence[str], environment: Mapping[str, str] | None = None) -> msgspec.Struct:
    """Return the settings that `kvwatch WORDS` would have.

    Args:
        words: Command and flags, with `$(NAME)` as Kubernetes has it.
        environment: Variables of the container.

    Raises:
        ConfigError: a value is wrong.
        SystemExit: a flag is unknown.
    """
    known = environment or {}
    command, *flags = [_VARIABLE.sub(lambda match: known[match[1]], word) for word in words]
    (entry,) = entry_points(group="kvwatch.commands", name=command)
    parser = argparse.ArgumentParser(prog=f"kvwatch {command}", allow_abbrev=False)
    entry.load().add_arguments(parser)
    own = {name: value for name, value in known.items() if name.startswith("KVWATCH_")}
    settings: msgspec.Struct = resolve(entry.load().settings, parser.parse_args(flags), own).settings
    return settings


def watched(settings: msgspec.Struct) -> list[EngineSpec]:
    """Return the engines that a sidecar would watch; files that they name may be missing here.

    Raises:
        ConfigError: a URL or one of its options is wrong.
    """
    engines: tuple[str, ...] = getattr(settings, "engine")  # noqa: B009 - the class is the command's
    return [parse_engine(text) for text in engines]

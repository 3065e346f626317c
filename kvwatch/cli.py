"""The command `kvwatch`. Finds its commands through the entry-point group `kvwatch.commands`; knows no engine."""

import argparse
import difflib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import NoReturn, Protocol, runtime_checkable

import msgspec

from kvwatch import __version__
from kvwatch.config import HIDDEN, Setting, add_flags, declared_settings, resolve, unknown_name
from kvwatch.errors import ConfigError, KVWatchError

GROUP = "kvwatch.commands"
INSTALL = "install the engine with: pip install 'kvwatch[engine]'"

EXIT_ERROR = 2
"""What the user asked for is wrong or cannot be done; one line on stderr says why."""
EXIT_INTERRUPTED = 130


class Command(Protocol):
    """One command."""

    @property
    def name(self) -> str:
        """The word on the command line."""
        ...

    @property
    def help(self) -> str:
        """One line for `kvwatch --help`."""
        ...

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's own arguments."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Carry it out and return the exit status. A `KVWatchError` becomes one line on stderr and status 2."""
        ...


@runtime_checkable
class ConfigurableCommand(Protocol):
    """A command whose settings `kvwatch config` can show."""

    @property
    def settings(self) -> type[msgspec.Struct]:
        """Class that declares them, as `kvwatch.config` wants it."""
        ...


@runtime_checkable
class CompletedSettings(Protocol):
    """Settings of which some that are none stand for something that is found when they are used."""

    def in_effect(self) -> Mapping[str, str]:
        """Return what that is, by name."""
        ...


class ConfigCommand:
    """`kvwatch config`: the effective settings of a command and where each comes from."""

    name = "config"
    help = "print the effective settings and where each comes from"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add one sub-command for each command that has settings, with that command's flags."""
        _add_json(parser)
        commands = parser.add_subparsers(title="settings of", metavar="COMMAND")
        for name in sorted(_entry_points().keys() - {self.name}):
            command = _find(name)
            if command is not None and isinstance(command, ConfigurableCommand):
                child = commands.add_parser(name, help=f"settings of `kvwatch {name}`", allow_abbrev=False)
                child.set_defaults(settings=command.settings, parser=child)
                _add_json(child)
                add_flags(child, command.settings)
                # Without a COMMAND there is one answer that people expect: that of the (first) server.
                if parser.get_default("settings") is None:
                    parser.set_defaults(settings=command.settings)

    def run(self, args: argparse.Namespace) -> int:
        """Print them."""
        if getattr(args, "settings", None) is None:
            raise ConfigError(f"no installed command has settings; {INSTALL}")
        resolved = resolve(args.settings, args)
        found = resolved.settings
        completed = found.in_effect() if isinstance(found, CompletedSettings) else {}
        rows = [
            (each, completed.get(each.name, getattr(found, each.name)), resolved.sources[each.name])
            for each in declared_settings(args.settings)
        ]
        sys.stdout.write(_as_json(rows) if getattr(args, "as_json", False) else _as_text(rows))
        return 0


CONFIG_COMMAND = ConfigCommand()


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvwatch` with these words (default: the process's) and return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parse(words)
        return _run(args)
    except KVWatchError as error:
        sys.stderr.write(f"kvwatch: {' '.join(str(error).split())}\n")
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


# ---------------------------------------------------------------- parsing


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parse(words: list[str]) -> argparse.Namespace:
    known = _entry_points()
    name = next((word for word in words if not word.startswith("-")), None)
    if name is not None and name not in known:
        raise unknown_name(name, known, "command")
    parser = _Parser(prog="kvwatch", description="Makes the KV cache of an LLM server visible.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"kvwatch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    # Only the command that was asked for is imported: `kvwatch config --help` must not wait for torch.
    for each in sorted(known) if name is None else [name]:
        command = _find(each) if name is None else _load(each)
        if command is None:
            commands.add_parser(each, help=f"(not installed; {INSTALL})")
            continue
        child = commands.add_parser(each, help=command.help, description=command.help, allow_abbrev=False)
        child.set_defaults(command=command, parser=child)
        command.add_arguments(child)
    _check_commands(words, parser)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        raise _not_understood(unknown[0], args.parser)
    return args


def _check_commands(words: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Refuse what stands in the place of a command and is none, and an unknown flag in front of one.

    argparse would take what follows such a flag for the command.
    """
    while (commands := _commands(parser)) is not None:
        words = _behind_flags(words, parser, commands.choices)
        if not words:
            return
        if words[0] not in commands.choices:
            raise unknown_name(words[0], commands.choices, f"{parser.prog}: {str(commands.metavar).lower()}")
        parser, words = commands.choices[words[0]], words[1:]


def _commands(parser: argparse.ArgumentParser) -> "argparse._SubParsersAction[argparse.ArgumentParser] | None":
    return next((each for each in parser._actions if isinstance(each, argparse._SubParsersAction)), None)


def _behind_flags(
    words: Sequence[str], parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser]
) -> Sequence[str]:
    """Return the words from the first one that is no flag and no value of one; none if help was asked for."""
    while words and words[0].startswith("-"):
        name, is_whole, _ = words[0].partition("=")
        if name in {"-h", "--help", "--version"}:
            return ()
        action = parser._option_string_actions.get(name)
        if action is None:
            raise _not_understood(name, parser, commands)
        words = words[1 if is_whole or action.nargs == 0 else 2 :]
    return words


def _not_understood(
    word: str, parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser] | None = None
) -> ConfigError:
    """Return the error for a word that a parser does not know, with the nearest flag: its own, or a command's."""
    if not word.startswith("--"):
        return ConfigError(f"argument {word!r} is not expected; see {parser.prog} --help")
    name = word.split("=", 1)[0]
    flags = {flag: flag for flag in _flags(parser)}
    for command, behind in (commands or {}).items():
        flags |= {flag: f"{parser.prog} {command} {flag}" for flag in _flags(behind) if flag not in flags}
    # Without the dashes, which all have in common: else everything short looks like --help.
    near = difflib.get_close_matches(name[2:], [flag[2:] for flag in flags], n=1, cutoff=0.5)
    remedy = f"did you mean {flags[f'--{near[0]}']}?" if near else f"see {parser.prog} --help"
    return ConfigError(f"{parser.prog}: flag {name} is unknown; {remedy}")


def _flags(parser: argparse.ArgumentParser) -> Iterable[str]:
    return [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", dest="as_json", default=argparse.SUPPRESS, help="print JSON instead of text"
    )


# ---------------------------------------------------------------- commands


def _entry_points() -> dict[str, EntryPoint]:
    return {each.name: each for each in entry_points(group=GROUP)}


def _load(name: str) -> Command:
    try:
        command: Command = _entry_points()[name].load()
    except ModuleNotFoundError as error:
        raise _missing_part(name, error) from error
    return command


def _find(name: str) -> Command | None:
    """Return the command, or None when a part that it needs is not installed."""
    try:
        return _load(name)
    except ConfigError:
        return None


def _run(args: argparse.Namespace) -> int:
    command: Command = args.command
    try:
        return command.run(args)
    except ModuleNotFoundError as error:
        raise _missing_part(command.name, error) from error


def _missing_part(name: str, error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(f"kvwatch {name} needs {error.name}, which is not installed; {INSTALL}")


# ---------------------------------------------------------------- printing


Row = tuple[Setting, object, str]


def _as_text(rows: Sequence[Row]) -> str:
    lines = [(each.name, each.shown(value), source) for each, value, source in rows]
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    return "".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}\n" for name, value, source in lines)


def _as_json(rows: Sequence[Row]) -> str:
    shown = {
        each.name: {"value": HIDDEN if each.spec.secret and value is not None else value, "source": source}
        for each, value, source in rows
    }
    return json.dumps(shown, indent=2) + "\n"

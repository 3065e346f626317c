"""`kvwatch admin VERB`: one verb for each operation of the admin API. What speaks HTTP is imported when it runs."""

import argparse
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvwatch.admin.credentials import TOKEN_VARIABLE, find_token
from kvwatch.errors import ConfigError, ControlError

if TYPE_CHECKING:
    import httpx

    from kvwatch.admin.verbs import Prepared

DEFAULT_URL = "http://127.0.0.1:9401"
TIMEOUT_SECONDS = 120.0
EXIT_REFUSED = 1
"""The server refused what was asked; it says why. (2, unreachable or wrong usage, is the command line's own.)"""


class AdminCommand:
    """The command `admin`. It has options and no settings; it finds a token where the server does."""

    name = "admin"
    help = "look into a running server and change it, through its admin API"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the verbs."""
        from kvwatch.admin.operations import OPERATIONS
        from kvwatch.admin.verbs import verbs

        _add_options(parser)
        parser.set_defaults(
            url=DEFAULT_URL, token_file=os.environ.get(TOKEN_VARIABLE), token_name=None, field=None
        )  # fmt: skip
        children = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
        for name, verb in verbs(OPERATIONS).items():
            brief = verb.operation.brief.replace("%", "%%")
            child = children.add_parser(name, help=brief, description=brief, allow_abbrev=False)
            child.set_defaults(verb=verb, parser=child)
            verb.add_arguments(child)
            _add_options(child)

    def run(self, args: argparse.Namespace) -> int:
        """Ask, print the answer, and return 0; 1 when the server refuses.

        Raises:
            ConfigError: an argument is wrong.
            ControlError: the server cannot be reached.
        """
        import httpx

        prepared: Prepared = args.verb.prepare(args)
        headers = {}
        if args.token_file is not None:
            headers["Authorization"] = f"Bearer {find_token(args.token_file, args.token_name)}"
        if getattr(args, "last_event_id", None):
            headers["Last-Event-ID"] = args.last_event_id
        url = args.url if "://" in args.url else f"http://{args.url}"
        try:
            with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_SECONDS, trust_env=False) as client:
                return _ask(client, prepared, args.field)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            detail = (
                f"{url} does not answer ({str(error) or type(error).__name__}); is this the server's --admin-listen?"
            )
            raise ControlError(detail) from error


COMMAND = AdminCommand()


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Add what every verb takes, in front of it or behind it: what is not given there leaves the other in force."""
    add = parser.add_argument
    unset = argparse.SUPPRESS
    add("--url", default=unset, help=f"the server's admin listener (default: {DEFAULT_URL})")
    add(
        "--token-file", metavar="FILE", default=unset,
        help=f"file with a token, or with the server's tokens (default: {TOKEN_VARIABLE})",
    )  # fmt: skip
    add(
        "--as", dest="token_name", metavar="NAME", default=unset,
        help="which of the tokens; default: the first that may operate",
    )  # fmt: skip
    add("--field", metavar="NAME", default=unset, help="print one field of the answer; text without quotes")


def _ask(client: "httpx.Client", prepared: "Prepared", field: str | None) -> int:
    headers = {}
    if prepared.needs_etag_of is not None:
        read = client.get(prepared.needs_etag_of)
        if read.status_code != 200:
            return _refused(read)
        headers["If-Match"] = read.headers["etag"]
    with client.stream(prepared.method, prepared.path, json=prepared.body, headers=headers) as answer:
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            _print_events(answer.iter_lines())
            return 0
        answer.read()
    return _refused(answer) if answer.status_code >= 400 else _print(answer, field)


def _print_events(lines: Iterable[str]) -> None:
    """Print the data of each event, and at the end how to go on from there."""
    last_id = ""
    try:
        for line in lines:
            if line.startswith("id: "):
                last_id = line.removeprefix("id: ")
            elif line.startswith("data: "):
                sys.stdout.write(line.removeprefix("data: ") + "\n")
                sys.stdout.flush()
    finally:
        if last_id:
            sys.stderr.write(f"kvwatch: what came after that: --last-event-id {last_id}\n")


def _refused(answer: "httpx.Response") -> int:
    import msgspec

    try:
        detail = msgspec.json.decode(answer.content, type=dict[str, object])["detail"]
    except (msgspec.MsgspecError, RecursionError, KeyError):
        detail = answer.text[:200]
    hint = " (here: --token-file FILE)" if answer.status_code == 401 else ""
    sys.stderr.write(f"kvwatch: {answer.status_code}: {' '.join(str(detail).split())}{hint}\n")
    return EXIT_REFUSED


def _print(answer: "httpx.Response", field: str | None) -> int:
    import msgspec

    content: object = answer.content
    if field is not None:
        fields = msgspec.json.decode(answer.content, type=dict[str, msgspec.Raw])
        if field not in fields:
            raise ConfigError(f"--field: the call was made, its answer has no {field}; it has {', '.join(fields)}")
        value = msgspec.json.decode(fields[field])
        if isinstance(value, str):
            sys.stdout.write(value if value.endswith("\n") else value + "\n")
            return 0
        content = bytes(fields[field])
    assert isinstance(content, bytes)
    sys.stdout.write(msgspec.json.format(content, indent=2).decode() + "\n")
    return 0

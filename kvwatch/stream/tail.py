"""`kvwatch tail`: what happens in an engine, line by line. gRPC is imported when the command runs, not before."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvwatch.errors import ConfigError

if TYPE_CHECKING:
    from kvwatch.stream.contract import SubscribeRequest

DEFAULT_ADDRESS = "127.0.0.1:9402"
DEFAULT_LINES = 20
TOKEN_VARIABLE = "KVWATCH_GRPC_TOKEN_FILE"  # noqa: S105 - a variable; the server's setting of the same name


class TailCommand:
    """The command `tail`.

    It has options and no settings: `KVWATCH_*` variables and files that are meant for a server do not concern it,
    except that it finds the token where the server does.
    """

    name = "tail"
    help = "print what happens in a running engine, event by event"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options."""
        parser.add_argument(
            "--address", default=DEFAULT_ADDRESS, metavar="HOST:PORT",
            help="the engine's --grpc-listen address; with grpcs:// in front for TLS (default: %(default)s)",
        )  # fmt: skip
        parser.add_argument(
            "--event", action="append", default=[], metavar="NAME", dest="events",
            help="only these events, for instance request.finished; may be repeated",
        )  # fmt: skip
        parser.add_argument("--engine", default="", metavar="NAME", help="which engine, where a sidecar offers several")
        parser.add_argument("--dp-rank", type=int, default=None, metavar="N", help="which of its data-parallel ranks")
        parser.add_argument("--follow", action="store_true", help="go on until interrupted; connect again when lost")
        begin = parser.add_mutually_exclusive_group()
        begin.add_argument(
            "--lines", type=int, metavar="N", default=None,
            help=f"begin N events back, as far as the engine keeps them (default: {DEFAULT_LINES})",
        )  # fmt: skip
        begin.add_argument("--since", type=int, metavar="SEQ", default=None, help="begin with the event of this number")
        begin.add_argument("--from-snapshot", action="store_true", help="begin with the engine's state")
        parser.add_argument(
            "--token-ids",
            action="store_true",
            help="show token ids, if the engine tells them: they are what users wrote",
        )
        parser.add_argument("--json", action="store_true", dest="as_json", help="print a JSON object for each event")
        parser.add_argument(
            "--token-file", metavar="FILE", default=os.environ.get(TOKEN_VARIABLE),
            help=f"file with the server's token (default: {TOKEN_VARIABLE})",
        )  # fmt: skip
        parser.add_argument("--ca-file", metavar="FILE", default=None, help="PEM certificates to trust with grpcs://")

    def run(self, args: argparse.Namespace) -> int:
        """Print until the newest event, or for ever with `--follow`."""
        from kvwatch.stream.client import TelemetryClient
        from kvwatch.stream.lines import JsonLines, TextLines
        from kvwatch.stream.printing import print_stream

        lines = JsonLines() if args.as_json else TextLines()
        token = _read_token(args.token_file) if args.token_file else None
        roots = _read(args.ca_file, "--ca-file").encode() if args.ca_file else None
        with TelemetryClient(args.address, token=token, root_certificates=roots) as client:
            try:
                print_stream(client.subscribe(_request(args), is_resuming=args.follow), lines, is_following=args.follow)
            except BrokenPipeError:
                # The reader has had enough, as with `| head`; nothing is to be flushed at exit either.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


COMMAND = TailCommand()


def _request(args: argparse.Namespace) -> "SubscribeRequest":
    from kvwatch.stream.contract import SubscribeRequest

    return SubscribeRequest(
        events=args.events,
        seq=args.since,
        from_snapshot=args.from_snapshot,
        with_token_ids=args.token_ids,
        engine=args.engine,
        dp_rank=args.dp_rank,
        num_back=max(0, DEFAULT_LINES if args.lines is None else args.lines),
    )


def _read_token(path: str) -> str:
    lines = [line.strip() for line in _read(path, "--token-file").splitlines()]
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not tokens:
        raise ConfigError(f"--token-file: {path} holds no token; write one on a line of its own")
    return tokens[0]


def _read(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}: {path} cannot be read ({error}); give a readable text file") from error

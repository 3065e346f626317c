"""`kvwatch doctor`: what reads pages is imported when the command runs."""

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING

from kvwatch.admin.credentials import TOKEN_VARIABLE, find_token
from kvwatch.errors import ConfigError

if TYPE_CHECKING:
    from kvwatch.doctor.asking import Asker
    from kvwatch.insight.diagnosis import DiagnosisReport

EXIT_FINDINGS = 1
"""Something is the matter. (2, unreachable or wrong usage, is the command line's own.)"""

DEFAULT_SECONDS = 10.0
MIN_SECONDS, MAX_SECONDS = 1.0, 600.0
"""A page is rendered at most once a second; who looks for longer wants a dashboard."""


class DoctorCommand:
    """The command `doctor`. It has options and no settings; it finds a token where the admin API's server does.

    A token goes to the admin listener that was named. URL, which may be anybody's, gets it only if it is given with
    `--token-file`.
    """

    name = "doctor"
    help = "look at an engine's or a sidecar's metrics and say what is the matter"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options."""
        parser.add_argument("url", metavar="URL", help="address with /metrics, such as http://127.0.0.1:9400")
        parser.add_argument(
            "--seconds",
            type=float,
            default=DEFAULT_SECONDS,
            help=f"time between the two looks that are compared (default: {DEFAULT_SECONDS:g})",
        )
        parser.add_argument(
            "--admin", metavar="URL", help="admin listener, which has looked before; default: URL itself"
        )
        parser.add_argument(
            "--token-file",
            metavar="FILE",
            help=f"file with a token for the admin listener, or with the server's tokens (default, with --admin: "
            f"{TOKEN_VARIABLE})",
        )
        parser.add_argument(
            "--as", dest="token_name", metavar="NAME", help="which of the tokens; default: the first that may operate"
        )
        parser.add_argument("--json", action="store_true", dest="is_json", help="print JSON instead of text")

    def run(self, args: argparse.Namespace) -> int:
        """Look, print, and return 0 when all is well and 1 when not."""
        from kvwatch.doctor.asking import Asker
        from kvwatch.doctor.report import text_report

        if not MIN_SECONDS <= args.seconds <= MAX_SECONDS:
            raise ConfigError(f"--seconds: {args.seconds:g} is not from {MIN_SECONDS:g} to {MAX_SECONDS:g}")
        target = Asker(_root(args.url, "URL"), sleep=_wait)
        admin = Asker(_root(args.admin or args.url, "--admin"), token=_token(args))
        try:
            report = _own_diagnosis(admin, is_named=args.admin is not None) or target.observe(args.seconds)
        finally:
            target.close()
            admin.close()
        if args.is_json:
            import msgspec

            sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
        else:
            sys.stdout.write(text_report(report))
        return 0 if report.is_healthy else EXIT_FINDINGS


COMMAND = DoctorCommand()


def _wait(seconds: float) -> None:
    """Wait between two looks, and say so to whoever sits there; who reads a pipe has asked for the result only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"kvwatch: looked once; the second look, which tells what happens, is in {seconds:g} s\n")
        sys.stderr.flush()
    time.sleep(seconds)


def _token(args: argparse.Namespace) -> str | None:
    path = args.token_file or (os.environ.get(TOKEN_VARIABLE) if args.admin else None)
    return find_token(path, args.token_name) if path else None


def _own_diagnosis(admin: "Asker", *, is_named: bool) -> "DiagnosisReport | None":
    """Ask for what the target has found itself; say when it refuses, or is not where somebody said that it is."""
    from kvwatch.doctor.asking import DiagnosisRefusedError, TargetUnreachableError

    try:
        return admin.own_diagnosis()
    except TargetUnreachableError as error:
        if is_named or isinstance(error, DiagnosisRefusedError):
            sys.stderr.write(f"kvwatch: {error}\nkvwatch: the metrics page is judged instead\n")
        return None


def _root(url: str, name: str) -> str:
    given = url if "://" in url else f"http://{url}"
    if given.split("://", 1)[0] not in {"http", "https"} or not given.split("://", 1)[1]:
        raise ConfigError(f"{name}: {url!r} is no address; write for instance http://127.0.0.1:9400")
    return given

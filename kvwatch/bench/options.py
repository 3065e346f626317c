"""What a run is asked to do: the options of `kvwatch bench`, checked."""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvwatch.bench.assertions import Assertion, parse_assertion
from kvwatch.bench.scenarios import MIXED, SCENARIOS, TRACE
from kvwatch.bench.target import OFF, Wanted, root_of
from kvwatch.config import unknown_name
from kvwatch.errors import ConfigError

DEFAULT_CONCURRENCY = 8
DEFAULT_NUM_REQUESTS = 100
MAX_REQUESTS = 1_000_000
MAX_CONCURRENCY = 10_000


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the command line decides."""

    wanted: Wanted
    weights: dict[str, float]
    """Scenario -> weight; `trace` alone when the requests come from a file."""
    num_requests: int
    seed: int
    concurrency: int | None
    """Requests under way at once; None: no limit."""
    rate: float | None
    """Requests/s of a Poisson process; None for the other two ways to arrive."""
    trace: Path | None
    trace_speed: float
    trace_scale: float
    limit_tokens: int | None
    """Longest sequence to scale lengths to instead of the target's own."""
    request_timeout_seconds: float
    max_seconds: float | None
    max_retries: int
    has_images: bool
    api_key: str | None
    reset_token: str | None
    ca_file: str | None
    assertions: tuple[Assertion, ...]
    save: Path | None
    has_texts: bool
    compare: Path | None
    html: Path | None
    is_json: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    _add_target(parser.add_argument_group("target"))
    _add_load(parser.add_argument_group("load"))
    _add_results(parser.add_argument_group("results"))


def read_options(args: argparse.Namespace) -> Options:
    """Return the options that a parser prepared by `add_options` found.

    Raises:
        ConfigError: a value is wrong; the message says what is allowed.
    """
    if args.trace is not None and (args.rate is not None or args.scenario is not None):
        raise ConfigError("--trace says what is asked and when; leave out --scenario and --rate")
    weights = {TRACE: 1.0} if args.trace is not None else parse_scenarios(args.scenario or MIXED)
    is_open = args.trace is not None or args.rate is not None
    concurrency = args.concurrency if args.concurrency is not None or is_open else DEFAULT_CONCURRENCY
    return Options(
        wanted=Wanted(
            url=root_of(args.url), model=args.model, endpoint=args.endpoint, metrics_url=args.metrics_url,
            reset_url=OFF if args.no_reset else args.reset_url,
            ready_seconds=_within(args.wait_ready, 0, 86_400, "--wait-ready"),
        ),
        weights=weights,
        num_requests=int(_within(args.num_requests, 1, MAX_REQUESTS, "--num-requests")),
        seed=args.seed,
        concurrency=_optional_int(concurrency, 1, MAX_CONCURRENCY, "--concurrency"),
        rate=None if args.rate is None else _above_zero(args.rate, "--rate"),
        trace=args.trace,
        trace_speed=_above_zero(args.trace_speed, "--trace-speed"),
        trace_scale=_above_zero(args.trace_scale, "--trace-scale"),
        limit_tokens=_optional_int(args.limit_tokens, 64, 10**8, "--limit-tokens"),
        request_timeout_seconds=_above_zero(args.request_timeout, "--request-timeout"),
        max_seconds=None if args.max_seconds is None else _above_zero(args.max_seconds, "--max-seconds"),
        max_retries=int(_within(args.retries, 0, 1000, "--retries")),
        has_images=args.isolation_images,
        api_key=_secret(args.api_key_file, "--api-key-file"),
        reset_token=_secret(args.reset_token_file, "--reset-token-file"),
        ca_file=args.ca_file,
        assertions=tuple(parse_assertion(text, weights) for text in args.assertions),
        save=args.save,
        has_texts=args.save_texts,
        compare=args.compare,
        html=args.html,
        is_json=args.as_json,
    )  # fmt: skip


def parse_scenarios(text: str) -> dict[str, float]:
    """Read `short`, `mixed` or `short=2,long=1`.

    Raises:
        ConfigError: a scenario is unknown, a weight is no positive number, or a scenario is named twice.
    """
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, has_weight, number = (word.strip() for word in part.partition("="))
        if name not in SCENARIOS and name != MIXED:
            raise unknown_name(name, [*SCENARIOS, MIXED], "--scenario:")
        weight = _weight(number, part) if has_weight else 1.0
        mixed = {each: weight * scenario.mixed_weight for each, scenario in SCENARIOS.items()}
        for each, share in (mixed if name == MIXED else {name: weight}).items():
            if each in weights:
                raise ConfigError(f"--scenario: {each} is named twice in {text!r}; give it one weight")
            weights[each] = share
    return weights


def _weight(number: str, part: str) -> float:
    try:
        weight = float(number)
    except ValueError:
        weight = 0.0
    if not (math.isfinite(weight) and weight > 0):
        raise ConfigError(f"--scenario: {part.strip()!r} has no weight above 0; write for instance short=2,long=1")
    return weight


# ---------------------------------------------------------------- arguments


def _add_target(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--url", required=True, help="the server, for instance http://127.0.0.1:8000; with or without /v1")
    add("--model", help="served name (default: the first that the server lists)")
    add("--endpoint", choices=["completions", "chat"], default="completions", help="API (default: %(default)s)")
    add("--api-key-file", metavar="FILE", help="file with the API's key")
    add("--ca-file", metavar="FILE", help="PEM certificates to trust with https instead of the system's")
    add("--metrics-url", metavar="URL", help=f"the server's metrics (default: /metrics at --url; `{OFF}`: none)")
    add("--reset-url", metavar="URL", help="POST to it empties the prefix cache (default: by the server's kind)")
    add("--reset-token-file", metavar="FILE", help="file with the token that --reset-url wants")
    add("--no-reset", action="store_true", help="leave the prefix cache as it is, also for cold and warm")
    add("--wait-ready", type=float, default=0.0, metavar="SECONDS", help="wait for a server that is starting")


def _add_load(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    names = ", ".join(SCENARIOS)
    add("--scenario", metavar="NAME[=WEIGHT],...", help=f"what to ask: {names}; {MIXED} (the default) is all of them")
    add("--num-requests", type=int, default=DEFAULT_NUM_REQUESTS, metavar="N", help="default: %(default)s")
    add("--seed", type=int, default=0, help="decides order, lengths and texts (default: %(default)s)")
    add("--concurrency", type=int, metavar="N",
        help=f"clients that each send one request after the other (default: {DEFAULT_CONCURRENCY}); "
        "with --rate or --trace: most requests under way at once (default: no limit)")  # fmt: skip
    add("--rate", type=float, metavar="N", help="send N requests/s on average, whatever the answers (Poisson)")
    add("--trace", type=Path, metavar="FILE", help="send the requests of a trace at its times")
    add("--trace-speed", type=float, default=1.0, metavar="X", help="X times as fast as the trace")
    add("--trace-scale", type=float, default=1.0, metavar="X", help="lengths X times those of the trace")
    add("--limit-tokens", type=int, metavar="N", help="scale lengths to N tokens instead of the server's limit")
    add("--max-seconds", type=float, metavar="SECONDS", help="begin no request after this time")
    add(
        "--request-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="for each attempt (default: %(default)g)",
    )
    add(
        "--retries",
        type=int,
        default=0,
        metavar="N",
        help="try again after 429 and 503, when the server says (default: 0)",
    )
    add("--isolation-images", action="store_true", help="isolation also shows pictures, for models that see")


def _add_results(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--json", action="store_true", dest="as_json", help="print the report as JSON")
    add("--html", type=Path, metavar="FILE", help="write the report with plots as one HTML file")
    add("--assert", action="append", default=[], dest="assertions", metavar="'NAME<NUMBER'",
        help="exit with 1 unless it holds, for instance 'ttft_p99<2.0'; may be repeated")  # fmt: skip
    add("--save", type=Path, metavar="FILE", help="write every request, with a hash of its answer")
    add("--save-texts", action="store_true", help="the answers themselves, not only their hashes")
    add("--compare", type=Path, metavar="FILE", help="say which answers differ from those of an earlier --save")


# ---------------------------------------------------------------- values


def _within(value: float, low: float, high: float, flag: str) -> float:
    if not low <= value <= high:
        raise ConfigError(f"{flag}: {value:g} is out of range; it must be between {low:g} and {high:g}")
    return value


def _optional_int(value: int | None, low: float, high: float, flag: str) -> int | None:
    return None if value is None else int(_within(value, low, high, flag))


def _above_zero(value: float, flag: str) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{flag}: {value:g} is out of range; it must be above 0")
    return value


def _secret(path: str | None, flag: str) -> str | None:
    """Return the first line of a file that is neither empty nor a comment."""
    if path is None:
        return None
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}: {path} cannot be read ({error}); give a readable text file") from error
    found = next((line for line in lines if line and not line.startswith("#")), None)
    if found is None:
        raise ConfigError(f"{flag}: {path} holds no key; write one on a line of its own")
    return found


def kinds_of(weights: Mapping[str, float]) -> str:
    """Return the scenarios as a user would write them."""
    return ",".join(f"{name}={weight:g}" for name, weight in weights.items())

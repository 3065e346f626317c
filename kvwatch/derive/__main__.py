"""`python -m kvwatch.derive`: write everything that is generated, or with `--check` only compare.

Run from a checkout. Composes what its siblings and the exporters make; nothing imports this module.
"""

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path

import msgspec

import kvwatch.telemetry.events  # noqa: F401 - fills the registry
from kvwatch.admin.operations import OPERATIONS
from kvwatch.admin.verbs import verbs
from kvwatch.derive.chart import OWN_SETTINGS, with_settings
from kvwatch.derive.docs import events_section, metrics_section, replace_section, table
from kvwatch.derive.lock import broken_promises, decode_lock, encode_lock, make_lock
from kvwatch.derive.metrics import metric_specs
from kvwatch.derive.proto import moved_numbers, proto_text
from kvwatch.derive.settings import live_section, settings_section
from kvwatch.errors import KVWatchError, SchemaError
from kvwatch.exporters.prometheus.sample_page import sample_page
from kvwatch.sources.knowledge import SOURCES, knowledge
from kvwatch.stream.contract import SCHEMA
from kvwatch.telemetry.metrics import CATALOGUE
from kvwatch.telemetry.schema import REGISTRY
from kvwatch.wire.control import proto_text as control_proto_text

Generate = Callable[[str], str]
"""Takes what the file says now (empty when it is new) and returns what it should say."""

SETTINGS_OF = ("serve", "sidecar")
"""Commands whose settings have a section of their own."""


def artefacts() -> dict[str, Generate]:
    """Return every generated file, by its path in the repository."""
    return {
        "kvwatch/telemetry/events.lock.json": _lock,
        "docs/events.md": lambda page: replace_section(page, "events", events_section(REGISTRY)),
        "docs/metrics.md": lambda page: replace_section(page, "metrics", metrics_section(metric_specs(REGISTRY))),
        "docs/sources.md": lambda page: replace_section(page, "sources", _sources()),
        "docs/configuration.md": _configuration,
        "deploy/helm/kvwatch/values.schema.json": lambda page: _chart(page, "serve"),
        "deploy/helm/kvwatch-sidecar/values.schema.json": lambda page: _chart(page, "sidecar"),
        "docs/admin.md": lambda page: replace_section(page, "operations", _operations()),
        "kvwatch/stream/telemetry.proto": _proto,
        "kvwatch/wire/control.proto": lambda _: control_proto_text(),
        "tests/golden/exposition.txt": lambda _: sample_page("text").decode(),
    }


def main(argv: Sequence[str] | None = None, root: Path | None = None) -> int:
    """Write or check; return 1 when `--check` finds a difference and 2 when something cannot be generated.

    Args:
        argv: Words of the command line; default: the process's.
        root: The checkout; default: the one that this package was imported from.
    """
    parser = argparse.ArgumentParser(prog="python -m kvwatch.derive", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; show what differs and exit 1")
    args = parser.parse_args(argv)
    folder = root or Path(__file__).resolve().parents[2]
    num_stale = 0
    try:
        for name, generate in artefacts().items():
            path = folder / name
            now = path.read_text(encoding="utf-8") if path.exists() else ""
            wanted = generate(now)
            if wanted == now:
                continue
            num_stale += 1
            if args.check:
                _show(name, now, wanted)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(wanted, encoding="utf-8")
                sys.stdout.write(f"wrote {name}\n")
    except KVWatchError as error:
        sys.stderr.write(f"derive: {error}\n")
        return 2
    if args.check and num_stale:
        sys.stderr.write(f"derive: {num_stale} generated files differ from their declarations; run `make derive`\n")
    return int(args.check and num_stale > 0)


def _lock(now: str) -> str:
    old = decode_lock(now) if now else None
    new = make_lock(REGISTRY, CATALOGUE, old)
    broken = broken_promises(old, new) if old else []
    if broken:
        raise SchemaError("declarations break the lock (kvwatch/telemetry/events.lock.json):\n  " + "\n  ".join(broken))
    return encode_lock(new)


def _proto(now: str) -> str:
    moved = moved_numbers(now, SCHEMA)
    if moved:
        listed = "\n  ".join(moved)
        raise SchemaError(f"fields of the stream's messages keep their numbers; add new ones at the end:\n  {listed}")
    return proto_text(SCHEMA)


def _configuration(page: str) -> str:
    for name in SETTINGS_OF:
        settings = _settings_of(name)
        if settings is not None:
            page = replace_section(page, name, settings_section(settings))
    return replace_section(page, "live", live_section())


def _chart(page: str, name: str) -> str:
    settings = _settings_of(name)
    return page if settings is None else with_settings(page, settings, OWN_SETTINGS[name])


def _settings_of(name: str) -> type[msgspec.Struct] | None:
    """Return the settings of a command; none while the part that owns it is not installed: pages stay as they are."""
    for entry in entry_points(group="kvwatch.commands", name=name):
        try:
            command = entry.load()
        except ModuleNotFoundError:
            break
        settings: type[msgspec.Struct] = command.settings
        return settings
    return None


def _sources() -> str:
    rows = [(f"`{each.metric.name}`", *each.cells) for each in knowledge()]
    return table(("metric", *SOURCES), rows)


def _operations() -> str:
    rows = [
        (
            verb.operation.method,
            f"`{verb.operation.path}`",
            f"`{name}`",
            f"`{verb.operation.role}`",
            verb.operation.brief,
        )
        for name, verb in verbs(OPERATIONS).items()
        if verb.operation.is_described
    ]
    return table(("method", "path", "verb", "role", "what"), rows)


def _show(name: str, now: str, wanted: str) -> None:
    diff = difflib.unified_diff(now.splitlines(), wanted.splitlines(), name, f"{name} (derived)", lineterm="", n=1)
    sys.stdout.writelines(f"{line}\n" for line in diff)


if __name__ == "__main__":
    sys.exit(main())

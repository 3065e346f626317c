"""What may never change is locked, and the lock is up to date."""

from pathlib import Path

from kvwatch.derive.lock import broken_promises, decode_lock, encode_lock, make_lock
from kvwatch.telemetry import events
from kvwatch.telemetry.metrics import CATALOGUE
from kvwatch.telemetry.schema import REGISTRY

LOCK = Path(events.__file__).resolve().parents[1] / "events.lock.json"


def test_no_declaration_breaks_the_lock() -> None:
    old = decode_lock(LOCK.read_text(encoding="utf-8"))

    assert broken_promises(old, make_lock(REGISTRY, CATALOGUE, old)) == []


def test_every_declaration_is_locked() -> None:
    text = LOCK.read_text(encoding="utf-8")

    assert encode_lock(make_lock(REGISTRY, CATALOGUE, decode_lock(text))) == text, "run `make derive`"


def test_numbers_lie_in_the_range_of_their_family() -> None:
    ranges = {
        "block": (10, 29),
        "transfer": (30, 39),
        "request": (40, 59),
        "step": (60, 79),
        "control": (80, 89),
        "source": (90, 99),
    }

    for spec in REGISTRY:
        low, high = ranges[spec.family]
        assert low <= spec.number <= high, spec.name

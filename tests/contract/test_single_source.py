"""Names of metrics and events are written once, in the declarations; everything else follows from them."""

import ast
from collections.abc import Iterable
from pathlib import Path

import kvwatch
from kvwatch.derive.__main__ import main
from kvwatch.telemetry import events
from kvwatch.telemetry.metrics import CATALOGUE
from kvwatch.telemetry.schema import REGISTRY

ROOT = Path(kvwatch.__file__).resolve().parents[1]
PACKAGES = (ROOT / "kvwatch", ROOT / "engine", ROOT / "kernels")
DECLARATIONS = ROOT / "kvwatch" / "telemetry"
FOREIGN_NAMES = ROOT / "kvwatch" / "exporters" / "prometheus" / "aliases.py"
"""Writes another project's names, some of which are ours too."""


def sources() -> list[Path]:
    """All shipped modules outside the declarations."""
    files = [path for package in PACKAGES for path in package.rglob("*.py")]
    return [path for path in files if DECLARATIONS not in path.parents]


def strings(path: Path) -> list[str]:
    """String constants of a module, docstrings left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {
        id(node.value)
        for parent in ast.walk(tree)
        if isinstance(parent, documented)
        for node in parent.body
        if isinstance(node, ast.Expr)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
    ]


def test_no_module_outside_the_declarations_writes_a_metric_name() -> None:
    names = {metric.name for metric in CATALOGUE if "_" in metric.name}
    # The recorded response bodies and settings of other parts may use the same words for their own fields.
    ambiguous = {"prompt_tokens", "generated_tokens", "computed_tokens", "batch_size", "block_size_tokens"}

    for path in set(sources()) - {FOREIGN_NAMES}:
        for text in strings(path):
            assert (
                not text.startswith("kvwatch_")
                or text.split(".")[0] in {"kvwatch_engine", "kvwatch_kernels"}
                or (text == "kvwatch_")
            ), f"{path.name}: {text!r}"
            assert text not in names - ambiguous, f"{path.name} writes the metric name {text!r}"


def test_no_module_outside_the_declarations_writes_an_event_name() -> None:
    names = {spec.name for spec in REGISTRY}

    for path in sources():
        assert names.isdisjoint(strings(path)), path.name


def test_everything_generated_is_up_to_date() -> None:
    assert main(["--check"]) == 0


def test_every_event_class_is_named_in_a_unit_test() -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "unit").rglob("*.py"))

    assert [name for name in events.__all__ if name not in tests] == []


def test_every_event_class_is_made_by_the_engine_or_by_what_reads_a_foreign_one() -> None:
    made: set[str] = set()
    for path in (*(ROOT / "engine").rglob("*.py"), *(ROOT / "kvwatch" / "sources").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            # Called, or put into a table from which it is called.
            if isinstance(node, ast.Call):
                made |= _names([node.func])
            elif isinstance(node, ast.Dict):
                made |= _names(node.values)
            elif isinstance(node, ast.Tuple):
                made |= _names(node.elts)

    assert set(events.__all__) - made == set()


def _names(nodes: Iterable[ast.expr | None]) -> set[str]:
    return {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in nodes}

"""Promises about the folders and the base install."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvwatch.telemetry import events
from kvwatch.telemetry.schema import REGISTRY

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("folder", ["engine", "kernels", "dashboards", "tests"])
def test_folders_that_only_hold_packages_are_no_packages(folder: str) -> None:
    """`kernels` is the import name of another project, which transformers looks for."""
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize(
    "package", ["kvwatch", "engine/kvwatch_engine", "kernels/kvwatch_kernels", "dashboards/kvwatch_dashboards"]
)
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()


@pytest.mark.parametrize("name", ["utils.py", "common.py", "helpers.py", "misc.py"])
def test_no_module_is_called_after_nothing(name: str) -> None:
    assert not [
        path for package in ("kvwatch", "engine", "kernels", "dashboards") for path in (ROOT / package).rglob(name)
    ]


def test_the_observatory_runs_without_torch() -> None:
    """The base install is a sidecar of 100 MB, not an engine of gigabytes."""
    program = (
        "import sys\n"
        "import kvwatch.cli, kvwatch.observatory, kvwatch.logs, kvwatch.derive.scenario\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & "
        "{'torch', 'transformers', 'numba', 'triton', 'kvwatch_engine', 'kvwatch_kernels'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_every_event_is_exported_by_its_package() -> None:
    assert {spec.cls.__name__ for spec in REGISTRY} == set(events.__all__)


def test_no_shipped_file_is_longer_than_600_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for package in ("kvwatch", "engine", "kernels", "dashboards")
        for path in (ROOT / package).rglob("*.py")
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 600
    }
    assert not long

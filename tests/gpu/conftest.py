"""Where there is no GPU that can be used, says why: `make test-gpu` ends with it, the ordinary suite skips with it."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NEEDED = {"torch": (2, 11), "triton": (3, 6)}


def why_no_gpu() -> str | None:
    """Return what is missing, None when nothing is."""
    for package, needed in NEEDED.items():
        wanted = ".".join(map(str, needed))
        try:
            found = version(package)
        except PackageNotFoundError:
            return f"{package} is not installed: at least {wanted} is needed, in the interpreter that PYTHON names"
        if tuple(int(part) for part in found.split(".")[:2]) < needed:
            return f"{package} is {found}: at least {wanted} is needed"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU: a driver, and a build of torch for it, are needed"
    return None


def pytest_sessionstart(session: pytest.Session) -> None:
    reason = why_no_gpu()
    if session.config.rootpath == HERE and reason is not None:
        pytest.exit(f"no test can run: {reason}", returncode=1)


def pytest_report_header() -> list[str]:
    if why_no_gpu() is not None:
        return []
    import torch

    return [f"device: {torch.cuda.get_device_name()}, torch {torch.__version__}, triton {version('triton')}"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_no_gpu()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))

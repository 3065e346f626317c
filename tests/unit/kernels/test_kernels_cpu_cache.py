"""A disk cache of compiled code that is broken, full or of another release costs time, never the start."""

import os
import resource
import shutil
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numba
import pytest
from numba import types
from numba.core.event import install_recorder

import kvwatch_kernels
from kvwatch_kernels.cpu.compiled import entry_point, source_digest
from kvwatch_kernels.cpu.memory import fetch_add, i64_at
from kvwatch_kernels.cpu.threads import make_python_pool

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut-short": lambda whole: whole[: len(whole) // 2],
    "empty": lambda _: b"",
    "zeros": lambda whole: bytes(len(whole)),
    "text": lambda _: b"not a pickle",
}


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def is_compiled_anew() -> bool:
    """Get the same code by way of the disk cache and run it; return whether it had to be compiled."""

    def count(address: int) -> None:
        fetch_add(i64_at(address), 0)

    counter = array("q", [41])
    with install_recorder("numba:run_pass") as recorder:
        address = entry_point(types.void(types.int64), count)
    make_python_pool()(address, counter.buffer_info()[0], 1)
    assert counter[0] == 42
    return bool(recorder.buffer)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow: every write fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("suffix", ["nbi", "nbc"], ids=["index", "code"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_broken_file_of_the_cache_is_replaced(
    suffix: str, damage: Callable[[bytes], bytes], cache_folder: Path
) -> None:
    assert is_compiled_anew()
    assert not is_compiled_anew()
    (file,) = cache_folder.rglob(f"*.{suffix}")
    file.write_bytes(damage(file.read_bytes()))

    assert is_compiled_anew()
    assert not is_compiled_anew()


def test_on_a_full_disk_the_code_is_compiled_in_memory(cache_folder: Path) -> None:
    with full_disk():
        assert is_compiled_anew()
        assert is_compiled_anew()

    assert not list(cache_folder.rglob("*.nbc"))
    assert is_compiled_anew()
    assert not is_compiled_anew()


def test_another_limit_of_a_quantised_format_is_another_key(tmp_path: Path) -> None:
    """`quant.py` lies outside of `cpu/`, but its numbers are compiled in."""
    package = shutil.copytree(Path(kvwatch_kernels.__path__[0]), tmp_path / "kvwatch_kernels")
    digests = [digest_of(tmp_path)]
    quant = package / "quant.py"
    quant.write_text(quant.read_text().replace("torch.int8: 127.0", "torch.int8: 126.0"))
    digests.append(digest_of(tmp_path))

    assert digests[0] == source_digest()
    assert digests[1] != digests[0]


def digest_of(folder: Path) -> str:
    """Return the digest of the package in another folder."""
    command = [sys.executable, "-c", "from kvwatch_kernels.cpu import compiled; print(compiled.source_digest())"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout[:-1]

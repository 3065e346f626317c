"""How compiled code is launched and when it is compiled."""

import os
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from kernel_batches import dense_sequence, paged_batch
from numba import types
from numba.core.event import install_recorder

from kvwatch_kernels.activation import silu_and_multiply
from kvwatch_kernels.cpu.compiled import entry_point
from kvwatch_kernels.cpu.memory import fetch_add, i64_at
from kvwatch_kernels.cpu.threads import Launch, call_on_threads, find_torch_pool, make_python_pool
from kvwatch_kernels.cpu.warmup import warm_up
from kvwatch_kernels.kv_store import kv_store
from kvwatch_kernels.quant import QUANTISED_LIMITS
from kvwatch_kernels.rms_norm import rms_norm
from kvwatch_kernels.rotary import rotate_and_store


@pytest.fixture(autouse=True)
def _restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def counting() -> int:
    """Address of a function that adds one to the integer at the address it is given."""

    def count(address: int) -> None:
        fetch_add(i64_at(address), 0)

    compiled = numba.cfunc(types.void(types.int64))(count)
    _KEPT.append(compiled)
    return int(compiled.address)


_KEPT: list[object] = []


def launchers() -> list[Launch]:
    torch_pool = find_torch_pool()
    return [make_python_pool(), *([torch_pool] if torch_pool else [])]


@pytest.mark.parametrize("launch", launchers())
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_thread_runs_the_function_once(launch: Launch, num_threads: int, counting: int) -> None:
    counter = array("q", [0])

    for call in range(1, 50):
        launch(counting, counter.buffer_info()[0], num_threads)
        assert counter[0] == call * num_threads


@pytest.mark.skipif(sys.platform != "linux", reason="torch ships libgomp in its wheels for Linux only")
def test_on_linux_torchs_own_pool_is_found() -> None:
    assert find_torch_pool() is not None


def test_no_more_threads_than_torch_uses_and_than_there_is_work(counting: int) -> None:
    torch.set_num_threads(3)
    counter = array("q", [0])

    for num_items, expected in ((0, 1), (1, 1), (2, 2), (3, 3), (100, 3)):
        counter[0] = 0
        call_on_threads(counting, counter, num_items)
        assert counter[0] == expected


def test_the_interpreter_is_free_while_compiled_code_runs() -> None:
    """The server's other threads go on during a step."""
    progress = 0
    is_done = threading.Event()

    def count_up() -> None:
        nonlocal progress
        while not is_done.is_set():
            progress += 1

    batch = paged_batch([dense_sequence(600, 600, heads=(8, 8))])
    batch.attend()
    other = threading.Thread(target=count_up)
    other.start()
    try:
        torch.set_num_threads(1)
        before = progress
        for _ in range(20):
            batch.attend()
        assert progress > before
    finally:
        is_done.set()
        other.join()


@pytest.mark.parametrize("stored", list(QUANTISED_LIMITS), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_after_the_warm_up_no_use_of_a_quantised_cache_compiles_anything(
    dtype: torch.dtype, stored: torch.dtype
) -> None:
    warm_up(dtype, 9, 3, 64, 16, cache_dtype=stored)

    with install_recorder("numba:compile") as recorder:
        sequences = [dense_sequence(70, 300, dtype=dtype), dense_sequence(1, 2, dtype=dtype)]
        paged_batch(sequences, block_size=8).quantised(stored).attend()
        cache, scales = torch.zeros(4, 2, 8, 24).to(stored), torch.zeros(4, 2, 8)
        key, angles = torch.ones(5, 2, 24, dtype=dtype), torch.ones(5, 12, dtype=dtype)
        kv_store(key, key, cache, cache, np.arange(5), key_scales=scales, value_scales=scales)
        qkv = torch.ones(5, 7, 24, dtype=dtype)
        rotate_and_store(qkv, angles, angles, cache, cache, np.arange(5), key_scales=scales, value_scales=scales)

    assert recorder.buffer == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_after_the_warm_up_no_shape_compiles_anything(dtype: torch.dtype) -> None:
    warm_up(dtype, 9, 3, 64, 16)

    with install_recorder("numba:compile") as recorder:
        paged_batch([dense_sequence(70, 300, dtype=dtype), dense_sequence(1, 2, dtype=dtype)], block_size=8).attend()
        paged_batch([dense_sequence(1, 300, heads=(5, 1), head_dim=24, dtype=dtype)]).attend(sliding_window=30)
        rows, angles = torch.ones(5, 48, dtype=dtype), torch.ones(5, 12, dtype=dtype)
        rms_norm(rows, rows[0], 1e-5)
        silu_and_multiply(rows)
        cache = torch.zeros(4, 2, 8, 24, dtype=dtype)
        rotate_and_store(torch.ones(5, 7, 24, dtype=dtype), angles, angles, cache, cache, np.arange(5))

    assert recorder.buffer == []


WARM_UP = """
import torch
from numba.core.event import install_recorder
from kvwatch_kernels.cpu.warmup import warm_up
with install_recorder("numba:compile") as recorder:
    warm_up(torch.float32, 2, 1, 16, 4)
print(len(recorder.buffer))
"""


def number_of_compilations(cache_folder: Path) -> int:
    """Warm up in a process of its own."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache_folder)}
    command = [sys.executable, "-c", WARM_UP]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)


def test_a_second_process_loads_what_the_first_one_compiled(tmp_path: Path) -> None:
    assert number_of_compilations(tmp_path) > 0
    assert number_of_compilations(tmp_path) == 0


def test_without_a_writable_cache_folder_the_code_is_compiled_in_memory() -> None:
    """A container with a read-only file system still serves."""
    namespace: dict[str, object] = {"fetch_add": fetch_add, "i64_at": i64_at}
    # Code that lies in no file has no place to be cached at either.
    exec("def count(address):\n    fetch_add(i64_at(address), 0)\n", namespace)
    counter = array("q", [0])

    address = entry_point(types.void(types.int64), namespace["count"])  # type: ignore[arg-type]
    make_python_pool()(address, counter.buffer_info()[0], 1)

    assert counter[0] == 1

"""Run a C function on the threads that torch already has.

torch's matrix products run on the OpenMP pool of the libgomp that torch ships. Its threads spin for a while after each
product; a second pool (Numba's own layers) would have to wait for the core that they spin on. So the attention enters
the same pool, by the function that compilers call for `#pragma omp parallel`. Where torch ships no libgomp (macOS,
Windows), plain Python threads do it: a call into C releases the interpreter.
"""

import ctypes
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import TypeAlias

import torch

Launch: TypeAlias = Callable[[int, int, int], None]
"""`launch(function, argument, num_threads)`: call the C function at address `function` once on each thread."""


_MOST_THREADS = 512


def find_torch_pool() -> Launch | None:
    """The launcher of torch's own OpenMP pool; None where torch is built without libgomp."""
    parallel = next(filter(None, map(_parallel_of, _openmp_libraries())), None)
    if parallel is None:
        return None

    def launch(function: int, argument: int, num_threads: int) -> None:
        parallel(function, argument, num_threads, 0)

    return launch


def _openmp_libraries() -> list[Path]:
    return sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))


@cache
def team_size_code() -> int:
    """Address of `int omp_get_num_threads(void)` of torch's OpenMP pool; 0 where other threads make calls.

    The pool may grant fewer threads than were asked for; the others never do.
    """
    if find_torch_pool() is None:
        return 0
    for library in _openmp_libraries():
        try:
            return ctypes.cast(ctypes.CDLL(str(library)).omp_get_num_threads, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    return 0


def _parallel_of(library: Path) -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel(function, argument, num_threads, flags)` of an OpenMP library; None where it has none."""
    try:
        parallel = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


def make_python_pool() -> Launch:
    """A launcher that uses Python threads."""
    # Threads of one call may wait for each other: there must be one for each.
    pool = ThreadPoolExecutor(max_workers=_MOST_THREADS, thread_name_prefix="kvwatch-kernels")
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_int64)

    def launch(function: int, argument: int, num_threads: int) -> None:
        assert num_threads <= _MOST_THREADS + 1, "more threads than the pool has"
        call = prototype(function)
        others = [pool.submit(call, argument) for _ in range(num_threads - 1)]
        call(argument)
        wait(others)

    return launch


@cache
def launcher() -> Launch:
    """The launcher of this process."""
    return find_torch_pool() or make_python_pool()


def call_on_threads(function: int, arguments: "array[int]", num_items: int) -> None:
    """Call a C function on as many threads as torch uses, at most one a work item, and wait for all of them.

    Args:
        function: address of `void function(int64_t)`; the threads share the work out among themselves.
        arguments: what it is given the address of.
        num_items: number of work items.
    """
    address = arguments.buffer_info()[0]
    launcher()(function, address, max(1, min(num_items, torch.get_num_threads())))

"""Many calls of compiled code as one: the threads go from call to call by themselves.

A step of a decoder is hundreds of calls that take a few microseconds each. Made one by one, each of them would take the
interpreter's lock, lay out its arguments, and wake the threads. A program lays them out once; then all threads walk
its calls side by side and wait for each other between two of them.
"""

import ctypes
import time
from collections.abc import Sequence
from functools import cache

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

from kvwatch_kernels.cpu.call import KernelCall
from kvwatch_kernels.cpu.compiled import entry_point, source_digest, subroutine
from kvwatch_kernels.cpu.elements import I64_POINTER
from kvwatch_kernels.cpu.memory import Pointer, fetch_add, i64_at, read, write
from kvwatch_kernels.cpu.places import Places, leave_shared_core, note_core
from kvwatch_kernels.cpu.threads import launcher, team_size_code
from kvwatch_kernels.cpu.vectors import I32, I64, emitted

Int64Array = npt.NDArray[np.int64]

_ALIGNMENT = 8
"""Numbers of 64 bits in a cache line: each call's arguments begin on a line of their own."""
_SPINS_BEFORE_YIELD = 2_000
"""Looks at the others before a waiting thread offers its core to whoever has work: some tens of microseconds."""

# Places in the argument array.
(
    _FUNCTIONS,  # address of i64[num_calls]: addresses of the functions
    _PARAMS,  # address of i64[num_calls]: addresses of their arguments
    _NUM_CALLS,
    _NUM_THREADS,
    _YIELD,  # address of `int sched_yield(void)`, 0 for none
    _TEAM_SIZE,  # address of `int f(void)` that says how many threads there really are, 0 where `_NUM_THREADS` does
    _KINDS,  # address of i64[num_calls]: kind of each call
    _TICKS,  # address of i64[num_kinds]: ticks of the processor's clock that calls of each kind took in this run
) = range(8)
_ARRIVALS = 8
"""Threads that have ended a call, over all calls so far; on a cache line of its own."""
_ENTRANTS = 9
"""Threads that have begun: the first one looks at the clock."""
_PLACES = 10
"""Address of the threads' places (`places.py`), 0 where they stay where they are put."""
_PARAMS_LENGTH = 16


@emitted(types.int64, I64_POINTER, types.int64)
def read_shared(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value) -> ir.Value:
    """`read_shared(pointer, i)`: element i as another thread left it; what that thread wrote before is seen too."""
    return builder.load_atomic(builder.gep(pointer, [index]), "acquire", 8)


@emitted(types.void)
def relax(builder: ir.IRBuilder) -> None:
    """Tell the processor that this thread waits in a loop."""
    if binding.get_default_triple().startswith(("x86_64", "i686")):
        function_type = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.sse2.pause"), [])


@emitted(types.int64)
def cycles(builder: ir.IRBuilder) -> ir.Value:
    """The processor's clock, in ticks of its own; 0 where it has none."""
    function_type = ir.FunctionType(I64, [])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, "llvm.readcyclecounter"), [])


@emitted(types.void, types.int64, types.int64)
def call_with(builder: ir.IRBuilder, function: ir.Value, argument: ir.Value) -> None:
    """`call_with(f, x)`: call `void f(int64_t)`."""
    function_type = ir.FunctionType(ir.VoidType(), [I64]).as_pointer()
    builder.call(builder.inttoptr(function, function_type), [argument])


@emitted(types.int64, types.int64)
def call_plain(builder: ir.IRBuilder, function: ir.Value) -> ir.Value:
    """`call_plain(f)`: call `int f(void)`."""
    function_type = ir.FunctionType(I32, []).as_pointer()
    return builder.sext(builder.call(builder.inttoptr(function, function_type), []), I64)


@subroutine
def wait_for_all(params: Pointer, num_arrivals: int, member: int, num_threads: int) -> None:
    """Say that this thread of the team has ended a call, and wait until `num_arrivals` have been said in all."""
    places = i64_at(read(params, _PLACES))
    if read(params, _PLACES) != 0:
        note_core(places, member)
    if fetch_add(params, _ARRIVALS) + 1 == num_arrivals:
        return
    spins = 0
    while read_shared(params, _ARRIVALS) < num_arrivals:
        spins += 1
        if spins < _SPINS_BEFORE_YIELD or read(params, _YIELD) == 0:
            relax()
        else:
            if spins % _SPINS_BEFORE_YIELD == 0 and read(params, _PLACES) != 0:
                leave_shared_core(places, member, num_threads)
            call_plain(read(params, _YIELD))


@subroutine
def run_calls(params: Pointer) -> None:
    """What every thread does: all calls, one after the other."""
    functions, arguments = i64_at(read(params, _FUNCTIONS)), i64_at(read(params, _PARAMS))
    num_threads = read(params, _NUM_THREADS)
    if read(params, _TEAM_SIZE) != 0:
        num_threads = call_plain(read(params, _TEAM_SIZE))
    kinds, ticks = i64_at(read(params, _KINDS)), i64_at(read(params, _TICKS))
    member = fetch_add(params, _ENTRANTS)
    is_timing = member == 0
    before = cycles()
    for index in range(read(params, _NUM_CALLS)):
        call_with(read(functions, index), read(arguments, index))
        if num_threads > 1:
            wait_for_all(params, (index + 1) * num_threads, member, num_threads)
        if is_timing:
            after, kind = cycles(), read(kinds, index)
            write(ticks, kind, read(ticks, kind) + after - before)
            before = after


@cache
def program_code() -> int:
    """Address of the compiled walk (compiled, or loaded from the disk cache, once in a process)."""
    digest = source_digest()

    def run(address: numba.int64) -> None:
        digest  # noqa: B018  # part of the cache's key
        run_calls(i64_at(address))

    return entry_point(types.void(types.int64), run)


@cache
def _yield_address() -> int:
    """Address of `sched_yield`; 0 where the system has none."""
    try:
        return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
    except (OSError, AttributeError, TypeError):
        return 0


class Program:
    """Calls that run one after the other, each seeing what those before it wrote; any number of times. One at a time.

    What differs from run to run is written into `params` after `begin`, and holds until the next `begin`.
    """

    def __init__(self, calls: Sequence[KernelCall], kinds: Sequence[int]) -> None:
        """Take over calls.

        Args:
            calls: at least one. Addresses in their arguments must stay valid as long as the program is run.
            kinds: number of each call's kind, from 0; the time of each kind is measured.
        """
        starts = np.cumsum([0, *(-(-len(call.params) // _ALIGNMENT) * _ALIGNMENT for call in calls)])
        self._pristine = np.zeros(starts[-1], dtype=np.int64)
        for start, call in zip(starts[:-1].tolist(), calls, strict=True):
            self._pristine[start : start + len(call.params)] = call.params
        self._params = _aligned(starts[-1])
        self._starts = starts[:-1]
        self._functions = np.array([call.function for call in calls], dtype=np.int64)
        self._addresses = self._params.ctypes.data + 8 * self._starts
        self._max_threads = max(call.num_items for call in calls)
        self._head = _aligned(_PARAMS_LENGTH)
        self._places = Places()
        self._head[_FUNCTIONS], self._head[_PARAMS] = self._functions.ctypes.data, self._addresses.ctypes.data
        self._head[_NUM_CALLS] = len(calls)
        self._head[_YIELD], self._head[_TEAM_SIZE] = _yield_address(), team_size_code()
        self._kinds, self._ticks = np.array(kinds, dtype=np.int64), _aligned(max(kinds) + 1)
        self.duration_ns = 0
        """Time of the last run."""
        self._head[_KINDS], self._head[_TICKS] = self._kinds.ctypes.data, self._ticks.ctypes.data

    def rows(self, indices: Sequence[int], width: int) -> Int64Array:
        """Return the places of some calls' arguments in `params`, to write them all at once.

        Args:
            indices: of the calls.
            width: numbers of each.

        Returns:
            i64[len(indices), width], to index `params` with.
        """
        return np.asarray(self._starts[list(indices), None] + np.arange(width), dtype=np.int64)

    @property
    def params(self) -> Int64Array:
        """Arguments of all calls in the coming run, or as the last run left them."""
        return self._params

    def begin(self) -> None:
        """Set all arguments to what the calls were made with."""
        self._params[:] = self._pristine

    def run(self) -> None:
        """Run all calls, on as many threads as torch uses at most, without the interpreter's lock."""
        num_threads = max(1, min(self._max_threads, torch.get_num_threads()))
        self._head[_NUM_THREADS], self._head[_ARRIVALS], self._head[_ENTRANTS] = num_threads, 0, 0
        self._head[_PLACES] = self._places.address(num_threads)
        self._ticks[:] = 0
        started = time.perf_counter_ns()
        launcher()(program_code(), self._head.ctypes.data, num_threads)
        self.duration_ns = time.perf_counter_ns() - started

    def durations_ns(self) -> list[int] | None:
        """Return what the calls of each kind took in the last run, as one of its threads saw it, waiting included.

        Returns:
            One for each kind, by its number: parts of `duration_ns`. None where the processor has no clock to read.
        """
        ticks: list[int] = self._ticks.tolist()
        total = sum(ticks)
        return [self.duration_ns * each // total for each in ticks] if total > 0 else None


def _aligned(length: int) -> Int64Array:
    """Return i64[length], on cache lines of its own."""
    memory = np.zeros(length + 2 * _ALIGNMENT, dtype=np.int64)
    first = -(memory.ctypes.data // 8) % _ALIGNMENT
    return memory[first : first + length]

"""The cores that the threads of a team run on: two of them that share one while another is free, part.

A system moves a thread to another core when that wakes up, or has waited for a while. Threads that wait for each other
every few microseconds do neither: they take turns on one core, for as long as a whole step, beside a core that has
become free after somebody else had needed it for a moment. So a thread that has to wait looks who else is where it is.
Linux only; elsewhere threads stay where they are put.
"""

import ctypes
import os
from functools import cache

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types

from kvwatch_kernels.cpu.compiled import subroutine
from kvwatch_kernels.cpu.memory import Pointer, read, write
from kvwatch_kernels.cpu.vectors import I32, I64, emitted

MAX_TEAM = 64
"""Threads of a larger team stay where they are put."""
_MASK_WORDS = 16
_MASK_BYTES = 8 * _MASK_WORDS
_MOST_CORES = 64 * _MASK_WORDS
_LINE = 8
"""Numbers of 64 bits in a cache line."""

# Places in the array.
(
    _GET_CORE,  # address of `int sched_getcpu(void)`
    _SET_AFFINITY,  # address of `int sched_setaffinity(pid_t, size_t, const cpu_set_t *)`
    _ADDRESS,  # of the array itself
) = range(3)
_MASK = _LINE
"""The cores that threads may run on, a bit for each."""
CORES = _MASK + _MASK_WORDS
"""The core of each thread, on cache lines of their own."""
_OTHERS = CORES + MAX_TEAM * _LINE
"""For each thread, room for a mask without one core."""
_LENGTH = _OTHERS + MAX_TEAM * _MASK_WORDS


@emitted(types.int64, types.int64)
def core_now(builder: ir.IRBuilder, function: ir.Value) -> ir.Value:
    """`core_now(f)`: call `int f(void)`."""
    function_type = ir.FunctionType(I32, []).as_pointer()
    return builder.sext(builder.call(builder.inttoptr(function, function_type), []), I64)


@emitted(types.void, types.int64, types.int64)
def run_on(builder: ir.IRBuilder, function: ir.Value, mask: ir.Value) -> None:
    """`run_on(f, mask)`: let this thread run on the cores of a mask only, by `sched_setaffinity`."""
    function_type = ir.FunctionType(I32, [I32, I64, I64]).as_pointer()
    arguments = [ir.Constant(I32, 0), ir.Constant(I64, _MASK_BYTES), mask]
    builder.call(builder.inttoptr(function, function_type), arguments)


@emitted(types.int64, types.int64, types.int64)
def without_bit(builder: ir.IRBuilder, word: ir.Value, bit: ir.Value) -> ir.Value:
    """`without_bit(word, i)`: the word with bit i cleared."""
    return builder.and_(word, builder.not_(builder.shl(ir.Constant(I64, 1), bit)))


@subroutine
def note_core(places: Pointer, member: int) -> None:
    """Write down on which core this thread of the team is."""
    write(places, CORES + member * _LINE, core_now(read(places, _GET_CORE)))


@subroutine
def leave_shared_core(places: Pointer, member: int, num_threads: int) -> None:
    """Go to another core if another thread of the team was last seen on this one."""
    core = read(places, CORES + member * _LINE)
    is_shared = False
    for other in range(num_threads):
        if other != member and read(places, CORES + other * _LINE) == core:
            is_shared = True
    if is_shared and 0 <= core < _MOST_CORES:
        others = _OTHERS + member * _MASK_WORDS
        for word in range(_MASK_WORDS):
            write(places, others + word, read(places, _MASK + word))
        word = core // 64
        write(places, others + word, without_bit(read(places, _MASK + word), core - 64 * word))
        run_on(read(places, _SET_AFFINITY), read(places, _ADDRESS) + 8 * others)
        run_on(read(places, _SET_AFFINITY), read(places, _ADDRESS) + 8 * _MASK)
        note_core(places, member)


@cache
def _functions() -> tuple[int, int] | None:
    """Addresses of the system's functions; None where it has none."""
    try:
        library = ctypes.CDLL(None)
        found = [ctypes.cast(each, ctypes.c_void_p).value for each in (library.sched_getcpu, library.sched_setaffinity)]
    except (OSError, AttributeError, TypeError):
        return None
    return (found[0], found[1]) if found[0] and found[1] and hasattr(os, "sched_getaffinity") else None


class Places:
    """Where the threads of one team are. A team at a time."""

    def __init__(self) -> None:
        """Make room."""
        self._memory: npt.NDArray[np.int64] = np.zeros(_LENGTH + _LINE, dtype=np.int64)
        first = -(self._memory.ctypes.data // 8) % _LINE
        self._array = self._memory[first : first + _LENGTH]
        self._cores: set[int] = set()

    def address(self, num_threads: int) -> int:
        """Return the address for compiled code; 0 where nobody should move, since there are no cores to spare.

        It is valid as long as this object lives.

        Args:
            num_threads: of the team, which may run where the calling thread may.
        """
        functions = _functions()
        if functions is None or not 1 < num_threads <= MAX_TEAM:
            return 0
        cores = os.sched_getaffinity(0)
        if num_threads > len(cores) or max(cores) >= _MOST_CORES:
            return 0
        if cores != self._cores:
            self._cores = cores
            self._array[_GET_CORE], self._array[_SET_AFFINITY] = functions
            self._array[_ADDRESS] = self._array.ctypes.data
            bits = np.zeros(_MOST_CORES, dtype=np.uint8)
            bits[sorted(cores)] = 1
            self._array[_MASK : _MASK + _MASK_WORDS] = np.packbits(bits, bitorder="little").view(np.int64)
        self._array[CORES:_OTHERS:_LINE] = np.arange(-1, -MAX_TEAM - 1, -1)
        return self._array.ctypes.data

"""Threads of a team that share a core part, if there is another one; nobody else's choice of cores is changed."""

import os
import threading
from collections.abc import Callable

import numba
import numpy as np
import pytest
from numba import types

from kvwatch_kernels.cpu.memory import i64_at, read, write
from kvwatch_kernels.cpu.places import CORES, Places, leave_shared_core, note_core

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no cores to choose")
_OTHER = CORES + 8
"""The place of the core of the team's second thread."""


def _look(address: int) -> None:
    """See `look`; compiled."""
    arguments = i64_at(address)
    places = i64_at(read(arguments, 0))
    note_core(places, 0)
    core = read(places, CORES)
    write(arguments, 1, core)
    write(places, _OTHER, core if read(arguments, 2) == 1 else core + 1)
    leave_shared_core(places, 0, 2)
    write(arguments, 3, read(places, CORES))


_COMPILED = numba.cfunc(types.void(types.int64))(_look)


def look(places: int, *, is_shared: bool) -> tuple[int, int]:
    """Return the core of this thread before and after it looked who else is there: the second one, or nobody."""
    arguments = np.array([places, -1, is_shared, -1], dtype=np.int64)
    _COMPILED.ctypes(arguments.ctypes.data)
    return int(arguments[1]), int(arguments[3])


def on_a_thread(work: Callable[[], None]) -> None:
    """Do something on a thread of its own, whose cores nobody else has."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@pytest.fixture
def two_cores() -> set[int]:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("there is one core only")
    return set(sorted(cores)[:2])


def test_who_shares_a_core_with_another_of_the_team_goes_elsewhere_and_may_come_back(two_cores: set[int]) -> None:
    def work() -> None:
        os.sched_setaffinity(0, two_cores)
        places = Places()
        for _ in range(20):
            before, after = look(places.address(2), is_shared=True)
            assert {before, after} == two_cores
            assert os.sched_getaffinity(0) == two_cores

    on_a_thread(work)


def test_who_is_alone_on_a_core_stays(two_cores: set[int]) -> None:
    def work() -> None:
        os.sched_setaffinity(0, two_cores)
        places = Places()  # its memory lives as long as it does
        before, after = look(places.address(2), is_shared=False)
        assert before == after

    on_a_thread(work)


def test_the_cores_are_those_that_the_thread_has_now(two_cores: set[int]) -> None:
    places = Places()

    def work() -> None:
        os.sched_setaffinity(0, two_cores)
        assert places.address(2) != 0
        os.sched_setaffinity(0, {min(two_cores)})
        assert places.address(2) == 0, "there is no other core"
        os.sched_setaffinity(0, two_cores)
        before, after = look(places.address(2), is_shared=True)
        assert {before, after} == two_cores

    on_a_thread(work)


def test_nobody_moves_in_a_team_with_more_threads_than_cores_or_alone() -> None:
    places = Places()

    assert places.address(len(os.sched_getaffinity(0)) + 1) == 0
    assert places.address(1) == 0
    assert places.address(10_000) == 0

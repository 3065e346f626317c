"""Calls that wait for an engine have threads of their own: who waits for a stuck one takes none from the metrics."""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

MAX_THREADS = 8
"""Calls that wait at a time; further ones wait for these."""

P = ParamSpec("P")
T = TypeVar("T")

_pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="kvwatch-admin")


async def off_loop(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function on another thread and return what it returns."""
    return await asyncio.get_running_loop().run_in_executor(_pool, functools.partial(function, *args, **kwargs))

"""Compile entry points once per machine: Numba's disk cache, keyed on this package's own sources.

Numba notices a change in the file of a cached function only, not in the files of the functions that it calls, and
wheels carry fixed file times. The digest of all sources is therefore part of each entry point's key.
"""

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache
from numba.core.errors import NumbaError

_LOG = logging.getLogger(__name__)

subroutine = numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Decorator of functions that only compiled code calls: no wrappers, which would double the time to compile."""

inlined = numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, inline="always")
"""The same, merged into its callers before anything is compiled: each level of separate functions is optimised anew,
with everything below it."""


_KEPT: list[Any] = []
"""Compiled code lives as long as its Python object."""


@cache
def source_digest() -> str:
    """Digest of the package's compiled sources, and of the numbers of `quant.py`, which are compiled in."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in (*sorted(folder.glob("*.py")), folder.parent / "quant.py"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def entry_point(signature: Any, body: Callable[..., Any]) -> int:
    """Compile `body`, a closure over `source_digest()`, or load it from the disk cache.

    A disk cache that is of no use (no folder that can be written to, a full disk, files that a crash cut short) costs
    time, never the start: broken files are replaced, and what cannot be kept on disk is compiled in memory.

    Args:
        signature: Numba signature of plain C types.
        body: becomes a C function; it must not raise.

    Returns:
        The address of the C function, which holds no Python lock and stays valid until the process ends.

    Raises:
        NumbaError: `body` cannot be compiled.
    """
    compiled = _compiled_through_cache(signature, body) or numba.cfunc(signature)(body)
    _KEPT.append(compiled)
    return int(compiled.address)


def _compiled_through_cache(signature: Any, body: Callable[..., Any]) -> Any:
    """Compile or load by way of the disk cache; a second time if its files are broken. None if that is of no use."""
    for _ in range(2):
        try:
            return numba.cfunc(signature, cache=True)(body)
        except NumbaError:
            raise
        except Exception as error:  # whatever unpickling broken files or writing to a folder raises
            _LOG.warning("disk cache of compiled kernels: %s: %s: %s", body.__name__, type(error).__name__, error)
        try:
            FunctionCache(body).flush()
        except (OSError, RuntimeError):  # the folder cannot be written to, or there is none
            return None
    return None

"""Compile entry points once per machine: Numba's disk cache, keyed on this package's own sources.

Numba notices a change in the file of a cached function only, not in the files of the functions that it calls, and
wheels carry fixed file times. The digest of all sources is therefore part of each entry point's key.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba

subroutine = numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Decorator of functions that only compiled code calls: no wrappers, which would double the time to compile."""

inlined = numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, inline="always")
"""The same, merged into its callers before anything is compiled: each level of separate functions is optimised anew,
with everything below it."""


_KEPT: list[Any] = []
"""Compiled code lives as long as its Python object."""


@cache
def source_digest() -> str:
    """Digest of the package's compiled sources."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def entry_point(signature: Any, body: Callable[..., Any]) -> int:
    """Compile `body`, a closure over `source_digest()`, or load it from the disk cache.

    Args:
        signature: Numba signature of plain C types.
        body: becomes a C function; it must not raise.

    Returns:
        The address of the C function, which holds no Python lock and stays valid until the process ends.
    """
    try:
        compiled = numba.cfunc(signature, cache=True)(body)
    except RuntimeError as error:
        # Neither the package's folder nor the user's cache folder can be written to.
        if "no locator" not in str(error):
            raise
        compiled = numba.cfunc(signature)(body)
    _KEPT.append(compiled)
    return int(compiled.address)

"""The kernels for CPUs, compiled by Numba on the user's machine. See kernels/README.md."""

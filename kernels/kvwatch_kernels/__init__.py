"""Kernels that read and write a paged KV cache. See kernels/README.md for layouts and contracts.

Knows nothing of requests, schedulers or models: tensors in, tensors out.
"""

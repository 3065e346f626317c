"""The kernels in Triton, for CUDA and ROCm: attention, cache writes, block copies.

What runs on the device is in private functions (`*_kernel`, `_*`); `paged_attention`, `kv_store` and `block_copy` one
folder up check arguments and come here for tensors on a GPU. Triton is optional (extra `gpu`): the rest of this
package imports it only where it is needed.

Where TRITON_INTERPRET=1 is set before Triton is imported, the same functions take CPU tensors. The interpreter is right
in float32 and float16 and silently wrong in bfloat16.
"""

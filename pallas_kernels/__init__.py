"""Pallas kernels, one folder per operation: `kernel_tpu.py`, `kernel_gpu.py` where there is one, `shapes.py`.

Kernels only: the references, the choice between kernel and reference, and the gradients are in `kvjax.ops`.
Nothing here imports from kvjax.
"""

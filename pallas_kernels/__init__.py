"""Pallas kernels, one folder per operation: `kernel_tpu.py`, `kernel_gpu.py` where there is one, `shapes.py`.

Kernels only: the plain form that defines what is correct, the choice between the two and the gradients
belong to `kvjax.ops`. Nothing here imports from kvjax.
"""

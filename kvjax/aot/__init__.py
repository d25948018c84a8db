"""Kernels and decoders through the compilers of TPUs and GPUs, without a device: memory, copies, estimates.

Every figure here is the compiler's model or arithmetic on bytes, never a measurement.
"""

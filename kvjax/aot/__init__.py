"""What the TPU compiler says of our kernels without a TPU: memory, copies, schedules, estimates.

Every figure here is the compiler's model or arithmetic on bytes, never a measurement.
"""

"""Whether a model and its caches fit many devices, and what a step costs there.

Nothing is downloaded and nothing allocated: arrays are shapes, and compilers need no device.
"""

"""Planning: whether a model and its caches fit many devices, and how long a step takes there.

Nothing is downloaded and nothing allocated: arrays are shapes, and compilers need no device.
"""

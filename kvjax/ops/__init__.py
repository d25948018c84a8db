"""The mathematics in plain jnp: the definition of correct for every kernel.

Functions of arrays only: no cache classes, no methods, no models. A function here may pick a
Pallas kernel where one can run; what it computes never depends on that choice.
"""

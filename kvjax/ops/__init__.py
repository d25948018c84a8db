"""Operations in plain jnp: the reference for every kernel.

Functions of arrays only: no cache classes, no methods, no models. A function here may run a
Pallas kernel if one can run; its result never depends on that choice.
"""

"""How hard XLA tries: tests run a program a few times, so mostly the compiler's own speed counts."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def optimised(on: bool) -> Iterator[None]:
    """Programs compiled inside are optimised, or compiled fast."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", not on)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)

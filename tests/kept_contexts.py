"""An MLIR context serves several programs of a thread: JAX makes one for each, in 3 ms of a core."""

import threading

from jax._src.interpreters import mlir

# A context remembers every type and constant that it has seen.
MOST_PROGRAMS = 64


class _Kept(threading.local):
    context, left = None, 0


def keep() -> None:
    """Have JAX lower up to `MOST_PROGRAMS` programs in one context; another JAX is left as it is."""
    if not hasattr(mlir, "make_ir_context"):
        return
    make, kept = mlir.make_ir_context, _Kept()

    def context():
        if kept.left == 0:
            kept.context, kept.left = make(), MOST_PROGRAMS
        kept.left -= 1
        return kept.context

    mlir.make_ir_context = context

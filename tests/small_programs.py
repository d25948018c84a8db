"""Tests compile thousands of small programs: what JAX 0.10 does anew for each is done once.

Values, shapes and what is traced stay the same. A release of JAX that does these elsewhere is left as it is.
"""

import threading

import jax
import numpy as np
from jax._src.interpreters import mlir
from jax._src.lax import lax

# A context keeps the constants of its programs, so it is left after so many.
PROGRAMS = 256


def lighten():
    """Shares contexts of MLIR between programs (3 ms each), and puts numpy's arrays where JAX computes.

    Without the second, `jnp.asarray` compiles an identity of 15 ms for every shape and dtype. The third asks
    no line of Python whether it is the user's, because no location is recorded (`tests/conftest.py`).
    """
    if hasattr(mlir, "make_ir_context"):
        mlir.make_ir_context = _shared(mlir.make_ir_context)
    if hasattr(lax, "stage_p"):
        lax.stage_p.def_impl(_put)
    if hasattr(mlir, "_code_to_filename"):
        mlir._code_to_filename = lambda code: None


def _shared(make):
    own = threading.local()  # building a program in one thread and compiling in another may load dialects

    def shared():
        if getattr(own, "left", 0) == 0:
            own.context, own.left = make(), PROGRAMS
        own.left -= 1
        return own.context

    return shared


def _put(x):
    # A copy, because a device_put on a CPU may share the memory of an array that the test changes later.
    return x if isinstance(x, jax.Array) else jax.device_put(np.array(x) if isinstance(x, np.ndarray) else x)

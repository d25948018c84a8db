"""Arrays of numpy go to JAX without a program. JAX 0.10 compiles an identity for every shape, in 15 ms.

Values and shapes stay the same. A release of JAX without this primitive is left as it is.
"""

import jax
import numpy as np
from jax._src.lax import lax


def lighten():
    """Makes `jnp.asarray` of an array of numpy a `device_put`."""
    if hasattr(lax, "stage_p"):
        lax.stage_p.def_impl(_put)


def _put(x):
    # A copy, because a device_put on a CPU may share the memory of an array that the test changes later.
    return x if isinstance(x, jax.Array) else jax.device_put(np.array(x) if isinstance(x, np.ndarray) else x)

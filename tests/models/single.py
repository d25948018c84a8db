"""A single mixer, for tests that compare it with its equations."""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models.config import Config
from kvjax.models.mixer import Layer, Memory
from kvjax.state.cache import NOTHING

D, T = 10, 9
CONFIG = Config(vocab=7, d_model=D, layers=1, heads=2, kv_heads=2, head_dim=4, d_ff=12)


def drawn(mixer, rng):
    """Parameters in which every leaf matters, in float64."""
    return {name: 0.5 * rng.standard_normal(shape) for name, shape in mixer.shapes(CONFIG).items()}


def run(mixer, p, x, first_values=None, **taken):
    """Run a recurrent mixer for one row without a cache, in float32; taken: of other layers."""
    pos = jnp.arange(x.shape[0], dtype=jnp.int32)[None]

    def recur(layer, step, state):
        return step(None, pos >= 0)[0], NOTHING, {}

    def call(p, x, first_values, taken):
        layer = Layer(
            0,
            0,
            1,
            None,
            mixer.rope(CONFIG, 0),
            mixer,
            CONFIG,
            pos,
            taken={"first values": first_values} | taken,
        )
        return mixer(p, x, layer, Memory(pos, None, recur, None), NOTHING)[0]

    low = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (p, x[None], first_values, taken))
    return np.asarray(jax.jit(call)(*low)[0])


def close(got, want):
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), rtol=0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))

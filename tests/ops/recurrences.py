"""Tokens for the recurrence of linear attentions, and its equation in float64 numpy."""

import jax.numpy as jnp
import numpy as np

from kvjax.ops.recurrent.recurrence import RecurrenceInputs

B, T, H, K, V = 2, 41, 3, 6, 5


def draw(rng, *, vector=True, erase=True, t=T):
    """Random tokens: unit keys, log decays between -2 and 0."""
    q, k = (rng.normal(size=(B, t, H, K)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(B, t, H, V))
    g = -2 * rng.random((B, t, H, K if vector else 1))
    beta = rng.random((B, t, H, 1))
    arrays = (q, k, beta * v, g, *((beta * k,) if erase else ()))
    return RecurrenceInputs(*(jnp.asarray(x, jnp.float32) for x in arrays), *(() if erase else (None,)))


def by_hand(tokens, state, segments=None):
    """Token by token in float64 numpy, from the equation; a segment that starts in a row starts from zero."""
    q, k, v, g, p, r = (None if x is None else np.asarray(x, np.float64) for x in tokens)
    r = k if r is None else r
    state, out = np.array(state, np.float64), np.zeros(v.shape)
    for b, t, h in np.ndindex(*v.shape[:3]):
        if segments is not None and t > 0 and segments[b, t] != segments[b, t - 1]:
            state[b, h] = 0
        s = np.exp(g[b, t, h])[:, None] * state[b, h]
        if p is not None:
            s = s - np.outer(r[b, t, h], s.T @ p[b, t, h])
        state[b, h] = s + np.outer(k[b, t, h], v[b, t, h])
        out[b, t, h] = state[b, h].T @ q[b, t, h]
    return out, state

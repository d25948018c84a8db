"""The TPU kernel of one token: every state is read once and written once, in place.

    u = v - S' (a p),   o = S' (a q) + (q'k) u,   new S = Diag(a) S + k u'

with a = e^g is the recurrence, with all products taken from the old state, so that none waits for the new
one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


class Columns(NamedTuple):
    """A token's decays, keys and queries as columns [K, heads], with channels along rows as in a state.

    decay a, key k, asked a q, erase a p or None; overlap: q'k, [heads, 1].
    """

    decay: Any
    key: Any
    asked: Any
    erase: Any
    overlap: Any


def columns_of(q: Any, k: Any, g: Any, p: Any) -> Columns:
    """Make the columns from rows [heads, K] of queries, keys, log decays and p."""
    q, k, g = (x.astype(jnp.float32) for x in (q, k, g))
    decay = jnp.exp(g)
    erase = None if p is None else jnp.transpose(decay * p.astype(jnp.float32))
    overlap = jnp.sum(q * k, 1, keepdims=True)
    return Columns(jnp.transpose(decay), jnp.transpose(k), jnp.transpose(decay * q), erase, overlap)


def advance(state: Any, v: Any, columns: Columns, n: int) -> tuple[Any, Any]:
    """(o [1, V], new state [K, V]) of head n, which writes v [1, V]."""
    decay, key, asked, erase = (None if x is None else x[:, n : n + 1] for x in columns[:4])
    u = v if erase is None else v - jnp.sum(state * erase, 0, keepdims=True)
    out = jnp.sum(state * asked, 0, keepdims=True) + columns.overlap[n : n + 1] * u
    return out, decay * state + key * u


def _kernel(_: Any, *refs: Any) -> None:
    q, k, v, g, *p, state, out, new = refs
    columns = columns_of(q[...], k[...], g[...], p[0][...] if p else None)
    for n in range(v.shape[0]):
        o, new[0, n] = advance(state[0, n], v[n : n + 1].astype(jnp.float32), columns, n)
        out[n : n + 1] = o.astype(out.dtype)


def decode(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, p: jax.Array | None, state: jax.Array,
    layer: jax.Array, *, together: int, interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(o [I, V] as v, the states [L, I, K, V] updated in place) of I = B H heads of one layer.

    q, k, g, p [I, K] and v [I, V]; layer [1]; together: states per grid step, a multiple of 8 or all of them.
    """
    given = [x for x in (q, k, v, g, p) if x is not None]
    at = lambda i, _: (i, 0)  # noqa: E731
    whole = pl.BlockSpec((1, together, *state.shape[2:]), lambda i, layer: (layer[0], i, 0, 0))
    return pl.pallas_call(
        _kernel,
        out_shape=[jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(state.shape, state.dtype)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(state.shape[1], together),),
            in_specs=[*(pl.BlockSpec((together, x.shape[1]), at) for x in given), whole],
            out_specs=[pl.BlockSpec((together, v.shape[1]), at), whole],
        ),
        input_output_aliases={1 + len(given): 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="gated_delta_step",
    )(layer, *given, state)

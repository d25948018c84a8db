"""Properties of every op that keeps all tokens, whichever way it is called.

An op is given as run(tokens, **how) -> (outputs, state), its equation in numpy as by_hand(tokens) -> outputs.
Tokens are arrays [B, T, ...] by name, outputs one array [B, T, ...] or several.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.oracles import rms

T = 42  # more than one chunk, and not a whole number of them


def piece(tokens, start, stop, rows=slice(None)):
    return jax.tree.map(lambda x: x[rows, start:stop], tokens)


def join(parts):
    return jax.tree.map(lambda *x: np.concatenate(x, 1), *parts)


def as_arrays(tokens, dtype):
    return {n: jnp.asarray(x, x.dtype if x.dtype == bool else dtype) for n, x in tokens.items()}


def close(got, want, bar=1e-6):
    """Every array within `bar` of relative RMS; integers exactly."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert np.shape(x) == np.shape(y)
        if np.issubdtype(y.dtype, np.integer):
            np.testing.assert_array_equal(x, y)
        else:
            assert np.isfinite(x).all() and rms(x, y) < bar


def used(state):
    """Take the slots that hold tokens, of all rows in one list: what lies behind them does not count."""
    arrays = (
        state.kept if hasattr(state, "kept") else {"k": state.k, "v": state.v, "z": state.weight[:, None]}
    )
    count, found = np.asarray(state.count), {}
    for name, x in arrays.items():
        live = np.arange(x.shape[1]) < count[..., None]
        found[name] = np.asarray(x)[live if live.ndim == 2 else np.moveaxis(live, 1, 2)]
    return found


def same_state(got, want):
    close((used(got), got.start, got.count), (used(want), want.start, want.count))


def bfloat16_gives_the_oracle(op, inputs, want):
    """From bfloat16 inputs, which hold the same numbers, float32 results."""
    got = jax.jit(op)(as_arrays(inputs, jnp.bfloat16))
    for name, x in want.items():
        assert got[name].dtype == np.float32 and rms(got[name], x) < 1e-6, name


def empty(run, tokens, capacity):
    """Make a state without tokens: one of zeros."""
    shapes = jax.eval_shape(partial(run, capacity=capacity), piece(tokens, 0, 1))[1]
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def the_equation_in_float64(run, tokens, by_hand):
    """Both forms: from nothing, then packed segments of which the first goes on, then more of the last.

    And with masked tokens, which change nothing. All calls of a form are one program.
    """
    ends = [[9, 33, T], [20, 21, T]]
    segments = [np.searchsorted(e, np.arange(T), side="right") for e in ends]
    rest = piece(tokens, None, None, slice(None, None, -1))  # the rows exchanged
    with jax.enable_x64(True):
        x, y = as_arrays(tokens, jnp.float64), as_arrays(rest, jnp.float64)
        one, packed = jnp.zeros((2, T), jnp.int32), jnp.asarray(segments, jnp.int32)
        for recurrent in (False, True):
            call = jax.jit(partial(run, capacity=3 * T, recurrent=recurrent))
            nothing, every = empty(run, x, 3 * T), jnp.ones((2, T), bool)
            first, state = call(x, initial_state=nothing, segments=one, mask=every)
            second, state = call(y, initial_state=state, segments=packed, mask=every)
            third, _ = call(x, initial_state=state, segments=one, mask=every)
            _masked_tokens_change_nothing(partial(call, initial_state=nothing, segments=one), tokens, by_hand)
            assert jax.tree.leaves(first)[0].dtype == np.float64 and call._cache_size() == 1
            got = join([first, second, third])
            for row in (0, 1):
                cuts = [0, *(T + e for e in ends[row][:-1]), 3 * T]
                whole = piece(join([tokens, rest, tokens]), None, None, slice(row, row + 1))
                for start, stop in zip(cuts, cuts[1:], strict=False):
                    here = piece(got, start, stop, slice(row, row + 1))
                    close(here, by_hand(piece(whole, start, stop)), 1e-10)


def pieces_are_the_whole(run, tokens, by_hand, size):
    """Pieces of `size` tokens, one after the other in a fixed room; those of one token are steps."""
    x, one = as_arrays(tokens, jnp.float32), jax.jit(partial(run, capacity=T, recurrent=size == 1))
    state, outs = empty(run, x, T), []
    for start in range(0, T, size):
        out, state = one(piece(x, start, start + size), initial_state=state)
        outs.append(out)
    assert one._cache_size() == 1
    close(join(outs), by_hand(tokens))


def _masked_tokens_change_nothing(call, tokens, by_hand):
    """Holes anywhere, also at the start and the end, in row 1; row 0 has the same tokens without holes."""
    real = np.random.default_rng(1).random(T) < 0.6
    real[0], real[-1] = False, False
    rows, n = np.flatnonzero(real), int(real.sum())
    mask = np.stack([np.arange(T) < n, real])
    packed = {name: x.copy() for name, x in tokens.items()}
    for x in packed.values():
        x[0, :n] = x[1, rows]
    want = by_hand({name: x[1:, rows] for name, x in tokens.items()})
    got, state = call(as_arrays(packed, jnp.float64), mask=jnp.asarray(mask))
    close(piece(got, 0, n, slice(0, 1)), want, 1e-10)
    close(jax.tree.map(lambda x: x[1:, rows], got), want, 1e-10)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))
    first, second = (jax.tree.map(lambda x, i=i: x[i : i + 1], state) for i in (0, 1))
    same_state(second, first)


def gradients_agree(run, tokens):
    """Finite, and the same in chunks as token by token."""
    x = piece(as_arrays(tokens, jnp.float32), 0, 20)
    fixed = {n: y for n, y in x.items() if y.dtype == bool}
    real = {n: y for n, y in x.items() if n not in fixed}

    def loss(real, recurrent):
        out = jax.tree.leaves(run(real | fixed, recurrent=recurrent)[0])[0]
        return (out**2).sum()

    grad = jax.jit(jax.grad(loss), static_argnums=1)
    close(grad(real, False), grad(real, True), 1e-5)


def no_room_is_nan(run, tokens, by_hand):
    """Only tokens that found no slot give NaN; less room than the state holds is refused."""
    x = as_arrays(tokens, jnp.float32)
    got, state = jax.jit(partial(run, capacity=T - 3))(x)
    got = jax.tree.leaves(got)[0]
    close(got[:, : T - 3], jax.tree.leaves(by_hand(tokens))[0][:, : T - 3])
    assert np.isnan(got[:, T - 3 :]).all() and state.count.min() == T
    with pytest.raises(ValueError, match=f"capacity is 9 slots, but initial_state has {T - 3}"):
        run(x, initial_state=state, capacity=9)


def largest_array(jaxpr):
    """Numbers in the largest array that a program makes, below every level of calls."""
    inner = (getattr(p, "jaxpr", None) for eqn in jaxpr.eqns for p in eqn.params.values())
    made = (v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars)
    return max([0, *made, *(largest_array(j) for j in inner if j is not None)])

"""Tests that every op over a sequence must pass, given its equation for one row in float64 numpy.

An op is `op(x, **how) -> (o, state)` of a dict of arrays [B, T, ...]. Its equation is `row(x, state)` of
arrays [t, ...] of one row, from a state or from None, and returns the same. States are pytrees.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tests.ops.oracles import rms

T = 24
ENDS = ([5, 19, T], [12, 14, T])  # of packed segments, in two rows


def close(got, want, bar):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.shape == np.shape(y)
        error = rms(x, y) if np.any(y) else np.abs(np.asarray(x)).max(initial=0)
        assert error < bar, error


def by_rows(row, x, state=None, ends=None, real=None):
    """(o, final state) from the equation: every segment alone, without the tokens that are left out."""
    b, t = x["v"].shape[:2]
    ends, real = ends or [[t]] * b, np.ones((b, t), bool) if real is None else real
    out, last = np.zeros(x["v"].shape), []
    for i in range(b):
        one, start = None if state is None else jax.tree.map(lambda s, i=i: np.asarray(s[i]), state), 0
        for end in ends[i]:
            at = start + np.flatnonzero(real[i, start:end])
            out[i, at], one = row({n: y[i, at] for n, y in x.items()}, one)
            start, resume = end, one
            one = None
        last.append(resume)
    return out, jax.tree.map(lambda *s: np.stack(s), *last)


def packed(ends=ENDS):
    return jnp.asarray([np.searchsorted(e, np.arange(T), side="right") for e in ends], jnp.int32)


def check_packed_rows(op, row, x, state, bar=1e-10):
    """Both rows hold three segments and lack some tokens; the first segments continue a state. In float64."""
    real = np.ones((2, T), bool)
    real[0, [3, 4, 10, 20]] = real[1, [0, 1, 12, T - 1]] = False
    want, last = by_rows(row, x, state, ENDS, real)
    with jax.enable_x64(True):
        inputs = jax.tree.map(jnp.asarray, (x, state))
        how = {"segments": packed(), "mask": jnp.asarray(real)}
        out, end = jax.jit(lambda x, s: op(x, initial_state=s, **how))(*inputs)
    close((np.where(real[..., None, None], out, 0), end), (want, last), bar)


def check_cuts(op, row, x, state, step=None, bar=1e-10):
    """Prefills of a third each are one of the whole, and so are single steps after the first. In float64."""
    want = by_rows(row, x, state)
    with jax.enable_x64(True):
        x, state = jax.tree.map(jnp.asarray, (x, state))
        run = jax.jit(lambda x, s: op(x, initial_state=s))
        one = jax.jit(lambda x, s: (step or op)(x, initial_state=s))
        third = T // 3  # one length, or this is nothing but compiling
        cuts = [{n: y[:, start : start + third] for n, y in x.items()} for start in range(0, T, third)]
        first, middle = run(cuts[0], state)
        second, later = run(cuts[1], middle)
        last, end = run(cuts[2], later)
        close((jnp.concatenate([first, second, last], 1), end), want, bar)
        outs = [first]
        for t in range(third, T):
            out, middle = one({n: y[:, t : t + 1] for n, y in x.items()}, middle)
            outs.append(out)
        close((jnp.concatenate(outs, 1), middle), want, bar)


def check_gradients(op, other, x, state, bar=1e-5):
    """Gradients with respect to inputs and state are finite, and equal those of the other form.

    In float32.
    """
    leaves, tree = jax.tree.flatten((x, state))
    floats = {i: jnp.asarray(y, jnp.float32) for i, y in enumerate(leaves) if y.dtype.kind == "f"}

    def gradients(op):
        def loss(floats):
            x, state = jax.tree.unflatten(tree, [floats.get(i, y) for i, y in enumerate(leaves)])
            results = jax.tree.leaves(op(x, initial_state=state))
            return sum((y**2).sum() for y in results if y.dtype == jnp.float32)

        return jax.jit(jax.grad(loss))(floats)

    got, want = gradients(op), gradients(other)
    assert all(np.isfinite(y).all() for y in jax.tree.leaves((got, want)))
    close(got, want, bar)

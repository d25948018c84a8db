"""One chunk of one head, for the forward and backward kernels, in matrix products.

    rhs = v - (p e^D) S,   u = (I + A)^-1 rhs,   o = (q e^D) S + M u,   S' = e^(sum g) S + (k e^R)' u

with A_ij = sum_d p_id k_jd exp(sum_{j < l <= i} g_ld) below the diagonal and M of q, with the diagonal
(DeltaNet, arXiv:2406.06484; Kimi Linear, arXiv:2510.26692, eq. 6-9). D sums the log decays up to a token, R
those after it. Every exponent is a sum of log decays and never a difference of two sums. So nothing
overflows, no precision is lost, and a decay that forgets everything leaves other tokens' numbers exact.

The products of one head depend on each other. Functions here `yield` between products, and `take_turns`
interleaves those of several heads: the compiler overlaps operations that are close in the program.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))
ROWS_BY_ROWS = (((1,), (1,)), ((), ()))
COLUMNS_BY_COLUMNS = (((0,), (0,)), ((), ()))
TILE_ROWS = 8
Steps = Generator[None, None, Any]


class HeadChunk(NamedTuple):
    """Tokens of one head. g: log decays, [C, K] or, one per token, [1, C]. p: None if nothing is erased."""

    q: Any
    k: Any
    v: Any
    g: Any
    p: Any


class ChunkPairs(NamedTuple):
    """The module's A (None if nothing is erased) and M; decays to each token, after it, and of the chunk."""

    erase: Any
    read: Any
    until: Any
    to_end: Any
    whole: Any


def take_turns(steps: Iterable[Steps]) -> list[Any]:
    """Interleave functions, one step of each at a time, and return their results."""
    waiting, found = dict(enumerate(steps)), {}
    while waiting:
        for n, one in list(waiting.items()):
            try:
                next(one)
            except StopIteration as end:
                found[n] = end.value
                del waiting[n]
    return [found[n] for n in sorted(found)]


def chunk(c: HeadChunk, state: Any, *, exact: bool, inverted: Any = None) -> Steps:
    """(o [C, V], new state [K, V], (I + A)^-1 or None) in float32; `inverted` is the last one, if known.

    exact: products of float32 factors. Else factors are rounded to bfloat16, except those of the inverse's
    correction and of erasing from and writing to the state, which keep two such terms.
    """
    few, more = (6, 6) if exact else (1, 3)
    c = HeadChunk(*(None if x is None else x.astype(jnp.float32) for x in c))
    pairs = yield from (_pairs_by_head if c.g.shape[0] == 1 else _pairs_by_channel)(c, exact)
    past, u = dot(c.q * pairs.until, state, ROWS_BY_COLUMNS, few), c.v
    if c.p is not None:
        known = dot(c.p * pairs.until, state, ROWS_BY_COLUMNS, more)
        if inverted is None:
            inverted = yield from inverse(pairs.erase, exact)
        u = _solve(few, inverted, pairs.erase, u - known)
    yield
    out = past + dot(pairs.read, u, ROWS_BY_COLUMNS, few)
    written = dot(c.k * pairs.to_end, u, COLUMNS_BY_COLUMNS, more)
    return out, jnp.transpose(pairs.whole) * state + written, inverted


def dot(a: Any, b: Any, contract: Any, passes: int) -> Any:
    """Compute a float32 product of float32 factors (6 passes), or of factors rounded to bfloat16 (1 pass).

    2 and 3 passes keep a second term of a, or of both.
    """
    product = partial(jax.lax.dot_general, dimension_numbers=contract, preferred_element_type=jnp.float32)
    if passes == 6:
        return product(a, b, precision=jax.lax.Precision.HIGHEST)
    rest = lambda x: (x - x.astype(jnp.bfloat16).astype(x.dtype)).astype(jnp.bfloat16)  # noqa: E731
    high_a, high_b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    out = product(high_a, high_b)
    out = out + product(rest(a), high_b) if passes > 1 else out
    return out + product(high_a, rest(b)) if passes > 2 else out


def _index(shape: tuple[int, ...], axis: int) -> Any:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _down(x: Any, rows: int) -> Any:
    """Rows moved down by `rows`, cyclically."""
    return pltpu.roll(x, rows % x.shape[0], 0)


_down.defvjp(lambda x, rows: (_down(x, rows), None), lambda rows, _, dx: (_down(dx, -rows),))


def _second(x: Any, half: int) -> Any:
    """Take the second half of every block of 2 * half rows; all rows if `half` is not whole tiles."""
    return x if half % TILE_ROWS else x.reshape(-1, 2, half, x.shape[1])[:, 1].reshape(-1, x.shape[1])


def _with_second(x: Any, rows: Any, half: int) -> Any:
    """Replace the rows of x that `_second` takes by `rows`."""
    if half % TILE_ROWS:
        return rows
    first = x.reshape(-1, 2, half, x.shape[1])[:, 0]
    return jnp.stack([first, rows.reshape(first.shape)], 1).reshape(x.shape)


def _pairs_by_channel(c: HeadChunk, exact: bool) -> Steps:
    """`ChunkPairs` with decays per channel, from halves of ever larger blocks.

    Decays are split at the border of the halves, after it and up to it: one product per size.
    """
    size = c.k.shape[0]
    row, apart = _index(c.k.shape, 0), _index((size, size), 0) ^ _index((size, size), 1)
    sides = [c.q] if c.p is None else [c.q, c.p]
    pairs = [jnp.zeros((size, size), jnp.float32) for _ in sides]
    # Sums within blocks: up to a row, after it, and all; the blocks double.
    until, to_end, whole = c.g, jnp.zeros_like(c.g), c.g
    half = 1
    while half < size:
        is_second = (row & half) != 0
        decay = jnp.exp(jnp.where(is_second, until, to_end))
        from_border, near = _second(decay, half), _second(apart, half) < half
        left = jnp.concatenate([_second(x, half) * from_border for x in sides])
        right = jnp.where(is_second, 0.0, decay) * c.k
        found = jnp.split(dot(left, right, ROWS_BY_ROWS, 6 if exact else 1), len(sides))
        # Pairs further apart than this block are still wrong: a later size, or the last mask, overwrites
        # them.
        pairs = [
            _with_second(x, jnp.where(near, _second(x, half), y), half)
            for x, y in zip(pairs, found, strict=True)
        ]
        yield
        before, after = _down(whole, half), _down(whole, -half)
        until += jnp.where(is_second, before, 0.0)  # pyright: ignore[reportArgumentType]
        to_end += jnp.where(is_second, 0.0, after)  # pyright: ignore[reportArgumentType]
        whole += jnp.where(is_second, before, after)  # pyright: ignore[reportArgumentType]
        half *= 2
    i, j = _index(apart.shape, 0), _index(apart.shape, 1)
    itself = jnp.sum(c.q * c.k, 1, keepdims=True)
    read = jnp.where(i > j, pairs[0], jnp.where(i == j, itself, 0.0))
    erase = None if c.p is None else jnp.where(i > j, pairs[1], 0.0)
    return ChunkPairs(erase, read, jnp.exp(until), jnp.exp(to_end), jnp.exp(whole[:1]))


def _pairs_by_head(c: HeadChunk, exact: bool) -> Steps:
    """`ChunkPairs` with one decay per token, as one product times a mask of decays."""
    size = c.k.shape[0]
    i, j = _index((size, size), 0), _index((size, size), 1)
    until, to_end = jnp.where(i >= j, c.g, 0.0), jnp.where(i < j, c.g, 0.0)
    between = dot(until, jnp.where(i > j, 1.0, 0.0), ROWS_BY_COLUMNS, 6 if exact else 2)
    sides = c.q if c.p is None else jnp.concatenate([c.q, c.p])
    pairs = dot(sides, c.k, ROWS_BY_ROWS, 6 if exact else 1)
    yield
    decay = jnp.exp(jnp.where(i >= j, between, 0.0))
    read = jnp.where(i >= j, pairs[:size] * decay, 0.0)
    erase = None if c.p is None else jnp.where(i > j, pairs[size:] * decay, 0.0)
    sums = (x.sum(1, keepdims=True) for x in (until, to_end, c.g))
    return ChunkPairs(erase, read, *(jnp.exp(x) for x in sums))


def inverse(a: Any, exact: bool) -> Steps:
    """(I + a)^-1 of a strictly lower triangle, its diagonal blocks doubling: X - X a X below the border.

    It avoids powers of a, which grow like binomials if keys are similar. If not exact, the blocks are
    computed from bfloat16 factors, and one Newton step squares their error.
    """
    apart = _index(a.shape, 0) ^ _index(a.shape, 1)
    one = jnp.where(apart == 0, 1.0, 0.0)
    x = one - jnp.where(apart == 1, a, 0.0)
    product = partial(dot, contract=ROWS_BY_COLUMNS, passes=6 if exact else 1)
    half = 2
    while half < a.shape[0]:
        rows, far = _second(x, half), _second(apart, half)
        below = product(rows, a)
        yield
        below = product(below, x)
        x = _with_second(x, jnp.where((far >= half) & (far < 2 * half), -below, rows), half)
        yield
        half *= 2
    if exact:
        return x
    error = one - x - dot(a, x, ROWS_BY_COLUMNS, 3)
    yield
    return x + product(x, error)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _solve(passes: int, x: Any, a: Any, rhs: Any) -> Any:
    """(I + a)^-1 rhs, given the inverse x."""
    return dot(x, rhs, ROWS_BY_COLUMNS, passes)


def _solve_forward(passes: int, x: Any, a: Any, rhs: Any) -> Any:
    y = _solve(passes, x, a, rhs)
    return y, (x, y)


def _solve_backward(passes: int, kept: Any, dy: Any) -> Any:
    x, y = kept
    drhs = dot(x, dy, COLUMNS_BY_COLUMNS, passes)
    return jnp.zeros_like(x), -dot(drhs, y, ROWS_BY_ROWS, passes), drhs


_solve.defvjp(_solve_forward, _solve_backward)

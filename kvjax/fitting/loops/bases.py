"""Bases that minimise the error of codes, by gradient descent with straight-through rounding."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

STEPS, RATE, ROWS = 200, 1e-2, 1024
# The largest sum of a row's magnitudes beside its diagonal, as a share of the diagonal.
DOMINANCE = 0.9
# Parameters by name, "skew" and "beside" [X, H, H], "scales" and "shift" [X, H]; those left out are not
# learnt.
Params = dict[str, Array]


class Start(NamedTuple):
    """The initial basis of X lists of rows: M^-1 and M [X, H, H], and the shift of rows [X, H].

    ties: for each channel the one that shares its scale; itself if there is none.
    """

    inverse: Float[np.ndarray, "X H H"]
    matrix: Float[np.ndarray, "X H H"]
    shift: Float[np.ndarray, "X H"]
    ties: np.ndarray


class CodeSettings(NamedTuple):
    """The `Affine` codes of which the error is minimised: bits, channels per group, and clip."""

    bits: int
    group: int
    clip: float


def through_codes(
    rows: Float[np.ndarray, "X T H"], start: Start, coded: CodeSettings, learnt: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """Fit "matrix" M, "inverse" M^-1 [X, H, H] and "shift" [X, H]: codes of (x - shift) M^-1 lose least.

    M^-1 = R Q diag(e^s) (1 + N) for the R of `start`, an orthogonal Q by Cayley's map of a skew-symmetric
    matrix, scales e^s, and N with a zero diagonal whose rows' magnitudes sum to at most `DOMINANCE`; of N,
    step i of n learns entries that are at most i / n of the width from the diagonal. `STEPS` steps of Adam
    minimise the squared error of at most `ROWS` decoded rows of each list, relative to the rows' squares; the
    best step of each list counts. learnt: which of "skew", "scales", "beside" (N) and "shift" change.
    """
    many, tokens, width = rows.shape
    drawn = np.random.RandomState(0).permutation(tokens)[:ROWS]
    square, row = (many, width, width), (many, width)
    shapes = {"skew": square, "beside": square, "scales": row, "shift": row}
    first = {name: jnp.zeros(shapes[name], jnp.float32) for name in learnt}
    begun = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (start.inverse, start.matrix, start.shift))
    found = _learnt(jnp.asarray(rows[:, drawn], jnp.float32), *begun, jnp.asarray(start.ties), first, coded)
    return {name: np.asarray(x) for name, x in zip(("matrix", "inverse", "shift"), found, strict=True)}


@partial(jax.jit, static_argnames="coded")
def _learnt(
    rows: Float[Array, "X R H"], inverse: Float[Array, "X H H"], matrix: Float[Array, "X H H"],
    shift: Float[Array, "X H"], ties: Array, first: Params, coded: CodeSettings,
) -> tuple[Array, Array, Array]:  # fmt: skip
    optimiser = optax.adam(RATE)
    # A shift moves in units of its channel.
    unit = jnp.std(rows, 1)

    def bases(params: Params) -> tuple[Array, Array, Array]:
        turned = jax.vmap(partial(basis, ties))(inverse, matrix, params)
        return *turned, shift + unit * params["shift"] if "shift" in params else shift

    def losses(params: Params) -> Float[Array, "X"]:
        mine, back, by = bases(params)
        z = jnp.matmul(rows - by[:, None], back, precision="highest")
        found = jnp.matmul(rounded(z, coded.bits, coded.clip, coded.group), mine, precision="highest")
        return jnp.square(found + by[:, None] - rows).sum((1, 2)) / jnp.square(rows).sum((1, 2))

    def total(params: Params) -> tuple[Array, Array]:
        each = losses(params)
        return each.sum(), each

    def step(held: tuple, at: Array) -> tuple[tuple, None]:
        params, state, best = held
        params = gradual(params, (at + 1).astype(jnp.float32) / STEPS)
        (_, each), gradient = jax.value_and_grad(total, has_aux=True)(params)
        better = each < best[0]

        def chosen(new: Array, old: Array) -> Array:
            return jnp.where(better.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        best = jax.tree.map(chosen, (each, params), best)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of an integer step
            updates, state = optimiser.update(gradient, state)
        return (optax.apply_updates(params, updates), state, best), None

    none = jnp.full(rows.shape[:1], jnp.inf, jnp.float32)
    begun = (first, optimiser.init(first), (none, first))
    (_, _, (_, params)), _ = jax.lax.scan(step, begun, jnp.arange(STEPS, dtype=jnp.int32))
    return bases(params)


def basis(
    ties: Array, inverse: Float[Array, "H H"], matrix: Float[Array, "H H"], params: Params
) -> tuple[Float[Array, "H H"], Float[Array, "H H"]]:
    """Compute M and M^-1 = R Q diag(e^s) (1 + N), with Q = (1 - A) (1 + A)^-1 and A = S - S'."""
    if "skew" in params:
        a = params["skew"] - params["skew"].T
        one = jnp.eye(len(a), dtype=a.dtype)
        turn = jnp.linalg.solve(one + a, one - a)
        inverse = jnp.matmul(inverse, turn, precision="highest")
        matrix = jnp.matmul(turn.T, matrix, precision="highest")
    if "scales" in params:
        scales = (params["scales"] + params["scales"][ties]) / 2
        inverse, matrix = inverse * jnp.exp(scales)[None], jnp.exp(-scales)[:, None] * matrix
    if "beside" in params:
        one = jnp.eye(len(params["beside"]), dtype=params["beside"].dtype)
        mixed = one + dominated(params["beside"])
        inverse = jnp.matmul(inverse, mixed, precision="highest")
        matrix = jnp.linalg.solve(mixed, matrix)
    return matrix, inverse


def gradual(params: Params, share: Float[Array, ""]) -> Params:
    """Drop the entries of "beside" in the parameters further than `share` of the width from the diagonal."""
    if "beside" not in params:
        return params
    beside = params["beside"]
    at = jnp.arange(beside.shape[-1], dtype=jnp.int32)
    near = jnp.abs(at[:, None] - at[None]).astype(jnp.float32) <= share * len(at)
    return params | {"beside": jnp.where(near[None], beside, 0.0)}


def dominated(beside: Float[Array, "H H"]) -> Float[Array, "H H"]:
    """Zero the diagonal, and shrinks rows whose magnitudes sum to more than `DOMINANCE`."""
    beside = beside * (1 - jnp.eye(len(beside), dtype=beside.dtype))
    total = jnp.abs(beside).sum(-1, keepdims=True)
    return beside * jnp.minimum(1.0, DOMINANCE / jnp.maximum(total, DOMINANCE))


def rounded(z: Float[Array, "*b H"], bits: int, clip: float, group: int) -> Float[Array, "*b H"]:
    """Encode and decode by `Affine(bits, group=group, clip=clip)` in float32; straight-through gradient."""
    rows = z.reshape(*z.shape[:-1], -1, group)
    low, high = clip * rows.min(-1, keepdims=True), clip * rows.max(-1, keepdims=True)
    step = (high - low) / (2**bits - 1)
    step = jnp.where(step > 0, step, 1.0)
    code = (rows - low) / step
    whole = code + jax.lax.stop_gradient(jnp.round(code) - code)
    return (jnp.clip(whole, 0, 2**bits - 1) * step + low).reshape(z.shape)

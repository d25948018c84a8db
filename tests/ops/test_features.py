"""Feature maps: their products against the kernels they stand for, and their attention cut in any way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.recurrent import features
from kvjax.ops.recurrent.features import (
    RandomSums,
    log_positive_features,
    orthogonal_projection,
    taylor_features,
)
from kvjax.ops.recurrent.slot_memory import LogSum
from tests.ops.oracles import oracle, rms
from tests.ops.rows import T, check_cuts, check_gradients, check_packed_rows

B, H, K, V, M = 2, 2, 4, 3, 10
FORMS = pytest.mark.parametrize("recurrent", [False, True], ids=["chunked", "recurrent"])
PROJECTION = np.random.default_rng(7).normal(size=(M, K))


def draw(rng, size=1.0):
    return {n: size * rng.normal(size=(B, T, H, d)) for n, d in {"q": K, "k": K, "v": V}.items()}


def positive(x):
    """exp(w'x - |x|^2 / 2) / sqrt(M) of x times the root of K^-0.5."""
    x = x / K**0.25
    return np.exp(x @ PROJECTION.T - (x**2).sum(-1, keepdims=True) / 2) / np.sqrt(M)


def performer_row(x, state):
    """Divide sums of feature products, which needs no stabiliser in float64 for these inputs."""
    phi_q, phi_k, t = positive(x["q"]), positive(x["k"]), len(x["v"])
    sums, z = np.zeros((H, M, V)), np.zeros((H, M))
    top = np.full((H, M), -np.inf)
    if state is not None:
        top, z = state.weight.top, state.weight.total * np.exp(state.weight.top)
        sums = z[..., None] * state.v
    out = np.zeros(x["v"].shape)
    for i in range(t):
        sums = sums + phi_k[i][..., None] * x["v"][i][:, None]
        z = z + phi_k[i]
        out[i] = np.einsum("hm,hmv->hv", phi_q[i], sums) / (phi_q[i] * z).sum(-1, keepdims=True)
    top = np.maximum(top, np.log(phi_k).max(0))
    return out, RandomSums(sums / z[..., None], LogSum(top, z / np.exp(top)))


def performer_case(rng, **how):
    def op(x, **how):
        projection = jnp.asarray(PROJECTION, x["v"].dtype)
        return features.performer_attention(x["q"], x["k"], x["v"], projection, **how)

    weight = LogSum(rng.normal(size=(B, H, M)), 1 + rng.random((B, H, M)))
    return op, performer_row, draw(rng, **how), RandomSums(rng.normal(size=(B, H, M, V)), weight)


def polynomial(x):
    """1, x, and every x_i x_j once: together (1 + s + s^2 / 2) of s = x'y."""
    x = x / K**0.25
    i, j = np.triu_indices(K)
    return np.concatenate([np.ones_like(x[..., :1]), x, x[..., i] * x[..., j] / np.sqrt(1 + (i == j))], -1)


def based_row(x, state):
    """Weigh all pairs by 1 + s + s^2 / 2; a state reads with its features."""
    t, out = len(x["v"]), np.zeros(x["v"].shape)
    s = np.einsum("ihk,jhk->hij", x["q"], x["k"]) / np.sqrt(K)
    w = np.tril(1 + s + s**2 / 2)
    old = 0 if state is None else np.einsum("ihd,hdw->ihw", polynomial(x["q"]), state)
    ones = np.concatenate([x["v"], np.ones((t, H, 1))], -1)
    both = np.einsum("hij,jhw->ihw", w, ones) + old
    out = both[..., :-1] / (both[..., -1:] + 1e-6)
    return out, np.einsum("jhd,jhw->hdw", polynomial(x["k"]), ones) + (0 if state is None else state)


def based_case(rng, **how):
    def op(x, **how):
        return features.based_attention(x["q"], x["k"], x["v"], **how)

    past = draw(rng)
    state = np.stack([based_row({n: y[i] for n, y in past.items()}, None)[1] for i in range(B)])
    return op, based_row, draw(rng, **how), state


CASES = pytest.mark.parametrize("case", [performer_case, based_case], ids=["performer", "based"])


@pytest.mark.rotating
def test_bfloat16_inputs_of_based_keep_a_float32_state():
    inputs, want = oracle("based")
    half = (jnp.asarray(inputs[n], jnp.bfloat16) for n in "qkv")
    out, state = jax.jit(features.based_attention)(*half)
    assert out.dtype == state.dtype == np.float32 and rms(out, want["o"]) < 1e-2


@pytest.mark.rotating
def test_bfloat16_inputs_of_performer_keep_a_float32_state(rng):
    op, row, x, _ = performer_case(rng)
    half = {n: jnp.asarray(y, jnp.bfloat16) for n, y in x.items()}
    out, state = jax.jit(op)(half)
    want, _ = row({n: np.asarray(y[0], np.float64) for n, y in half.items()}, None)
    assert all(y.dtype == np.float32 for y in jax.tree.leaves((out, state))) and rms(out[0], want) < 1e-2


@pytest.mark.rotating
@FORMS
@CASES
def test_packed_segments_with_tokens_left_out_are_each_alone(rng, case, recurrent):
    op, row, x, state = case(rng)
    check_packed_rows(functools.partial(op, recurrent=recurrent), row, x, state)


@pytest.mark.rotating
@CASES
def test_a_sequence_may_be_cut_anywhere(rng, case):
    op, row, x, state = case(rng)
    check_cuts(op, row, x, state, functools.partial(op, recurrent=True))


@pytest.mark.rotating
@CASES
def test_gradients_of_large_inputs_are_finite_and_those_of_the_other_form(rng, case):
    op, _, x, state = case(rng, size=6.0)
    check_gradients(op, functools.partial(op, recurrent=True), x, state)


def test_the_taylor_features_multiply_to_the_polynomial(rng):
    x, y = (rng.normal(size=(5, K)) for _ in range(2))
    s = (x * y).sum(-1)
    with jax.enable_x64(True):
        got = jax.jit(lambda x, y: (taylor_features(x) * taylor_features(y)).sum(-1))(x, y)
    assert rms(got, 1 + s + s**2 / 2) < 1e-14


@pytest.mark.parametrize(("rows", "dim"), [(12, 4), (10, 4), (3, 8)])
@pytest.mark.rotating
def test_rows_of_a_block_are_orthogonal_and_as_long_as_gaussian_vectors(rows, dim):
    with jax.enable_x64(True):
        w = np.asarray(orthogonal_projection(jax.random.key(3), rows, dim, jnp.float64))
    assert w.shape == (rows, dim)
    products = w @ w.T
    block = np.arange(rows) // dim
    within = (block[:, None] == block) & ~np.eye(rows, dtype=bool)
    assert np.abs(products[within]).max() < 1e-12
    between = block[:, None] != block
    assert not between.any() or np.abs(products[between]).max() > 0.1


def test_single_rows_are_standard_normal():
    """Mean 0, covariance I, and squared lengths of mean K and variance 2 K, each within 5 standard errors."""
    n = 4000
    keys = jax.random.split(jax.random.key(11), n // K)
    w = np.asarray(jax.jit(jax.vmap(lambda key: orthogonal_projection(key, K, K)))(keys)).reshape(n, K)
    assert np.abs(w.mean(0)).max() < 5 / np.sqrt(n)
    assert np.abs(w.T @ w / n - np.eye(K)).max() < 5 * np.sqrt(2 / n)
    squares = (w**2).sum(-1)
    assert abs(squares.mean() - K) < 5 * np.sqrt(2 * K / n)
    assert abs(squares.var() - 2 * K) < 5 * np.sqrt(8 * K * (K + 6) / n)


def estimates(x, y, draws, projection):
    """exp(x'y) as `draws` independent projections see it, in float64."""

    def one(key):
        logs = log_positive_features(points, projection(key))
        return jnp.exp(logs.sum(0)).sum()

    with jax.enable_x64(True):
        points = jnp.stack([x, y])
        return np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(5), draws)))


@pytest.mark.rotating
def test_the_kernel_estimate_is_unbiased_and_better_with_orthogonal_rows(rng):
    """The mean of n estimates lies within 4 of its standard errors of exp(x'y); the seed is fixed.

    The variance of orthogonal rows is 0.89 of that of independent ones for |x + y| = 1 in 4 dimensions.
    """
    n = 20000
    x, y = rng.normal(size=(2, K))
    x, y = x / np.linalg.norm(x + y), y / np.linalg.norm(x + y)
    ours = estimates(x, y, n, lambda key: orthogonal_projection(key, K, K, jnp.float64))
    plain = estimates(x, y, n, lambda key: jax.random.normal(key, (K, K), jnp.float64))
    exact, error = np.exp(x @ y), ours.std() / np.sqrt(n)
    assert error < 0.01 * exact  # or the next line would say little
    assert abs(ours.mean() - exact) < 4 * error
    assert ours.var() < 0.95 * plain.var()


@pytest.mark.rotating
def test_many_features_give_softmax_attention(rng):
    """The error falls as the root of their number: with 16 times as many it must be at most 0.4 of that.

    One kernel's relative variance is (exp(|x + y|^2) - 1) / M for independent rows, near 1.7 / M here.
    """
    x = {n: jnp.asarray(y, jnp.float32) for n, y in draw(rng, 0.5).items()}
    s = np.einsum("bihk,bjhk->bhij", x["q"], x["k"]) / np.sqrt(K)
    p = np.tril(np.exp(s))
    want = np.einsum("bhij,bjhv->bihv", p / p.sum(-1, keepdims=True), x["v"])

    def error(count):
        def one(key):
            return features.performer_attention(**x, projection=orthogonal_projection(key, count, K))[0]

        outs = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), 4))
        return rms(outs, np.broadcast_to(want, outs.shape))

    few, many = error(64), error(1024)
    assert many < 0.4 * few and many < np.sqrt(1.7 / 1024)


def test_the_future_changes_nothing_even_where_it_is_huge(rng):
    """Exponents of later keys are 1000 larger or smaller; features in float32 would be inf or 0."""
    op, _, x, _ = performer_case(rng)
    x = {n: jnp.asarray(y, jnp.float32) for n, y in x.items()}
    run = jax.jit(op)
    want, _ = run(x)
    other, state = run(x | {"k": x["k"].at[:, 10:].multiply(40.0)})
    np.testing.assert_array_equal(other[:, :10], want[:, :10])
    assert all(np.isfinite(y).all() for y in jax.tree.leaves((other, state)))


def test_keys_far_from_zero_keep_their_weights(rng):
    """Keys along the shortest row, times 30: exponents near -1000, where plain features are all 0."""
    op, row, x, _ = performer_case(rng)
    x["k"] = 0.01 * x["k"] + 30 * PROJECTION[np.argmin((PROJECTION**2).sum(-1))]
    logs = np.log(positive(0.0 * x["k"])) + (x["k"] / K**0.25) @ PROJECTION.T
    logs = logs - ((x["k"] / K**0.25) ** 2).sum(-1, keepdims=True) / 2
    assert logs.max() < -110  # exp of them is 0 in float32
    a = np.exp(logs - logs.max((1,), keepdims=True))
    b = np.log(positive(x["q"])) + logs.max((1,), keepdims=True)
    b = np.exp(b - b.max(-1, keepdims=True))
    sums = np.cumsum(a[..., None] * x["v"][..., None, :], 1)
    want = np.einsum("bthm,bthmv->bthv", b, sums) / (b * np.cumsum(a, 1)).sum(-1)[..., None]
    with jax.enable_x64(True):
        out, _ = jax.jit(op)(jax.tree.map(jnp.asarray, x))
    assert rms(out, want) < 1e-10
    out, _ = jax.jit(op)({n: jnp.asarray(y, jnp.float32) for n, y in x.items()})
    assert rms(out, want) < 1e-2  # exponents near 1000 have steps of 6e-5


@pytest.mark.rotating
def test_performer_gives_zero_before_the_first_token(rng):
    op, _, x, _ = performer_case(rng)
    x = {n: jnp.asarray(y, jnp.float32) for n, y in x.items()}
    mask = jnp.arange(T)[None] >= jnp.asarray([[5], [T]])
    out, _ = jax.jit(lambda x: op(x, mask=mask))(x)
    assert np.isfinite(out).all() and not np.any(out[0, :5]) and not np.any(out[1]) and np.any(out[0, 5])

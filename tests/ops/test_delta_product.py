"""Gated DeltaProduct: against stored float64 results, the paper's equation, and itself cut in any way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.recurrent.delta_product import gated_delta_product
from kvjax.ops.recurrent.linear_attention import gated_delta_rule
from tests.ops.oracles import oracle, rms
from tests.parity.ops.rwkv import OPS
from tests.sweep import sweep

B, T, H, K, V, N = 2, 23, 2, 5, 4, 3
FORMS = pytest.mark.parametrize("recurrent", [False, True], ids=["chunked", "recurrent"])
CHUNKED = pytest.mark.parametrize("recurrent", sweep([False, True], False), ids=["chunked", "recurrent"])
run = jax.jit(gated_delta_product, static_argnames=("recurrent", "scale"))


def draw(rng, dtype=jnp.float32, strongest=-2.0, n=N, heads=H):
    """q, k, v, g and beta of n sub-steps per token, and a state; betas up to 2, unit keys."""
    q, k = rng.normal(size=(B, T, heads, K)), rng.normal(size=(B, T * n, heads, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, g = rng.normal(size=(B, T * n, H, V)), rng.uniform(strongest, 0, (B, T, H))
    beta, state = rng.uniform(0, 2, (B, T * n, H)), rng.normal(size=(B, H, K, V))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v, g, beta)), jnp.asarray(state, dtype)


def by_hand(inputs, state):
    """Multiply the Householder matrices of every token, in float64 numpy."""
    q, k, v, g, beta = (None if x is None else np.asarray(x, np.float64) for x in inputs)
    state, n, tokens = np.array(state, np.float64), k.shape[1] // q.shape[1], q.shape[1]
    out = np.zeros((q.shape[0], tokens, *v.shape[2:]))
    for b, t, h in np.ndindex(*out.shape[:3]):
        group = h * k.shape[2] // v.shape[2]
        s = state[b, h] if g is None else np.exp(g[b, t, h]) * state[b, h]
        for j in range(t * n, t * n + n):
            key, step = k[b, j, group], beta[b, j, h]
            s = (np.eye(len(key)) - step * np.outer(key, key)) @ s + step * np.outer(key, v[b, j, h])
        state[b, h] = s
        out[b, t, h] = s.T @ q[b, t, group]
    return out, state


def cut(inputs, start, stop, rows=slice(None), n=N):
    q, k, v, g, beta = inputs
    wide = [x[rows, start * n : stop * n] for x in (k, v, beta)]
    return q[rows, start:stop], wide[0], wide[1], g[rows, start:stop], wide[2]


def close(got, want, tolerance=1e-6):
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape and rms(x, y) < tolerance


@FORMS
def test_float64_results_are_those_of_the_equation(recurrent, rng):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        inputs, state = draw(rng, jnp.float64)
        close(run(*inputs, initial_state=state, recurrent=recurrent), by_hand(inputs, state), 1e-10)


def test_without_decay_without_a_state_and_with_shared_keys(rng):
    (q, k, v, _, beta), state = draw(rng, heads=1)
    inputs = (q, k, v, None, beta)
    close(run(*inputs, scale=0.25), by_hand((0.25 * q, k, v, None, beta), 0 * state))


@pytest.mark.rotating
def test_one_sub_step_is_the_gated_delta_rule(rng):
    inputs, state = draw(rng, n=1)
    want = jax.jit(lambda x, s: gated_delta_rule(*x, scale=1.0, initial_state=s))(inputs, state)
    close(run(*inputs, initial_state=state), want)


def test_two_reflections_rotate_the_state(rng):
    """With beta = 2, no writes and no decay, a token turns the state by twice the angle between its keys."""
    angle = 0.4
    k = jnp.asarray([[1.0, 0.0], [np.cos(angle), np.sin(angle)]])[None, :, None]
    start, zero = jnp.asarray(rng.normal(size=(1, 1, 2, 3)), jnp.float32), jnp.zeros((1, 2, 1, 3))
    _, got = run(jnp.ones((1, 1, 1, 2)), k, zero, None, jnp.full((1, 2, 1), 2.0), initial_state=start)
    c, s = np.cos(2 * angle), np.sin(2 * angle)
    assert rms(got[0, 0], np.array([[c, -s], [s, c]]) @ np.asarray(start[0, 0])) < 1e-6


@pytest.mark.rotating
def test_bfloat16_inputs_keep_a_float32_state():
    inputs, want = oracle("gated_delta_product")
    half = {
        n: jnp.asarray(x, jnp.float32 if n == "initial_state" else jnp.bfloat16) for n, x in inputs.items()
    }
    got = jax.jit(OPS["gated_delta_product"])(half)
    assert all(got[key].dtype == np.float32 and rms(got[key], x) < 1e-2 for key, x in want.items())


@pytest.mark.rotating
@pytest.mark.parametrize("at", sweep([7, 16], 16))
def test_a_sequence_may_be_cut_anywhere(at, rng):
    inputs, start = draw(rng)
    first, state = run(*cut(inputs, 0, at), initial_state=start)
    second, state = run(*cut(inputs, at, T), initial_state=state)
    close((np.concatenate([first, second], 1), state), by_hand(inputs, start))


def test_single_steps_are_the_whole(rng):
    inputs, start = draw(rng)
    state, out = start, []
    for t in range(T):
        o, state = run(*cut(inputs, t, t + 1), initial_state=state, recurrent=True)
        out.append(o)
    close((np.concatenate(out, 1), state), by_hand(inputs, start))


@pytest.mark.rotating
@CHUNKED
def test_packed_segments_are_each_alone(recurrent, rng):
    inputs, state = draw(rng)
    ends = [[9, 20, T], [14, 15, T]]
    segments = jnp.asarray([np.searchsorted(e, np.arange(T), side="right") for e in ends], jnp.int32)
    every = jnp.ones((B, T), bool)
    got, last = run(*inputs, initial_state=state, segments=segments, mask=every, recurrent=recurrent)
    for row in range(B):
        one = slice(row, row + 1)
        for start, stop in zip([0, *ends[row]], ends[row], strict=False):
            before = state[one] if start == 0 else 0 * state[one]
            want, end = by_hand(cut(inputs, start, stop, one), before)
            assert rms(got[one, start:stop], want) < 1e-6
        assert rms(last[one], end) < 1e-6


@pytest.mark.rotating
@CHUNKED
def test_masked_tokens_change_nothing(recurrent, rng):
    inputs, state = draw(rng)
    real = np.ones((B, T), bool)
    real[0, [4, 5]], real[0, 18:] = False, False
    one = jnp.zeros((B, T), jnp.int32)  # as the test of segments calls it: one program
    how = {"segments": one, "mask": jnp.asarray(real), "recurrent": recurrent}
    got, last = run(*inputs, initial_state=state, **how)
    for row in range(B):
        kept = np.flatnonzero(real[row])
        wide = (kept[:, None] * N + np.arange(N)).ravel()
        q, k, v, g, beta = (x[row : row + 1] for x in inputs)
        alone = (q[:, kept], k[:, wide], v[:, wide], g[:, kept], beta[:, wide])
        close((got[row : row + 1, kept], last[row : row + 1]), by_hand(alone, state[row : row + 1]))


@pytest.mark.rotating
def test_gradients_stay_finite_under_strong_decay_and_agree(rng):
    inputs, state = draw(rng, strongest=-12.0)

    def loss(inputs, state, recurrent):
        return sum(
            (x**2).sum() for x in gated_delta_product(*inputs, initial_state=state, recurrent=recurrent)
        )

    grad = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    pairs = zip(*(jax.tree.leaves(grad(inputs, state, form)) for form in (False, True)), strict=True)
    for got, want in pairs:
        assert np.isfinite(got).all() and rms(got, want) < 1e-5


def test_sub_steps_that_do_not_divide_are_an_error(rng):
    (q, k, v, g, beta), _ = draw(rng)
    with pytest.raises(ValueError, match="same number of sub-steps"):
        gated_delta_product(q, k[:, :-1], v[:, :-1], g, beta[:, :-1])

"""HGRN: against stored float64 results, the paper's equation, and itself cut in any way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.recurrent.hgrn import hgrn
from tests.ops.oracles import oracle, rms
from tests.sweep import sweep

B, T, D = 2, 29, 6
FORMS = pytest.mark.parametrize("recurrent", [False, True], ids=["parallel", "recurrent"])
run = jax.jit(hgrn, static_argnames="recurrent")


def draw(rng, dtype=jnp.float32, strongest=-8.0):
    x, g = rng.normal(size=(B, T, D)), rng.uniform(strongest, 0, (B, T, D))
    return tuple(jnp.asarray(y, dtype) for y in (x, g, rng.normal(size=(B, D))))


def by_hand(x, g, h):
    x, g, h = (np.asarray(y, np.float64) for y in (x, g, h))
    out = []
    for t in range(x.shape[1]):
        h = np.exp(g[:, t]) * h + x[:, t]
        out.append(h)
    return np.stack(out, 1), h


def close(got, want, tolerance=1e-6):
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape and rms(x, y) < tolerance


@FORMS
def test_float64_results_are_those_of_the_equation(recurrent, rng):
    with jax.enable_x64(True):
        x, g, h = draw(rng, jnp.float64)
        close(run(x, g, initial_state=h, recurrent=recurrent), by_hand(x, g, h), 1e-10)


@FORMS
def test_without_a_state_it_starts_from_zeros(recurrent, rng):
    x, g, h = draw(rng)
    close(run(x, g, recurrent=recurrent), by_hand(x, g, 0 * h))


@pytest.mark.rotating
def test_bfloat16_inputs_keep_a_float32_state():
    inputs, want = oracle("hgrn")
    x, g = (jnp.asarray(inputs[n], jnp.bfloat16) for n in ("x", "g"))
    got = run(x, g, initial_state=inputs["initial_state"])
    assert all(y.dtype == np.float32 for y in got)
    close(got, (want["o"], want["final_state"]), 1e-2)


@pytest.mark.parametrize("cut", sweep([13, 16], 13))
def test_a_sequence_may_be_cut_anywhere(cut, rng):
    x, g, h = draw(rng)
    first, state = run(x[:, :cut], g[:, :cut], initial_state=h)
    second, state = run(x[:, cut:], g[:, cut:], initial_state=state)
    close((np.concatenate([first, second], 1), state), by_hand(x, g, h))


def test_single_steps_are_the_whole(rng):
    x, g, h = draw(rng)
    state, out = h, []
    for t in range(T):
        o, state = run(x[:, t : t + 1], g[:, t : t + 1], initial_state=state, recurrent=True)
        out.append(o)
    close((np.concatenate(out, 1), state), by_hand(x, g, h))


@FORMS
def test_packed_segments_are_each_alone(recurrent, rng):
    x, g, h = draw(rng, strongest=-0.5)
    ends = [[9, 20, T], [14, 15, T]]
    segments = jnp.asarray([np.searchsorted(e, np.arange(T), side="right") for e in ends], jnp.int32)
    got, last = run(x, g, initial_state=h, segments=segments, recurrent=recurrent)
    for row in range(B):
        for start, stop in zip([0, *ends[row]], ends[row], strict=False):
            one = slice(row, row + 1)
            want, end = by_hand(x[one, start:stop], g[one, start:stop], h[one] if start == 0 else 0 * h[one])
            assert rms(got[one, start:stop], want) < 1e-6
        assert rms(last[one], end) < 1e-6


@FORMS
def test_masked_tokens_change_nothing(recurrent, rng):
    """In the middle and at the end of a row, and where a segment starts."""
    x, g, h = draw(rng, strongest=-0.5)
    real = np.ones((B, T), bool)
    real[0, [4, 5]], real[0, 20:], real[1, 10:13] = False, False, False
    segments = jnp.asarray(np.stack([np.zeros(T), np.arange(T) >= 10]), jnp.int32)
    x, g = (jnp.where(real[..., None], y, jnp.nan) for y in (x, g))
    got, last = run(x, g, initial_state=h, segments=segments, mask=jnp.asarray(real), recurrent=recurrent)
    for row, start in ((0, 0), (1, 13)):
        kept = start + np.flatnonzero(real[row, start:])
        state = h[row] if start == 0 else 0 * h[row]
        want, end = by_hand(x[row, kept][None], g[row, kept][None], state[None])
        close((got[row, kept], last[row]), (want[0], end[0]))


def test_gradients_stay_finite_under_strong_decay_and_agree(rng):
    x, g, h = draw(rng, strongest=-120.0)  # e^-120 is zero in float32
    g = g.at[0, 3].set(-jnp.inf)

    def loss(inputs, recurrent):
        return (run(*inputs[:2], initial_state=inputs[2], recurrent=recurrent)[0] ** 2).sum()

    grad = jax.jit(jax.grad(loss), static_argnums=1)
    for got, want in zip(grad((x, g, h), False), grad((x, g, h), True), strict=True):
        assert np.isfinite(got).all() and rms(got, want) < 1e-5

"""RWKV-6 and RWKV-7: against stored float64 results, the papers' equations, and themselves cut in any way."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.oracles import oracle, rms
from tests.parity.ops.rwkv import OPS
from tests.sweep import sweep

B, T, H, K, V = 2, 37, 2, 5, 4
NAMES = ["rwkv6", "rwkv7"]
FORMS = pytest.mark.parametrize("recurrent", [False, True], ids=["chunked", "recurrent"])
CHUNKED = pytest.mark.parametrize("recurrent", sweep([False, True], False), ids=["chunked", "recurrent"])
RUN = {name: jax.jit(OPS[name], static_argnames="recurrent") for name in NAMES}
pytestmark = pytest.mark.parametrize("name", NAMES)


@partial(jax.jit, static_argnums=(1, 2))
@jax.grad
def gradient(x, name, recurrent):
    """Of the sum of squares of all outputs."""
    return sum((y**2).sum() for y in OPS[name](x, recurrent=recurrent).values())


def draw(rng, name, dtype=jnp.float32, strongest=0.5):
    """Draw inputs from a state that is not zero; log decays of RWKV-6 lie between -e^-6 and -e^strongest."""
    x = {n: rng.normal(size=(B, T, H, K)) for n in ("r", "k", "w_pre")}
    x |= {"v": rng.normal(size=(B, T, H, V)), "initial_state": rng.normal(size=(B, H, K, V))}
    if name == "rwkv6":
        x |= {"w_pre": rng.uniform(-6, strongest, (B, T, H, K)), "u": rng.normal(size=(H, K))}
    else:
        kk = rng.normal(size=(B, T, H, K))
        x |= {"kk": kk / np.linalg.norm(kk, axis=-1, keepdims=True), "a": rng.random((B, T, H, K))}
    return {n: jnp.asarray(y, dtype) for n, y in x.items()}


def by_hand(name, x):
    """Token by token in float64 numpy, as the papers write it."""
    x = {n: np.asarray(y, np.float64) for n, y in x.items()}
    state, out = x["initial_state"].copy(), np.zeros(x["v"].shape)
    for b, t, h in np.ndindex(*out.shape[:3]):
        r, k, v, w_pre = (x[n][b, t, h] for n in ("r", "k", "v", "w_pre"))
        s = state[b, h]
        if name == "rwkv6":
            out[b, t, h] = r @ (s + np.diag(x["u"][h]) @ np.outer(k, v))
            state[b, h] = np.diag(np.exp(-np.exp(w_pre))) @ s + np.outer(k, v)
        else:
            kk, a = x["kk"][b, t, h], x["a"][b, t, h]
            decay = np.exp(-np.exp(-0.5) / (1 + np.exp(-w_pre)))
            state[b, h] = (np.diag(decay) - np.outer(kk * a, kk)) @ s + np.outer(k, v)
            out[b, t, h] = r @ state[b, h]
    return {"o": out, "final_state": state}


def cut(x, start, stop, rows=slice(None)):
    """Cut out some tokens of some rows."""
    every = {"u": lambda y: y, "initial_state": lambda y: y[rows]}
    return {n: every.get(n, lambda y: y[rows, start:stop])(y) for n, y in x.items()}


def close(got, want, tolerance=1e-6):
    assert got.keys() == want.keys()
    for key, x in want.items():
        assert got[key].shape == x.shape and rms(got[key], x) < tolerance, key


@pytest.mark.rotating
@FORMS
def test_float64_results_are_those_of_the_equation(name, recurrent, rng):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        x = draw(rng, name, jnp.float64, strongest=3.0)
        x["w_pre"] = x["w_pre"].at[:, ::7].set(100.0)  # RWKV-6 forgets everything there
        close(RUN[name](x, recurrent=recurrent), by_hand(name, x), 1e-10)


@pytest.mark.rotating
def test_bfloat16_inputs_keep_a_float32_state(name):
    inputs, want = oracle(name)
    half = {
        n: jnp.asarray(x, jnp.float32 if n == "initial_state" else jnp.bfloat16) for n, x in inputs.items()
    }
    got = RUN[name](half)
    assert all(x.dtype == np.float32 for x in got.values())
    close(got, want, 1e-2)


@pytest.mark.rotating
def test_it_starts_from_zeros_and_o_is_multiplied_by_the_scale(name, rng):
    x = draw(rng, name)
    want = by_hand(name, x | {"initial_state": jnp.zeros_like(x["initial_state"])})
    got = jax.jit(lambda x: OPS[name](x | {"initial_state": None}, scale=0.25))(x)
    close(got, want | {"o": 0.25 * want["o"]})


@pytest.mark.rotating
@pytest.mark.parametrize("at", sweep([16, 21], 21))
def test_a_sequence_may_be_cut_anywhere(name, at, rng):
    x = draw(rng, name)
    first = RUN[name](cut(x, 0, at))
    second = RUN[name](cut(x, at, T) | {"initial_state": first["final_state"]})
    got = second | {"o": np.concatenate([first["o"], second["o"]], 1)}
    close(got, by_hand(name, x))


def test_single_steps_are_the_whole(name, rng):
    x = draw(rng, name)
    state, out = x["initial_state"], []
    for t in range(T):
        got = RUN[name](cut(x, t, t + 1) | {"initial_state": state}, recurrent=True)
        state = got["final_state"]
        out.append(got["o"])
    close({"o": np.concatenate(out, 1), "final_state": state}, by_hand(name, x))


@pytest.mark.rotating
@CHUNKED
def test_packed_segments_are_each_alone(name, recurrent, rng):
    x = draw(rng, name)
    ends = [[9, 33, T], [20, 21, T]]
    segments = jnp.asarray([np.searchsorted(e, np.arange(T), side="right") for e in ends], jnp.int32)
    got = RUN[name](x, segments=segments, mask=jnp.ones((B, T), bool), recurrent=recurrent)
    for row in range(B):
        for start, stop in zip([0, *ends[row]], ends[row], strict=False):
            alone = cut(x, start, stop, slice(row, row + 1))
            if start:
                alone["initial_state"] = np.zeros_like(alone["initial_state"])
            want = by_hand(name, alone)
            assert rms(got["o"][row : row + 1, start:stop], want["o"]) < 1e-6
        assert rms(got["final_state"][row : row + 1], want["final_state"]) < 1e-6


@pytest.mark.rotating
@CHUNKED
def test_masked_tokens_change_nothing(name, recurrent, rng):
    """Three tokens in the middle of a row and its last ones; another row starts a segment at a masked one."""
    x = draw(rng, name)
    real = np.ones((B, T), bool)
    real[0, [4, 5, 20]], real[0, 30:], real[1, 10:13] = False, False, False
    segments = jnp.asarray(np.stack([np.zeros(T), np.arange(T) >= 10]), jnp.int32)
    got = RUN[name](x, segments=segments, mask=jnp.asarray(real), recurrent=recurrent)
    for row, start in ((0, 0), (1, 13)):
        alone = cut(x, start, T, slice(row, row + 1))
        kept = np.flatnonzero(real[row, start:])
        alone = {n: y[:, kept] if n not in ("u", "initial_state") else y for n, y in alone.items()}
        if start:
            alone["initial_state"] = np.zeros_like(alone["initial_state"])
        want = by_hand(name, alone)
        assert rms(got["o"][row : row + 1, start + kept], want["o"]) < 1e-6
        assert rms(got["final_state"][row : row + 1], want["final_state"]) < 1e-6


@pytest.mark.rotating
@pytest.mark.parametrize("strongest", sweep([2.5, 100.0], 2.5))
def test_gradients_stay_finite_under_strong_decay_and_agree(name, strongest, rng):
    """RWKV-6 forgets up to e^-12 in a token, or more than a float holds; the decay of RWKV-7 is bounded."""
    x = draw(rng, name, strongest=strongest)
    if name == "rwkv7":
        x["w_pre"] += 4 * strongest

    got, want = gradient(x, name, False), gradient(x, name, True)
    for key, y in want.items():
        assert np.isfinite(got[key]).all() and np.isfinite(y).all(), key
        if strongest < 100:
            assert rms(got[key], y) < 1e-5, key

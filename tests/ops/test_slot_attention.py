"""Slot attention against stored results, and against float64 numpy of its equations cut in any way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.recurrent.slot_attention import Averages, GSAState, abc, gsa
from kvjax.ops.recurrent.slot_memory import LogSum
from tests.ops.oracles import oracle, rms
from tests.ops.rows import T, by_rows, check_cuts, check_gradients, check_packed_rows
from tests.parity.ops.slots import OPS
from tests.sweep import sweep

B, H, K, V, M = 2, 2, 4, 3, 5
CHUNKED = pytest.mark.parametrize("recurrent", sweep([False, True], False), ids=["chunked", "recurrent"])


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gsa_row(x, state):
    """Run the equations of the paper, head by head."""
    q, k, v, s, g = (x[n] for n in "qkvsg")
    keys, values = (np.zeros((H, K, M)), np.zeros((H, M, V))) if state is None else map(np.array, state)
    out = np.zeros(v.shape)
    for t, h in np.ndindex(*v.shape[:2]):
        keys[h] = keys[h] @ np.diag(np.exp(g[t, h])) + np.outer(k[t, h], s[t, h])
        values[h] = np.diag(np.exp(g[t, h])) @ values[h] + np.outer(s[t, h], v[t, h])
        out[t, h] = softmax(q[t, h] @ keys[h] / np.sqrt(K)) @ values[h]
    return out, GSAState(keys, values)


def abc_row(x, state):
    """Averages over everything so far, from their definition; the state is one token of its own weight."""
    q, k, v, s = (x[n] for n in "qkvs")
    out, t = np.zeros(v.shape), len(v)
    log_weights = np.moveaxis(s, 0, 1)[..., None, :]  # [H, t, 1, M], then what the state stands for
    keys = np.broadcast_to(np.moveaxis(k, 0, 1)[..., None], (H, t, K, M))
    values = np.broadcast_to(np.moveaxis(v, 0, 1)[..., None], (H, t, V, M))
    top, total = np.full((H, M), -np.inf), np.zeros((H, M))
    if state is not None:
        top, total = state.weight
        log_weights = np.concatenate([(top + np.log(total))[:, None, None], log_weights], 1)
        keys = np.concatenate([state.k[:, None], keys], 1)
        values = np.concatenate([np.swapaxes(state.v, 1, 2)[:, None], values], 1)
    for i in range(t):
        seen = slice(0, log_weights.shape[1] - t + i + 1)
        w = softmax(np.swapaxes(log_weights[:, seen], 1, -1))  # [H, M, 1, seen], over tokens
        mean_k, mean_v = (np.einsum("hmos,hskm->hkm", w, x[:, seen]) for x in (keys, values))
        p = softmax(np.einsum("hk,hkm->hm", q[i], mean_k) / np.sqrt(K))
        out[i] = np.einsum("hm,hvm->hv", p, mean_v)
    new = np.maximum(top, s.max(0))
    total = total * np.exp(top - new) + np.exp(s - new).sum(0)
    return out, Averages(mean_k, np.swapaxes(mean_v, 1, 2), LogSum(new, total))


def draw(rng, *, strong=False):
    shapes = {"q": K, "k": K, "v": V, "s": M, "g": M}
    x = {n: rng.normal(size=(B, T, H, d)) for n, d in shapes.items()}
    x["g"] = -np.abs(x["g"]) * (12 if strong else 0.3)
    return x


def gsa_case(rng, **how):
    state = GSAState(rng.normal(size=(B, H, K, M)), rng.normal(size=(B, H, M, V)))
    return lambda x, **k: gsa(*(x[n] for n in "qkvsg"), **k), gsa_row, draw(rng, **how), state


def abc_case(rng, *, strong=False):
    x = {n: y * (100 if strong and n == "s" else 1) for n, y in draw(rng).items() if n != "g"}
    weight = LogSum(rng.normal(size=(B, H, M)), 1 + rng.random((B, H, M)))
    state = Averages(rng.normal(size=(B, H, K, M)), rng.normal(size=(B, H, M, V)), weight)
    return lambda x, **k: abc(*(x[n] for n in "qkvs"), **k), abc_row, x, state


CASES = pytest.mark.parametrize("case", [gsa_case, abc_case], ids=["gsa", "abc"])


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["gsa", "abc"])
def test_bfloat16_inputs_keep_a_float32_state(name):
    inputs, want = oracle(name)
    half = {n: jnp.asarray(x, jnp.float32 if "initial" in n else jnp.bfloat16) for n, x in inputs.items()}
    got = jax.jit(OPS[name])(half)
    assert all(got[n].dtype == np.float32 and rms(got[n], want[n]) < 1e-2 for n in want)


@CHUNKED
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
@pytest.mark.parametrize("case", sweep([gsa_case, abc_case], abc_case), ids=["gsa", "abc"])
def test_gradients_stay_finite_under_strong_decay_and_agree(rng, case):
    op, _, x, state = case(rng, strong=True)
    check_gradients(op, functools.partial(op, recurrent=True), x, state)


def test_scores_of_abc_may_be_any_size(rng):
    """A constant added to a slot's scores cancels. These scores stay exact in float32; e^1024 does not."""
    op, _, x, _ = abc_case(rng)
    x = {n: jnp.asarray(y, jnp.float32) for n, y in x.items()}
    x["s"] = jnp.round(x["s"] * 64) / 64
    want, _ = jax.jit(op)(x)
    for constant in (-1024, 1024):
        got, state = jax.jit(op)(x | {"s": x["s"] + constant})
        assert rms(got, want) < 1e-6
        assert np.isfinite(state.weight.top).all()


def test_abc_continues_huge_scores_in_single_steps(rng):
    """The weight of the past against the next token is a difference of scores, which are exact here."""
    op, _, x, _ = abc_case(rng)
    x = {n: jnp.asarray(y, jnp.float32) for n, y in x.items()}
    x["s"] = 4096 + jnp.round(x["s"] * 64) / 64
    want, _ = by_rows(abc_row, {n: np.asarray(y, np.float64) for n, y in x.items()})
    out, state = jax.jit(op)({n: y[:, :1] for n, y in x.items()})
    step, outs = jax.jit(lambda x, s: op(x, initial_state=s)), [out]
    for t in range(1, T):
        out, state = step({n: y[:, t : t + 1] for n, y in x.items()}, state)
        outs.append(out)
    assert rms(jnp.concatenate(outs, 1), want) < 1e-6


@pytest.mark.rotating
def test_abc_gives_zero_before_the_first_token(rng):
    op, _, x, _ = abc_case(rng)
    x = {n: jnp.asarray(y, jnp.float32) for n, y in x.items()}
    mask = jnp.arange(T)[None] >= jnp.asarray([[5], [T]])
    out, state = jax.jit(lambda x: op(x, mask=mask))(x)
    assert np.isfinite(out).all() and not np.any(out[0, :5]) and not np.any(out[1])
    assert np.all(state.weight.top[1] == -np.inf) and not np.any(state.weight.total[1])
    want, _ = abc_row({n: np.asarray(y[0, 5:], np.float64) for n, y in x.items()}, None)
    assert rms(out[0, 5:], want) < 1e-6

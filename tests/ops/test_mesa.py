"""The Mesa layer: against stored float64 results, and against the equation in numpy however it is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.recurrent.mesa import MesaState, mesa
from tests.ops import rows
from tests.ops.oracles import oracle, rms
from tests.parity.ops.memory import OPS
from tests.sweep import sweep

B, T, H, K, V = 2, rows.T, 2, 4, 3
FORMS = {
    "chunked": {},
    "recurrent": {"recurrent": True},
    "conjugate gradients": {"iterations": 2 * K},
    "conjugate gradients, recurrent": {"iterations": 2 * K, "recurrent": True},
}
forms = pytest.mark.parametrize("form", sweep(FORMS, "chunked", "recurrent", "conjugate gradients"))
RIDGE = 0.25 + np.random.default_rng(1).random((H, K))


def draw(rng, decay=0.3, t=T):
    """Tokens with unit keys."""
    q, k = (rng.normal(size=(B, t, H, K)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = -decay * rng.random((B, t, H)), rng.random((B, t, H))
    return {"q": q, "k": k, "v": rng.normal(size=(B, t, H, V)), "g": g, "beta": beta}


def draw_state(rng):
    k, v = rng.normal(size=(B, H, 9, K)), rng.normal(size=(B, H, 9, V))
    return MesaState(np.einsum("bhnk,bhnj->bhkj", k, k), np.einsum("bhnk,bhnv->bhkv", k, v))


def row(x, state):
    """Run the equation, one token of one head after the other."""
    if state is None:
        state = MesaState(np.zeros((H, K, K)), np.zeros((H, K, V)))
    kk, kv = (s.copy() for s in state)
    out = np.zeros(x["v"].shape)
    for t, h in np.ndindex(*out.shape[:2]):
        k, keep = x["k"][t, h], np.exp(x["g"][t, h])
        kk[h] = keep * kk[h] + x["beta"][t, h] * np.outer(k, k)
        kv[h] = keep * kv[h] + x["beta"][t, h] * np.outer(k, x["v"][t, h])
        out[t, h] = kv[h].T @ np.linalg.solve(kk[h] + np.diag(RIDGE[h]), x["q"][t, h])
    return out, MesaState(kk, kv)


def op_of(how):
    def op(x, **more):
        ridge = jnp.asarray(RIDGE, x["v"].dtype)
        return mesa(x["q"], x["k"], x["v"], x["g"], x["beta"], ridge, **how | more)

    return op


def test_conjugate_gradients_reach_the_oracle():
    inputs, want = oracle("mesa_net")
    got = jax.jit(lambda x: OPS["mesa_net"](x, iterations=24))(inputs)
    assert got.keys() == want.keys()
    for key, x in want.items():
        assert got[key].dtype == np.float32 and rms(got[key], x) < 1e-6, key


@pytest.mark.rotating
def test_bfloat16_inputs_keep_a_float32_state():
    inputs, want = oracle("mesa_net")
    got = jax.jit(OPS["mesa_net"])({n: jnp.asarray(x, jnp.bfloat16) for n, x in inputs.items()})
    assert all(x.dtype == np.float32 for x in got.values())
    assert all(rms(got[n], want[n]) < 1e-2 for n in want)


@pytest.mark.rotating
@forms
def test_packed_rows_are_the_equation_from_any_state(rng, form):
    rows.check_packed_rows(op_of(FORMS[form]), row, draw(rng), draw_state(rng))


@pytest.mark.rotating
@pytest.mark.parametrize("form", sweep(["chunked", "conjugate gradients"], "chunked"))
def test_a_sequence_may_be_cut_anywhere(rng, form):
    rows.check_cuts(op_of(FORMS[form]), row, draw(rng), draw_state(rng))


@pytest.mark.rotating
def test_more_steps_come_closer(rng):
    x = jax.tree.map(lambda y: jnp.asarray(y, jnp.float32), draw(rng))
    want, _ = rows.by_rows(row, x)
    errors = [rms(jax.jit(op_of({"iterations": n}))(x)[0], want) for n in (1, 3)]
    assert errors[0] > 4 * errors[1] > 1e-3


@pytest.mark.rotating
@pytest.mark.parametrize("form", sweep(["chunked", "conjugate gradients"], "conjugate gradients"))
def test_gradients_stay_finite_under_strong_decay_and_agree(rng, form):
    rows.check_gradients(
        op_of(FORMS[form]), op_of({"recurrent": True}), draw(rng, decay=12.0), draw_state(rng)
    )

"""Lattice against stored results, against gradient descent on its loss, and cut in any way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.recurrent.lattice import lattice
from tests.ops.oracles import oracle, rms
from tests.ops.rows import T, check_cuts, check_packed_rows
from tests.parity.ops.slots import OPS

B, H, M, V = 2, 2, 4, 3


def lattice_row(x, state, slots):
    """One step per token down the gradient of |v - sum_i k_i s_i / |s_i||^2 / 2, taken by finite formulas.

    d n_i / d s_i = (I - n_i n_i') / |s_i| is built as a matrix here.
    """
    s, out = np.array(slots if state is None else state), np.zeros(x["v"].shape)
    for t, h in np.ndindex(*out.shape[:2]):
        unit = s[h] / np.linalg.norm(s[h], axis=1)[:, None]
        error = unit.T @ x["k"][t, h] - x["v"][t, h]
        gradient = [
            x["k"][t, h, i] * (np.eye(V) - np.outer(unit[i], unit[i])) / np.linalg.norm(s[h, i]) @ error
            for i in range(M)
        ]
        s[h] -= x["step"][t, h] * np.stack(gradient)
        out[t, h] = (s[h] / np.linalg.norm(s[h], axis=1)[:, None]).T @ x["q"][t, h]
    return out, s


@pytest.fixture
def case(rng):
    x = {n: rng.normal(size=(B, T, H, d)) for n, d in {"q": M, "k": M, "v": V}.items()}
    x["step"] = rng.random((B, T, H))
    slots = rng.normal(size=(H, M, V))

    def op(x, **how):
        start = jnp.asarray(slots, x["v"].dtype)
        return lattice(x["q"], x["k"], x["v"], x["step"], slots=start, **how)

    return op, functools.partial(lattice_row, slots=slots), x, rng.normal(size=(B, H, M, V))


def floats(x):
    return {n: jnp.asarray(y, jnp.float32) for n, y in x.items()}


@pytest.mark.rotating
def test_bfloat16_inputs_keep_a_float32_state():
    inputs, want = oracle("lattice_decoding")
    half = {n: x if n == "initial_state" else x.astype(jnp.bfloat16) for n, x in floats(inputs).items()}
    got = jax.jit(OPS["lattice_decoding"])(half)
    assert all(got[n].dtype == np.float32 and rms(got[n], want[n]) < 1e-2 for n in want)


def test_packed_segments_with_tokens_left_out_are_each_alone(case):
    op, row, x, state = case
    check_packed_rows(op, row, x, state)


def test_a_sequence_may_be_cut_anywhere(case):
    op, row, x, state = case
    check_cuts(op, row, x, state)


def test_a_row_without_a_state_starts_from_its_slots(case):
    op, row, x, _ = case
    out, state = jax.jit(op)(floats(x))
    want, last = row({n: y[1] for n, y in x.items()}, None)
    assert rms(out[1], want) < 1e-5 and rms(state[1], last) < 1e-5


def test_a_step_moves_slots_at_right_angles(case):
    """So norms never shrink, and no slot can reach zero, where it has no direction."""
    op, _, x, state = case
    with jax.enable_x64(True):
        one = {n: jnp.asarray(y[:, :1]) for n, y in x.items()}
        _, after = jax.jit(lambda x, s: op(x, initial_state=s))(one, jnp.asarray(state))
        moved = np.asarray(after) - state
    assert np.abs(moved).max() > 0.1
    np.testing.assert_allclose((moved * state).sum(-1), 0, atol=1e-12)


@pytest.mark.rotating
def test_gradients_are_finite_and_those_of_a_difference(case, rng):
    op, _, x, state = case
    with jax.enable_x64(True):
        x, state = jax.tree.map(jnp.asarray, (x, state))
        way = jax.tree.map(lambda y: jnp.asarray(rng.normal(size=y.shape)), (x, state))
        loss = lambda x, s: sum((y**2).sum() for y in op(x, initial_state=s))  # noqa: E731
        along = jax.jit(lambda e: loss(*jax.tree.map(lambda y, d: y + e * d, (x, state), way)))
        slope = jax.jit(jax.grad(along))(0.0)
        assert abs(slope - (along(1e-6) - along(-1e-6)) / 2e-6) < 1e-6 * abs(slope)


def test_a_start_is_needed(case):
    x = floats(case[2])
    with pytest.raises(ValueError, match="needs slots"):
        lattice(x["q"], x["k"], x["v"], x["step"])
    with pytest.raises(ValueError, match="needs slots"):
        start = jnp.ones((B, H, M, V))
        number = jnp.zeros((B, T), jnp.int32)
        lattice(x["q"], x["k"], x["v"], x["step"], initial_state=start, segments=number)

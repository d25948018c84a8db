"""Infini-attention against stored results, and against float64 numpy of one row, segment by segment."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.recurrent.infini import InfiniState, infini_attention
from tests.ops.oracles import oracle, rms
from tests.ops.rows import T, check_cuts, check_gradients, check_packed_rows
from tests.parity.ops.slots import OPS
from tests.sweep import sweep

B, H, K, V, S = 2, 2, 4, 3, 7
BETA = np.array([0.3, -1.2])
FORMS = pytest.mark.parametrize("recurrent", [False, True], ids=["blocks", "recurrent"])
DELTA = pytest.mark.parametrize("delta", sweep([False, True], False), ids=["linear", "delta"])


def phi(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def infini_row(x, state, delta):
    """Segment by segment as in the paper; a full segment enters the memory when it is full."""
    memory, z = np.zeros((H, K, V)), np.zeros((H, K))
    held = {n: np.zeros((0, H, d)) for n, d in {"k": K, "v": V, "k_local": K}.items()}
    if state is not None:  # a state from `start`, which keeps what a row function may need
        memory, z, held = state["memory"], state["z"], state["held"]
    t, out = len(x["v"]), np.zeros(x["v"].shape)
    for i in range(t):
        held = {n: np.concatenate([y, x[n][i : i + 1]]) for n, y in held.items()}
        for h in range(H):
            s = held["k_local"][:, h] @ x["q_local"][i, h] / np.sqrt(K)
            p = np.exp(s - s.max())
            local, q = p @ held["v"][:, h] / p.sum(), phi(x["q"][i, h])
            known = q @ memory[h] / (q @ z[h]) if z[h].any() else np.zeros(V)
            gate = 1 / (1 + np.exp(-BETA[h]))
            out[i, h] = gate * known + (1 - gate) * local
        if len(held["v"]) == S:
            memory, z = memory + added(held, memory, z, delta)[0], z + phi(held["k"]).sum(0)
            held = {n: y[:0] for n, y in held.items()}
    return out, {"memory": memory, "z": z, "held": held}


def added(held, memory, z, delta):
    """Return what a segment's tokens add to the memory, and to z."""
    k, v = phi(held["k"]), held["v"]
    if delta and z.any():
        v = v - np.einsum("thk,hkv->thv", k, memory) / np.einsum("thk,hk->th", k, z)[..., None]
    return np.einsum("thk,thv->hkv", k, v), k.sum(0)


def as_state(row, delta):
    """Return the op's state of a row, from that of the row function."""
    memory = np.concatenate([row["memory"], row["z"][..., None]], -1)
    extra, z = added(row["held"], row["memory"], row["z"], delta)
    n = len(row["held"]["v"])
    k, v = (np.pad(row["held"][name], ((0, S - n), (0, 0), (0, 0))) for name in ("k_local", "v"))
    return InfiniState(memory, np.concatenate([extra, z[..., None]], -1), k, v, np.int32(n))


def draw(rng, t=T):
    shapes = {"q": K, "k": K, "v": V, "q_local": K, "k_local": K}
    return {n: rng.normal(size=(B, t, H, d)) for n, d in shapes.items()}


@pytest.fixture(params=sweep([False, True], True), ids=["linear", "delta"])
def case(rng, request):
    """(op, row function, inputs, state): rows that have seen 10 and 18 tokens, so 3 and 4 of a segment."""
    delta = request.param

    def op(x, **how):
        inputs = (x["q"], x["k"], x["v"], jnp.asarray(BETA, x["v"].dtype))
        local = {n: x[n] for n in ("q_local", "k_local")}
        return infini_attention(*inputs, segment_tokens=S, delta=delta, **local, **how)

    past = draw(rng)
    rows = [
        infini_row({n: y[i, :e] for n, y in past.items()}, None, delta)[1] for i, e in enumerate((10, 18))
    ]
    state = jax.tree.map(lambda *y: np.stack(y), *(as_state(r, delta) for r in rows))
    starts = iter(rows)

    def row(x, state):
        """Continue rows by what states were made from: the op's states cannot be turned into segments."""
        out, after = infini_row(x, None if state is None else next(starts), delta)
        return out, as_state(after, delta)

    return op, row, draw(rng), state


@pytest.mark.rotating
def test_bfloat16_inputs_keep_a_float32_state():
    inputs, want = oracle("infini_attention")
    got = jax.jit(OPS["infini_attention"])({n: jnp.asarray(x, jnp.bfloat16) for n, x in inputs.items()})
    assert all(got[n].dtype == np.float32 and rms(got[n], want[n]) < 1e-2 for n in want)


@pytest.mark.rotating
@FORMS
def test_packed_documents_with_tokens_left_out_are_each_alone(case, recurrent):
    op, row, x, state = case
    check_packed_rows(functools.partial(op, recurrent=recurrent), row, x, state)


@pytest.mark.rotating
def test_rows_at_different_places_of_their_segments_may_be_cut_anywhere(case):
    op, row, x, state = case
    check_cuts(op, row, x, state, functools.partial(op, recurrent=True))


@pytest.mark.rotating
def test_gradients_are_finite_and_those_of_the_other_form(case):
    op, _, x, state = case
    check_gradients(op, functools.partial(op, recurrent=True), x, state)


@pytest.mark.rotating
@DELTA
def test_the_memory_knows_nothing_of_the_open_segment(rng, delta):
    """A gate of one leaves the memory alone: 0 in the first segment, and later blind to its own segment."""
    x = {n: jnp.asarray(y, jnp.float32) for n, y in draw(rng).items()}

    @jax.jit
    def run(x):
        gate = jnp.full(H, 200.0)
        return infini_attention(x["q"], x["k"], x["v"], gate, segment_tokens=S, delta=delta)[0]

    out = run(x)
    other = run(x | {n: x[n].at[:, S:].multiply(2.0) for n in ("k", "v")})
    assert not np.any(out[:, :S]) and np.all(np.any(out[:, S:], -1))
    np.testing.assert_array_equal(other[:, : 2 * S], out[:, : 2 * S])
    assert rms(other[:, 2 * S :], out[:, 2 * S :]) > 0.1


def test_rotation_reaches_the_local_branch_alone(rng):
    """A gate of one reads no rotated key, a gate of zero nothing else."""
    x = {n: jnp.asarray(y, jnp.float32) for n, y in draw(rng).items()}

    @jax.jit
    def run(x, beta):
        local = {n: x[n] for n in ("q_local", "k_local")}
        return infini_attention(x["q"], x["k"], x["v"], beta, segment_tokens=S, **local)[0]

    turned = x | {n: x[n][:, ::-1] for n in ("q_local", "k_local")}
    plain = x | {n: x[n][:, ::-1] for n in ("q", "k")}
    for beta, same, differs in ((200.0, turned, plain), (-200.0, plain, turned)):
        want = run(x, jnp.full(H, beta))
        np.testing.assert_array_equal(run(same, jnp.full(H, beta)), want)
        assert rms(run(differs, jnp.full(H, beta)), want) > 0.1


def test_states_and_rotations_must_fit(rng):
    x = {n: jnp.asarray(y, jnp.float32) for n, y in draw(rng, 2).items()}
    run = functools.partial(infini_attention, x["q"], x["k"], x["v"], jnp.zeros(H))
    with pytest.raises(ValueError, match="both or neither"):
        run(segment_tokens=S, k_local=x["k"])
    _, state = jax.eval_shape(functools.partial(run, segment_tokens=S))
    with pytest.raises(ValueError, match="segments of 7 tokens"):
        run(segment_tokens=S + 1, initial_state=state)

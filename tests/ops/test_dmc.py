"""Dynamic memory compression: against its oracle and against lists that grow and merge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.attention.dmc import dmc
from tests.ops import sequences
from tests.ops.oracles import oracle
from tests.ops.sequences import T, as_arrays
from tests.parity.ops.attention import OPS
from tests.sweep import sweep

B, N, H, K, V = 2, 4, 2, 6, 5


def run(x, **how):
    out, slots, state = dmc(x["q"], x["k"], x["v"], x["merge"], x["weight"], **how)
    return (out, slots), state


def only_output(x, **how):
    (out, _), state = run(x, **how)
    return out, state


@pytest.fixture
def tokens(rng):
    """Draw runs of merges, also from the first token on, where there is nothing to merge into."""
    q, k, v = (rng.normal(size=(B, T, n, d)) for n, d in ((N, K), (H, K), (H, V)))
    merge = rng.random((B, T, H)) < 0.6
    return {"q": q, "k": k, "v": v, "merge": merge, "weight": 0.1 + rng.random((B, T, H))}


def by_hand(x):
    out, slots = np.zeros((*x["q"].shape[:3], V)), np.zeros(x["merge"].shape, np.int32)
    for b, h in np.ndindex(out.shape[0], H):
        keys, values, z = [], [], 0.0
        for t in range(out.shape[1]):
            k, v, w = x["k"][b, t, h], x["v"][b, t, h], x["weight"][b, t, h]
            if x["merge"][b, t, h] and keys:
                keys[-1], values[-1] = (z * keys[-1] + w * k) / (z + w), (z * values[-1] + w * v) / (z + w)
                z += w
            else:
                keys.append(k), values.append(v)
                z = w
            for n in range(2 * h, 2 * h + 2):
                s = K**-0.5 * np.array(keys) @ x["q"][b, t, n]
                p = np.exp(s - s.max())
                out[b, t, n] = p / p.sum() @ np.array(values)
            slots[b, t, h] = len(keys)
    return out, slots


@pytest.mark.rotating
def test_bfloat16_inputs_give_the_oracle():
    sequences.bfloat16_gives_the_oracle(OPS["dmc"], *oracle("dmc"))


@pytest.mark.rotating
def test_float64_is_the_equation_from_any_state_in_segments_and_with_masks(tokens):
    sequences.the_equation_in_float64(only_output, tokens, lambda x: by_hand(x)[0])


@pytest.mark.parametrize("size", sweep([1, 14], 1))
def test_pieces_and_steps_are_the_whole(tokens, size):
    sequences.pieces_are_the_whole(run, tokens, by_hand, size)


@pytest.mark.rotating
def test_gradients_agree(tokens):
    sequences.gradients_agree(run, tokens)


@pytest.mark.rotating
def test_a_head_without_room_is_nan_and_harms_no_other(tokens):
    tokens["merge"][0, :, 0] = True  # one slot
    tokens["merge"][0, :, 1] = False  # one per token
    (got, slots), _ = jax.jit(lambda x: run(x, capacity=9))(as_arrays(tokens, jnp.float32))
    want, count = by_hand(tokens)
    np.testing.assert_array_equal(slots, count)
    assert count[0, -1].tolist() == [1, T]
    np.testing.assert_allclose(got[0, :, :2], want[0, :, :2], atol=1e-6)
    np.testing.assert_allclose(got[0, :9, 2:], want[0, :9, 2:], atol=1e-6)
    assert np.isnan(got[0, 9:, 2:]).all()


@pytest.mark.rotating
def test_padding_alone_changes_no_bit_of_the_state(tokens):
    x = as_arrays(sequences.piece(tokens, 0, 8), jnp.float32)
    _, state = jax.jit(lambda x: run(x, capacity=8))(x)
    padding = jax.jit(lambda x, state: run(x, initial_state=state, capacity=8, mask=jnp.zeros((B, 8), bool)))
    for before in (state, sequences.empty(run, x, 8)):
        _, after = padding(x, before)
        jax.tree.map(np.testing.assert_array_equal, after, before)

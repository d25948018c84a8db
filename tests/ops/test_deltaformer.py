"""DeltaFormer: against its oracle and against its equations, one token after another."""

import numpy as np
import pytest

from kvjax.ops.attention.deltaformer import deltaformer
from tests.ops import sequences
from tests.ops.oracles import oracle
from tests.ops.sequences import T
from tests.parity.ops.attention import OPS
from tests.sweep import sweep

B, H, K, V = 2, 2, 6, 5


def run(x, **how):
    return deltaformer(x["q"], x["k"], x["v"], x["beta"], **how)


@pytest.fixture
def tokens(rng):
    q, k, v = (rng.normal(size=(B, T, H, d)) for d in (K, K, V))
    return {"q": q, "k": k, "v": v, "beta": rng.random((B, T, H))}


def softmax(s):
    p = np.exp(s - s.max())
    return p / p.sum()


def by_hand(x):
    out, u = np.zeros(x["v"].shape), np.array(x["v"])
    for b, t, h in np.ndindex(*out.shape[:3]):
        s = K**-0.5 * x["k"][b, : t + 1, h] @ x["q"][b, t, h]
        if t > 0:
            u[b, t, h] -= x["beta"][b, t, h] * softmax(s[:-1]) @ u[b, :t, h]
        out[b, t, h] = softmax(s) @ u[b, : t + 1, h]
    return out


@pytest.mark.rotating
def test_bfloat16_inputs_give_the_oracle():
    sequences.bfloat16_gives_the_oracle(OPS["deltaformer"], *oracle("deltaformer"))


@pytest.mark.rotating
def test_float64_is_the_equation_from_any_state_in_segments_and_with_masks(tokens):
    sequences.the_equation_in_float64(run, tokens, by_hand)


@pytest.mark.parametrize("size", sweep([1, 14], 1))
def test_pieces_and_steps_are_the_whole(tokens, size):
    sequences.pieces_are_the_whole(run, tokens, by_hand, size)


@pytest.mark.rotating
def test_no_room_is_nan(tokens):
    sequences.no_room_is_nan(run, tokens, by_hand)


@pytest.mark.rotating
def test_gradients_agree_also_where_logits_are_large(tokens):
    sequences.gradients_agree(run, tokens | {"q": 30 * tokens["q"]})

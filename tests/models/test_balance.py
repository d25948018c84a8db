"""How unequally the experts of a layer are used, against the equation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models.feed_forward import MoE


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_balance_is_the_product_of_shares_used_and_shares_scored(scores):
    moe, rng = MoE(experts=4, top=2, width=8, scores=scores), np.random.default_rng(0)
    p = {"router": jnp.asarray(rng.standard_normal((6, 4)), jnp.float32), "router_bias": jnp.zeros(4)}
    x = rng.standard_normal((3, 5, 6)).astype(np.float32)
    logits = x.reshape(-1, 6).astype(np.float64) @ np.asarray(p["router"], np.float64)
    score = np.exp(logits) if scores == "softmax" else 1 / (1 + np.exp(-logits))
    share = (score / score.sum(-1, keepdims=True)).mean(0)
    used = np.bincount(np.argsort(-score, -1)[:, :2].ravel(), minlength=4) / len(score)
    want = 4 / 2 * (used * share).sum()
    assert float(moe.balance(p, jnp.asarray(x))) == pytest.approx(want, rel=1e-5)


@pytest.mark.rotating
def test_equal_use_costs_one_and_the_gradient_evens_it_out():
    moe, rng = MoE(experts=4, top=1, width=8), np.random.default_rng(1)
    x = jnp.asarray(np.abs(rng.standard_normal((1, 64, 4))), jnp.float32)
    even = {"router": jnp.eye(4)}
    assert float(moe.balance(even, jnp.tile(jnp.eye(4)[None], (1, 16, 1)))) == pytest.approx(1.0)
    # One expert is liked by nearly all tokens at first.
    router = jnp.asarray(rng.standard_normal((4, 4)), jnp.float32).at[:, 0].add(2.0)
    balance = jax.jit(jax.value_and_grad(lambda r: moe.balance({"router": r}, x)))
    before, _ = balance(router)
    for _ in range(100):
        router = router - 0.3 * balance(router)[1]
    assert float(before) > 2 and float(balance(router)[0]) < 1.2

"""Prompts through the kernels, against the same in strips of plain jnp and its gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.attention.prompt_attention import causal_attention
from kvjax.ops.attention.strips import causal_in_strips
from kvjax.ops.attention.union import Keys, Reduction
from tests.kernels.close import check
from tests.sweep import sweep

B, N, K, T, H = 2, 4, 2, 40, 16
HOW = dict(scale=0.3, softcap=5.0)


def draw(seed, *, bias=False, heads=K):
    rng = np.random.default_rng(seed)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    lengths = np.array([[T], [T - 9]])
    pos = jnp.asarray(np.where(np.arange(T) < lengths, 30 + np.arange(T), -1), jnp.int32)
    old = jnp.asarray(np.where(rng.random((B, heads, 24)) < 0.3, -1, rng.permutation(24)), jnp.int32)
    past = Keys(array(B, heads, 24, H), array(B, heads, 24, H), old, array(B, heads, 24) if bias else None)
    sink = Keys(array(B, N, 1, H), array(B, N, 1, H), None, array(B, N, 1))
    return array(B, N, T, H), Keys(array(B, K, T, H), array(B, K, T, H), pos[:, None]), past, sink, pos


@pytest.mark.rotating
@pytest.mark.parametrize(
    "mass, window, heads", sweep([(None, None, K), ("sum", 12, K), ("max", None, N)], ("sum", 12, K))
)
def test_sets_through_kernels_are_sets_in_strips(mass, window, heads):
    q, new, past, sink, pos = draw(0, heads=heads)
    # What has a threshold or fades takes another pass over the keys for each of them.
    several = (Reduction("count", 0.1), Reduction("count", 0.3), Reduction("sum", fade=0.9))
    wanted = () if mass is None else (Reduction(mass), *several)
    options = dict(mass=wanted, window=window, **HOW)
    call = partial(causal_attention, implementation="tpu interpret", **options)
    found = jax.jit(call)(q, new, (sink, past), pos)
    want = jax.jit(partial(causal_in_strips, **options))(q, new, (sink, past), pos)
    real = (pos >= 0)[:, None, :, None]
    assert len(found[2]) == len(want[2]) == (0 if mass is None else 3)
    seen = lambda out, lse, masses: (jnp.where(real, out, 0.0), jnp.where(real[..., 0], lse, 0.0), masses)  # noqa: E731
    check(*(jax.tree.leaves(seen(*each)) for each in (found, want)), 2e-6)


@pytest.mark.rotating
def test_gradients_through_several_sets_are_those_of_strips():
    q, new, past, _, pos = draw(1)
    real = (pos >= 0)[:, None, :, None]

    def loss(q, new, past, implementation):
        out, *_ = causal_attention(q, new, (past,), pos, implementation=implementation, **HOW)
        return (jnp.where(real, out, 0.0) ** 2).sum()

    def gradients(implementation):
        def of(q, k, v, old):
            return loss(q, new._replace(k=k, v=v), past._replace(k=old), implementation)

        return jax.jit(jax.grad(of, argnums=(0, 1, 2, 3)))(q, new.k, new.v, past.k)

    check(gradients("tpu interpret"), gradients("reference"), 2e-6)


def test_what_the_kernels_cannot_do_is_refused_when_forced_and_else_done_in_strips():
    q, new, past, _, pos = draw(2, bias=True)
    with pytest.raises(NotImplementedError, match="slots have biases"):
        causal_attention(q, new, (past,), pos, implementation="tpu interpret", **HOW)
    with pytest.raises(NotImplementedError, match="the softmax is clipped"):
        causal_attention(q, new, (), pos, implementation="tpu interpret", clip=(-0.1, 1.1), **HOW)
    with pytest.raises(NotImplementedError, match="this runs on cpu"):
        causal_attention(q, new, (), pos, implementation="tpu", **HOW)
    out, *_ = causal_attention(q, new, (past,), pos, **HOW)
    assert np.isfinite(out).all()

"""Local linear attention and Parallax: against stored float64 results and a regression in numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.attention.local_linear import local_linear_attention, parallax
from tests.ops.oracles import oracle, rms
from tests.parity.ops.memory import OPS
from tests.sweep import sweep

B, T, H, N, K, V = 2, 21, 4, 2, 5, 3
RIDGE = 0.3
NAMES = ("local_linear_attn", "parallax")
SOLVERS = {"exact": {}, "conjugate gradients": {"iterations": 2 * K}}
solvers = pytest.mark.parametrize("how", sweep(SOLVERS.values(), SOLVERS["exact"]), ids=SOLVERS)

lla = jax.jit(
    partial(local_linear_attention, ridge=RIDGE), static_argnames=("iterations", "strip", "window", "scale")
)
plx = jax.jit(parallax, static_argnames=("strip", "window", "scale"))


def draw(rng, t=T, s=T, dtype=np.float32):
    """q, r, k, v."""
    shapes = (B, t, H, K), (B, t, H, K), (B, s, N, K), (B, s, N, V)
    return [jnp.asarray(rng.normal(size=x), dtype) for x in shapes]


def causal(t=T):
    return np.broadcast_to(np.tril(np.ones((t, t), bool)), (B, N, t, t))


def by_hand(q, r, k, v, seen, scale=K**-0.5, ridge=RIDGE):
    """Both in float64, query by query: least squares with an intercept, and the covariance as defined."""
    q, r, k, v = (np.asarray(x, np.float64) for x in (q, r, k, v))
    regression, probed = np.zeros((*q.shape[:3], v.shape[-1])), np.zeros((*q.shape[:3], v.shape[-1]))
    for b, t, h in np.ndindex(*q.shape[:3]):
        n = h // (q.shape[2] // k.shape[2])
        slots = np.flatnonzero(seen[b, n, t])
        if len(slots) == 0:
            continue
        keys, values = k[b, slots, n], v[b, slots, n]
        p = np.exp(scale * keys @ q[b, t, h])
        p /= p.sum()
        # Rows of the ridge keep the slopes small and leave the intercept alone.
        x = np.concatenate([np.ones((len(slots), 1)), keys - q[b, t, h]], 1) * np.sqrt(p)[:, None]
        x = np.concatenate([x, np.sqrt(ridge) * np.eye(K, K + 1, 1)])
        y = np.concatenate([values * np.sqrt(p)[:, None], np.zeros((K, v.shape[-1]))])
        regression[b, t, h] = np.linalg.lstsq(x, y, rcond=None)[0][0]
        mean = p @ values
        cov = np.einsum("s,sv,sk->vk", p, values - mean, keys - p @ keys)
        probed[b, t, h] = mean - cov @ r[b, t, h]
    return regression, probed


@pytest.mark.rotating
def test_conjugate_gradients_reach_the_oracle():
    inputs, want = oracle("local_linear_attn")
    got = jax.jit(lambda x: OPS["local_linear_attn"](x, iterations=12))(jax.tree.map(jnp.asarray, inputs))
    assert rms(got["o"], want["o"]) < 1e-6


@pytest.mark.rotating
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_inputs_are_computed_in_float32(name):
    inputs, want = oracle(name)
    got = jax.jit(OPS[name])({n: jnp.asarray(x, jnp.bfloat16) for n, x in inputs.items()})
    assert got["o"].dtype == np.float32 and rms(got["o"], want["o"]) < 1e-2


@pytest.mark.rotating
@pytest.mark.parametrize("strip", sweep([4, 128], 4))
def test_float64_results_are_exact_with_grouped_heads(rng, strip):
    with jax.enable_x64(True):
        q, r, k, v = draw(rng, dtype=np.float64)
        want = by_hand(q, r, k, v, causal())
        for how in SOLVERS.values():
            assert rms(lla(q, k, v, strip=strip, **how), want[0]) < 1e-10
        assert rms(plx(q, r, k, v, strip=strip), want[1]) < 1e-10


def test_the_forms_of_the_paper_and_of_the_module_are_one(rng):
    with jax.enable_x64(True):
        q, _, k, v = (np.asarray(x)[0, :, 0] for x in draw(rng, dtype=np.float64))
        p = np.exp(k @ q[-1] * K**-0.5)
        p /= p.sum()
        z = k - q[-1]
        mu = p @ z
        rho = np.linalg.solve((p[:, None] * z).T @ z + RIDGE * np.eye(K), mu)
        want = (p * (1 - z @ rho)) @ v / (1 - mu @ rho)
        got = lla(*(jnp.asarray(x)[None, :, None] for x in (q, k, v)))
        assert rms(got[0, -1, 0], want) < 1e-10


def test_queries_see_slots_of_a_cache_by_position(rng):
    q, r, k, v = draw(rng, t=3, s=13)
    k_pos = jnp.asarray(rng.permuted(np.tile(np.arange(-3, 10), (B, N, 1)), axis=-1), jnp.int32).clip(-1)
    q_pos = jnp.asarray([[4, 7, 9], [0, 3, -1]], jnp.int32)
    where = {"q_pos": q_pos, "k_pos": k_pos, "window": 4, "scale": 0.7}
    known, query = np.asarray(k_pos)[:, :, None], np.asarray(q_pos)[:, None, :, None]
    seen = (known >= 0) & (known <= query) & (known > query - 4)
    want = by_hand(q, r, k, v, seen, scale=0.7)
    assert not want[0][1, 2].any()  # position -1 sees nothing
    for how in SOLVERS.values():
        assert rms(lla(q, k, v, **where, **how), want[0]) < 1e-6
    assert rms(plx(q, r, k, v, **where), want[1]) < 1e-6


@pytest.mark.parametrize("cut", sweep([1, 8]))
def test_a_prompt_may_be_cut_anywhere(rng, cut):
    q, r, k, v = draw(rng)
    for op, queries in ((lla, (q,)), (plx, (q, r))):
        first = op(*(x[:, :cut] for x in queries), k[:, :cut], v[:, :cut])
        second = op(*(x[:, cut:] for x in queries), k, v)
        np.testing.assert_allclose(jnp.concatenate([first, second], 1), op(*queries, k, v), atol=1e-5)


def test_packed_segments_are_each_alone(rng):
    q, r, k, v = draw(rng)
    ends = [[6, 7, T], [T - 2, T - 1, T]]
    segments = jnp.asarray([np.searchsorted(e, np.arange(T), side="right") for e in ends], jnp.int32)
    number = np.asarray(segments)
    seen = causal() & (number[:, :, None] == number[:, None])[:, None]
    want = by_hand(q, r, k, v, seen)
    assert rms(lla(q, k, v, segments=segments, strip=8), want[0]) < 1e-6
    assert rms(plx(q, r, k, v, segments=segments), want[1]) < 1e-6
    with pytest.raises(ValueError, match="segments need queries and keys of the same tokens, got 20"):
        local_linear_attention(q[:, 1:], k, v, ridge=1.0, segments=segments[:, 1:])


@solvers
def test_masked_keys_change_nothing(rng, how):
    q, r, k, v = draw(rng)
    real = jnp.asarray(rng.random((B, T)) < 0.7)
    want = by_hand(q, r, k, v, causal() & np.asarray(real)[:, None, None])
    noisy = (jnp.where(real[:, :, None, None], x, 9.0) for x in (k, v))
    assert rms(lla(q, *noisy, mask=real, **how), want[0]) < 1e-6


@pytest.mark.rotating
def test_a_large_ridge_is_softmax_attention(rng):
    q, r, k, v = draw(rng)
    want = by_hand(q, 0 * r, k, v, causal())[1]
    assert rms(local_linear_attention(q, k, v, ridge=1e9), want) < 1e-6
    with pytest.raises(ValueError, match="ridge must be > 0"):
        local_linear_attention(q, k, v, ridge=0.0)


@pytest.mark.rotating
def test_gradients_are_those_of_the_paper_s_form(rng):
    """The reference is the paper's, in float64 and without strips; logits are large, a query sees nothing."""
    q, _, k, v = draw(rng)
    q, ridge = 4 * q, jnp.asarray(RIDGE, jnp.float32)
    pos = jnp.arange(T, dtype=jnp.int32)[None] * jnp.ones((B, 1), jnp.int32)
    q_pos = pos.at[0, 3].set(-1)

    def reference(q, k, v, ridge):
        k, v = (jnp.repeat(x, H // N, axis=2) for x in (k, v))
        seen = (pos[:, None] <= q_pos[:, :, None])[:, None]
        p = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k) * K**-0.5, where=seen)
        z = k[:, None] - q[:, :, None]
        mu = jnp.einsum("bhts,btshk->bthk", p, z)
        cov = jnp.einsum("bhts,btshk,btshj->bthkj", p, z, z) + ridge * jnp.eye(K)[None, None, None]
        rho = jnp.linalg.solve(cov, mu[..., None])[..., 0]
        o = jnp.einsum("bhts,bshv->bthv", p * (1 - jnp.einsum("btshk,bthk->bhts", z, rho)), v)
        return o / (1 - (mu * rho).sum(-1, keepdims=True))

    def gradients(op, *arrays):
        return jax.jit(jax.grad(lambda *a: (op(*a) ** 2).sum(), argnums=(0, 1, 2, 3)))(*arrays)

    with jax.enable_x64(True):
        want = gradients(reference, *(x.astype(jnp.float64) for x in (q, k, v, ridge)))
    for how in SOLVERS.values():
        op = partial(local_linear_attention, q_pos=q_pos, strip=8, **how)
        for got, x in zip(
            gradients(lambda *a, op=op: op(*a[:3], ridge=a[3]), q, k, v, ridge), want, strict=True
        ):
            assert rms(got, x) < 1e-5

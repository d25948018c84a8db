"""Attention over unions of key sets, against float64 numpy written from the equation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.attention import strips
from kvjax.ops.attention import union as attention
from kvjax.ops.attention.strips import causal_in_strips
from kvjax.ops.attention.union import Keys, Reduction
from tests.compilation import optimised
from tests.sweep import sweep

B, N, K, T, H, V = 2, 4, 2, 3, 8, 6
SCALE = 0.37


@jax.jit
def attend(q, sets, q_pos):
    """One compiled program for most tests: they all use the sets of `two_sets`."""
    out, lse, masses = attention.attend(q, sets, q_pos, scale=SCALE, mass=(Reduction("sum"),))
    return out, lse, tuple(summed for (summed,) in masses)


def make_keys(rng, slots, *, heads=K, lowest=0, highest=40, empty=0.25, bias=False, width=V):
    """Draw a random set: unordered positions, some slots empty."""
    pos = rng.integers(lowest, highest, (B, heads, slots))
    pos = np.where(rng.random(pos.shape) < empty, -1, pos).astype(np.int32)
    k, v = rng.normal(size=(B, heads, slots, H)), rng.normal(size=(B, heads, slots, width))
    extra = jnp.asarray(rng.normal(size=pos.shape), jnp.float32) if bias else None
    return Keys(jnp.asarray(k, jnp.float32), jnp.asarray(v, jnp.float32), jnp.asarray(pos), extra)


def two_sets(rng, **options):
    return make_keys(rng, 5, **options), make_keys(rng, 12, bias=True, **options)


def make_queries(rng):
    q = jnp.asarray(rng.normal(size=(B, N, T, H)), jnp.float32)
    return q, jnp.asarray(rng.integers(20, 40, (B, T)), jnp.int32)


def by_hand(q, sets, q_pos, *, window=None, softcap=None):
    """softmax over every visible key of every set, query by query: (out, lse, p [B, N, T, S] per set)."""
    q, q_pos = np.asarray(q, np.float64), np.asarray(q_pos)
    out = np.zeros((*q.shape[:3], sets[0].v.shape[-1]))
    lse = np.full(q.shape[:3], -np.inf)
    probabilities = [np.zeros((*q.shape[:3], s.k.shape[2])) for s in sets]
    for b, n, t in np.ndindex(*q.shape[:3]):
        weights, values = [], []
        for s in sets:
            head = n // (q.shape[1] // s.k.shape[1])
            k, v = (np.asarray(x[b, head], np.float64) for x in (s.k, s.v))
            pos = np.asarray(s.pos)[b, min(head, s.pos.shape[1] - 1)]
            logit = k @ q[b, n, t] * SCALE
            if softcap is not None:
                logit = softcap * np.tanh(logit / softcap)
            if s.bias is not None:
                logit = logit + np.asarray(s.bias, np.float64)[b, head]
            seen = (pos >= 0) & (pos <= q_pos[b, t])
            if window is not None:
                seen &= q_pos[b, t] - pos < window
            weights.append(np.where(seen, np.exp(np.where(seen, logit, 0)), 0))
            values.append(np.where(seen[:, None], v, 0))
        total = sum(w.sum() for w in weights)
        if total == 0:
            continue
        lse[b, n, t] = np.log(total)
        out[b, n, t] = sum(w @ v for w, v in zip(weights, values, strict=True)) / total
        for p, w in zip(probabilities, weights, strict=True):
            p[b, n, t] = w / total
    return out, lse, probabilities


def grouped(p, heads, reduce):
    """[B, N, T, S] -> [B, K, S]: over the queries and the group of each KV head."""
    b, n, t, s = p.shape
    return reduce(reduce(p.reshape(b, heads, n // heads, t, s), 3), 2)


def close(got, want, atol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=1e-5), got, want)


def test_attend_is_the_softmax_over_the_visible_keys_of_all_sets(rng):
    (q, q_pos), sets = make_queries(rng), two_sets(rng)
    out, lse, masses = attend(q, sets, q_pos)
    want, want_lse, p = by_hand(q, sets, q_pos)
    close((out, lse, masses), (want, want_lse, tuple(grouped(x, K, np.sum) for x in p)))


@pytest.mark.parametrize("window, softcap", sweep([(7, None), (None, 1.5), (7, 1.5)], (7, 1.5)))
def test_windows_hide_what_is_too_old_and_softcaps_bound_logits_before_the_bias(rng, window, softcap):
    (q, q_pos), sets = make_queries(rng), two_sets(rng)
    how = dict(scale=SCALE, window=window, softcap=softcap, mass=(Reduction("max"),))
    out, lse, (_, (mass,)) = jax.jit(partial(attention.attend, **how))(q, sets, q_pos)
    want, want_lse, p = by_hand(q, sets, q_pos, window=window, softcap=softcap)
    close((out, lse, mass), (want, want_lse, grouped(p[1], K, np.max)))


@pytest.mark.rotating
def test_a_bias_may_differ_between_the_query_heads_of_a_group(rng):
    (q, q_pos), (keys, _) = make_queries(rng), two_sets(rng)
    bias = np.where(rng.random((B, N, 5)) < 0.3, -np.inf, rng.normal(size=(B, N, 5))).astype(np.float32)
    out, lse, _ = attention.attend(q, keys._replace(bias=jnp.asarray(bias)), q_pos, scale=SCALE)
    alone = jax.tree.map(lambda x: np.repeat(x, N // K, 1), keys)._replace(bias=bias)
    close((out, lse), by_hand(q, (alone,), q_pos)[:2])


def test_a_union_of_sets_equals_one_concatenated_set(rng):
    (q, q_pos), (a, b) = make_queries(rng), two_sets(rng)
    a = a._replace(bias=jnp.zeros(a.pos.shape))
    whole = jax.tree.map(lambda *xs: jnp.concatenate(xs, 2), a, b)
    out, lse, masses = attend(q, (a, b), q_pos)
    want, want_lse, (want_mass,) = attend(q, (whole,), q_pos)
    close((out, lse, jnp.concatenate(masses, 2)), (want, want_lse, want_mass), 1e-6)


def test_sizes_multiply_keys_and_values(rng):
    (q, q_pos), (a, b) = make_queries(rng), two_sets(rng)
    sizes = tuple(jnp.asarray(rng.uniform(0.1, 3, b.pos.shape), q.dtype) for _ in "kv")
    whole = b._replace(k=b.k * sizes[0][..., None], v=b.v * sizes[1][..., None])
    got, want = (attend(q, (a, one), q_pos) for one in (b._replace(sizes=sizes), whole))
    close(got[:2], want[:2], 1e-6)


def test_sets_may_differ_in_their_number_of_heads(rng):
    q, q_pos = make_queries(rng)
    sets = (make_keys(rng, 5, heads=K), make_keys(rng, 12, heads=N))
    out, lse, masses = attend(q, sets, q_pos)
    want, want_lse, p = by_hand(q, sets, q_pos)
    close((out, lse, masses), (want, want_lse, (grouped(p[0], K, np.sum), grouped(p[1], N, np.sum))))


@pytest.mark.rotating
def test_merging_parts_equals_attending_to_their_union(rng):
    (q, q_pos), (a, b) = make_queries(rng), two_sets(rng)
    # The last part lies in the future of every query: it must drop out.
    sets = (a, b, make_keys(rng, 5, lowest=90, highest=99))
    parts = [attend(q, (s,), q_pos)[:2] for s in sets]
    assert (parts[-1][1] == -jnp.inf).all()
    close(attention.merge(parts), by_hand(q, sets, q_pos)[:2])


def test_merging_has_finite_gradients_where_no_part_sees_anything(rng):
    (q, q_pos), keys = make_queries(rng), make_keys(rng, 5)
    blind = q_pos.at[:, 0].set(-1)

    @jax.jit
    @jax.grad
    def gradient(q):
        out, lse = attention.merge([attention.attend(q, keys, blind, scale=SCALE)[:2]] * 2)
        return out.sum() + jnp.where(jnp.isfinite(lse), lse, 0.0).sum()

    assert np.isfinite(gradient(q)).all()


def test_masses_of_all_sets_sum_to_the_number_of_queries_that_see_something(rng):
    (q, q_pos), sets = make_queries(rng), two_sets(rng)
    _, _, masses = attend(q, sets, q_pos.at[0, 1].set(-1))
    total = sum(m.sum(-1) for m in masses)
    seeing = np.asarray([T - 1, T])[:, None] * (N // K)
    close(total, np.broadcast_to(seeing, total.shape))


@pytest.mark.rotating
def test_the_order_of_slots_does_not_matter(rng):
    (q, q_pos), sets = make_queries(rng), two_sets(rng)
    orders = [rng.permutation(s.pos.shape[-1]) for s in sets]
    mixed = tuple(jax.tree.map(lambda x, o=o: x[:, :, o], s) for s, o in zip(sets, orders, strict=True))
    out, lse, masses = attend(q, mixed, q_pos)
    want, want_lse, want_masses = attend(q, sets, q_pos)
    close((out, lse), (want, want_lse), 1e-6)
    close(masses, tuple(m[:, :, o] for m, o in zip(want_masses, orders, strict=True)), 1e-6)


@pytest.mark.rotating
def test_queries_that_see_nothing_give_zero_and_leave_gradients_finite(rng):
    (q, _), keys = make_queries(rng), make_keys(rng, 5, lowest=10)
    # A padding query, one before every key, and one that sees them all.
    q_pos = jnp.asarray([[-1, 5, 40]] * B, jnp.int32)

    def loss(q, k, v):
        out, lse, _ = attention.attend(q, keys._replace(k=k, v=v), q_pos, scale=SCALE)
        return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0.0).sum(), (out, lse)

    grads, (out, lse) = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, keys.k, keys.v)
    assert (out[:, :, :2] == 0).all() and (lse[:, :, :2] == -jnp.inf).all()
    assert np.isfinite(lse[:, :, 2]).all()
    assert all(np.isfinite(g).all() for g in grads)
    assert (grads[0][:, :, :2] == 0).all() and (grads[0][:, :, 2] != 0).any()


def poisoned(keys):
    """Every slot that holds no token: NaN and infinity in its key, a huge number in its value.

    Values there must be finite: the plain reference multiplies them by zero.
    """
    empty = (keys.pos < 0)[..., None]
    bad = jnp.where(jnp.arange(keys.k.shape[2]) % 2 == 0, jnp.nan, jnp.inf).reshape(1, 1, -1, 1)
    return keys._replace(k=jnp.where(empty, bad, keys.k), v=jnp.where(empty, 1e30, keys.v))


@pytest.mark.rotating
def test_nothing_in_an_empty_slot_reaches_an_output(rng):
    (q, q_pos), sets = make_queries(rng), two_sets(rng)
    assert all((s.pos < 0).any() for s in sets)
    close(attend(q, tuple(map(poisoned, sets)), q_pos), attend(q, sets, q_pos), 1e-6)


def test_a_nan_that_is_visible_is_not_hidden(rng):
    (q, q_pos), (a, b) = make_queries(rng), two_sets(rng, highest=20, empty=0.0)
    out, _, _ = attend(q, (a._replace(v=a.v.at[0, 0, 3].set(jnp.nan)), b), q_pos)
    assert np.isnan(out[0, : N // K]).all() and np.isfinite(out[0, N // K :]).all()
    assert np.isfinite(out[1]).all()


@pytest.mark.rotating
@pytest.mark.parametrize(
    "mass, window, tokens, strip, prefixes",
    # One strip; strips of four with a remainder; two prefixes of two strips each, with and without a window.
    sweep(
        [("sum", None, 11, 256, 8), ("max", 5, 11, 4, 8), ("sum", 5, 16, 4, 2), ("max", None, 16, 4, 2)],
        ("max", 5, 11, 4, 8),
        ("max", None, 16, 4, 2),
    ),
)
def test_causal_attention_in_strips_equals_attention_to_past_and_new(
    rng, monkeypatch, mass, window, tokens, strip, prefixes
):
    monkeypatch.setattr(strips, "STRIP", strip)
    monkeypatch.setattr(strips, "PREFIXES", prefixes)
    start, steps = 30, np.arange(tokens)[None]
    pos = np.where(steps < np.array([[tokens], [6]]), start + steps, -1).astype(np.int32)
    q = jnp.asarray(rng.normal(size=(B, N, tokens, H)), jnp.float32)
    new = make_keys(rng, tokens, width=H)._replace(pos=jnp.asarray(pos[:, None]))
    past = two_sets(rng, highest=start, width=H)

    @jax.jit
    def run(q, new, past, pos):
        return causal_in_strips(q, new, past, pos, scale=SCALE, window=window, softcap=2.0, mass=wanted)

    # Five ways in one pass over the same map.
    wanted = (Reduction(mass), Reduction("squares"), Reduction("count", 0.1), Reduction("count", 0.3))
    wanted = (*wanted, Reduction("sum", fade=0.9))
    newer = np.maximum(np.array([tokens, 6])[:, None] - 1 - steps, 0)[:, None, :, None]
    out, lse, masses = run(q, new, past, jnp.asarray(pos))
    want, want_lse, p = by_hand(q, [*past, new], pos, window=window, softcap=2.0)
    by_set = [
        (
            grouped(x, K, getattr(np, mass)),
            *(grouped(y, K, np.sum) for y in (x**2, x > 0.1, x > 0.3, x * 0.9**newer)),
        )
        for x in p
    ]
    close((out, lse, masses), (want, want_lse, tuple(by_set)))


def test_causal_attention_records_no_mass_unless_asked(rng):
    q, _ = make_queries(rng)
    pos = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    new = make_keys(rng, T)._replace(pos=pos[:, None])
    assert jax.eval_shape(partial(causal_in_strips, scale=SCALE), q, new, (), pos)[2] == ()


def test_bfloat16_is_accumulated_in_float32(rng):
    (q, q_pos), keys = make_queries(rng), make_keys(rng, 300)
    low = Keys(keys.k.astype(jnp.bfloat16), keys.v.astype(jnp.bfloat16), keys.pos)
    out, lse, _ = attend(q.astype(jnp.bfloat16), (low,), q_pos)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    rounded = Keys(low.k.astype(jnp.float32), low.v.astype(jnp.float32), keys.pos)
    want, want_lse, _ = by_hand(q.astype(jnp.bfloat16).astype(jnp.float32), [rounded], q_pos)
    np.testing.assert_allclose(lse, want_lse, atol=1e-4)
    np.testing.assert_allclose(out.astype(jnp.float32), want, atol=2e-2)


def test_one_head_at_a_time_is_all_heads_at_once(rng, monkeypatch):
    t = 40
    q, k, v = (jnp.asarray(rng.normal(size=(B, h, t, H)), jnp.float32) for h in (N, K, K))
    pos = jnp.asarray(50 + np.arange(t) + np.zeros((B, 1)), jnp.int32)
    past = (make_keys(rng, 12, heads=K, bias=True, width=H), make_keys(rng, 5, heads=N, width=H))

    def run():
        new = Keys(k, v, pos[:, None])
        # Another function each time, or the second call would be the first one's program.
        return jax.jit(partial(causal_in_strips, scale=SCALE, window=30, mass=(Reduction("sum"),)))(
            q, new, past, pos
        )

    want = run()
    monkeypatch.setattr(strips, "CACHED_BYTES", 0)
    close(run(), want)


@pytest.mark.rotating
def test_attending_to_all_asks_every_live_key_in_strips_of_queries(rng):
    t = strips.STRIP + 3
    sets = two_sets(rng, highest=400)
    q, q_pos = jnp.asarray(rng.normal(size=(B, N, t, H)), jnp.float32), np.zeros((B, t), np.int32)
    q_pos[1, 200:] = -1
    call = jax.jit(lambda q, sets, pos: strips.attend_to_all(q, sets, pos, scale=SCALE))
    out = call(q, sets, jnp.asarray(q_pos))
    # By hand a query sees what is not in its future: ask behind the last key.
    want, _, _ = by_hand(q, sets, np.where(q_pos < 0, -1, 400))
    close(out, want)
    empty = [s._replace(pos=jnp.full_like(s.pos, -1)) for s in sets]
    assert not np.asarray(call(q, empty, jnp.asarray(q_pos))).any()


@pytest.mark.rotating
def test_the_gradient_of_a_long_prompt_keeps_no_map_of_its_attention():
    t = 4096

    def loss(q, k, v):
        pos = jnp.arange(t, dtype=jnp.int32)[None]
        return causal_in_strips(q, Keys(k, v, pos[:, None]), (), pos, scale=SCALE)[0].sum()

    x = jax.ShapeDtypeStruct((1, 1, t, H), jnp.float32)
    lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x)
    with optimised(True):
        memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.3 * 4 * t * t

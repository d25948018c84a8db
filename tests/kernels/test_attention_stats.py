"""Statistics of attention's columns: the plain form against float64 numpy, the TPU kernel against the same.

Everything that must not be read is no number: keys and biases of empty slots, queries that are none and
their lse.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import AttentionSpec, Inputs, Observed, View
from kvjax.keep.observations.observe import Queries
from kvjax.keep.scores.score import WindowAttention
from kvjax.ops.attention.attention_stats import STATISTICS, attention_stats, tpu_attention_stats, visits
from kvjax.ops.attention.union import Keys, Reduction, attend
from kvjax.ops.base.rope import Rope
from tests.ops.oracles import rms
from tests.sweep import sweep

B, K, LAST, SHORTER = 2, 2, 5, 7
FORMS = ("reference", "tpu interpret")
each_form = pytest.mark.parametrize("implementation", sweep(FORMS, "tpu interpret"))


def draw(seed, *, t=40, s=150, group=2, width=16, dtype=np.float32, bias=False, order="causal", heads=K):
    """(q, k, lse, q_pos, k_pos, bias); lse also runs over keys elsewhere, and one list has no live slot.

    order: "causal" (the queries are the last t of s tokens, the second row is `SHORTER`), or "any".
    """
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((B, heads * group, t, width)), rng.standard_normal((B, heads, s, width))
    if order == "causal":
        length = np.array([s, s - SHORTER])[:, None]
        q_pos = np.where(np.arange(s - t, s) < length, np.arange(s - t, s), -1)
        k_pos = np.where(np.arange(s) < length, np.arange(s), -1)[:, None].repeat(heads, 1)
    else:
        q_pos = np.where(rng.random((B, t)) < 0.2, -1, rng.integers(0, s, (B, t)))
        k_pos = np.where(rng.random((B, heads, s)) < 0.3, -1, rng.integers(0, s, (B, heads, s)))
    k_pos[0, -1] = -1
    extra = rng.standard_normal(k_pos.shape) * 0.5 if bias else None
    q, k = (np.asarray(jnp.asarray(x, dtype).astype(jnp.float32), np.float64) for x in (q, k))
    return q, k, rng.random((B, heads * group, t)), q_pos, k_pos, extra


def by_hand(drawn, *, window=None, softcap=None, per_head=False, weights=None):
    """(lse, threshold, statistics), query by query: the softmax runs over what is seen and `elsewhere`.

    The threshold lies in the widest gap between probabilities, so that no rounding crosses it.
    """
    q, k, elsewhere, q_pos, k_pos, bias = drawn
    (b, n, t, width), (heads, s) = q.shape, k.shape[1:3]
    group = n // heads
    lse, p = np.full((b, n, t), -np.inf), np.zeros((b, n, t, s))
    for i, head, at in np.ndindex(b, n, t):
        pos = k_pos[i, head // group]
        z = k[i, head // group] @ q[i, head, at] / np.sqrt(width)
        z = z if softcap is None else softcap * np.tanh(z / softcap)
        z = z if bias is None else z + bias[i, head // group]
        seen = (pos >= 0) & (pos <= q_pos[i, at])
        seen &= True if window is None else pos > q_pos[i, at] - window
        if seen.any():
            lse[i, head, at] = np.log(np.exp(z[seen]).sum() + elsewhere[i, head, at])
            p[i, head, at, seen] = np.exp(z[seen] - lse[i, head, at])
    around = np.sort(p[(p > 0.01) & (p < 0.1)])
    widest = np.diff(around).argmax()
    threshold = float(around[widest : widest + 2].mean())
    rows = p if per_head else p.reshape(b, heads, group * t, s)
    final = np.stack([p[i][:, np.flatnonzero(row >= 0)[-LAST:]].mean(1) for i, row in enumerate(q_pos)])
    found = {
        "sum": rows.sum(2),
        "max": rows.max(2),
        "squares": (rows**2).sum(2),
        "count": (rows > threshold).sum(2).astype(float),
        "last_mean": final if per_head else final.reshape(b, heads, group, s).mean(2),
    }
    if weights is not None:
        found["weighted"] = (rows * np.tile(weights, rows.shape[2] // t)[:, None, :, None]).sum(2)
    return lse, threshold, found


def poisoned(drawn, lse, dtype=np.float32):
    """Make the operands arrays, with no number in all that is nobody's."""
    q, k, _, q_pos, k_pos, bias = drawn
    dead = (q_pos < 0)[:, None]
    q = np.where(dead[..., None], np.nan, q)
    k = np.where((k_pos < 0)[..., None], np.nan, k)
    lse = np.where(dead, np.nan, lse)
    bias = None if bias is None else jnp.asarray(np.where(k_pos < 0, np.nan, bias), jnp.float32)
    q_pos, k_pos = (jnp.asarray(x, jnp.int32) for x in (q_pos, k_pos))
    return jnp.asarray(q, dtype), jnp.asarray(k, dtype), jnp.asarray(lse, jnp.float32), q_pos, k_pos, bias


def check(got, want, bar):
    assert set(got) == set(want)
    for name, x in want.items():
        y = np.asarray(got[name], np.float64)
        assert np.isfinite(y).all() and (y[x == 0] == 0).all(), name
        assert rms(y, x) < bar, (name, rms(y, x))


CASES = {
    "causal, with all there is": dict(bias=True, softcap=0.7, window=170, s=280, t=150, group=3),
    "any order, per head": dict(order="any", s=200, per_head=True, group=3),
    "plain": dict(),
    "bias": dict(bias=True, order="any"),
    "any order": dict(order="any", s=200),
    "window": dict(window=9, s=280, t=150, group=1),
    "soft-cap": dict(softcap=0.7),
    "one head each": dict(group=1),
    "sixteen heads each": dict(group=16, t=20),
    "one query": dict(t=1, order="any", group=3),
    "per head": dict(per_head=True, group=3),
    "narrow 64": dict(width=64, t=12),
    "narrow 80": dict(width=80, t=12),
    "wide 192": dict(width=192, t=12),
    "wide 256": dict(width=256, t=12),
}
# What a test draws and what it computes.
HOW = ("window", "softcap", "per_head")


def split(case):
    options = {n: x for n, x in CASES[case].items() if n in HOW}
    return {n: x for n, x in CASES[case].items() if n not in HOW}, options


def asked(drawn, threshold, **options):
    return (
        dict(scale=drawn[0].shape[-1] ** -0.5, want=STATISTICS[:-1], last=LAST, threshold=threshold) | options
    )


@pytest.mark.rotating
@pytest.mark.parametrize("case", sweep(CASES, list(CASES)[0]))
def test_statistics_are_those_of_the_map(case):
    drawn, options = split(case)
    drawn = draw(0, **drawn)
    lse, threshold, want = by_hand(drawn, **options)
    how = asked(drawn, threshold, **options)
    for implementation in FORMS:
        call = jax.jit(partial(attention_stats, implementation=implementation, **how))
        check(call(*poisoned(drawn, lse)), want, 2e-6)


@pytest.mark.parametrize("per_head, window", sweep(itertools.product([False, True], [None, 30]), (False, 30)))
def test_blocks_that_see_nothing_are_left_out_and_nothing_else(per_head, window):
    """Three blocks of keys and of queries, of which the causal order leaves six."""
    drawn = draw(1, t=300, s=300, group=1, heads=1)
    lse, threshold, want = by_hand(drawn, window=window, per_head=per_head)
    q, k, lse, q_pos, k_pos, _ = poisoned(drawn, lse)
    weight = jnp.zeros((B, 300), bool)
    want.pop("last_mean")
    call = jax.jit(
        lambda *x: tpu_attention_stats(
            *x, None, weight, want=tuple(want), scale=0.25, window=window, softcap=None, threshold=threshold,
            per_head=per_head, block_rows=128, block_keys=128, interpret=True,
        )
    )  # fmt: skip
    check(call(q, k, lse, q_pos, k_pos), want, 2e-6)


@pytest.mark.parametrize("group", sweep(range(1, 17), 5))
def test_groups_of_every_size_fill_their_blocks(group):
    """Blocks smaller than the queries of a group, the last of them not whole."""
    drawn = draw(2, t=40 if group > 3 else 140, s=20, group=group, heads=1, order="any")
    weights = np.random.default_rng(5).random((B, drawn[0].shape[2]))
    lse, threshold, want = by_hand(drawn, weights=weights)
    want = {name: want[name] for name in ("sum", "weighted")}
    q, k, lse, q_pos, k_pos, _ = poisoned(drawn, lse)
    call = jax.jit(
        lambda *x: tpu_attention_stats(
            *x, None, jnp.asarray(weights), want=("sum", "weighted"), scale=0.25, window=None, softcap=None,
            threshold=0.0, per_head=False, block_rows=128, interpret=True,
        )
    )  # fmt: skip
    check(call(q, k, lse, q_pos, k_pos), want, 2e-6)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "implementation, kind",
    sweep(itertools.product(FORMS, [jnp.bfloat16, jnp.float32]), (FORMS[1], jnp.bfloat16)),
)
def test_half_precision_products_are_exact(implementation, kind):
    """Queries of bfloat16 with keys of either kind: only the rounding of the operands is lost."""
    drawn = draw(3, dtype=jnp.bfloat16, width=128)
    lse, threshold, want = by_hand(drawn)
    how = asked(drawn, threshold)
    call = jax.jit(lambda *x: attention_stats(*x, implementation=implementation, **how))
    q, k, *rest = poisoned(drawn, lse)
    check(call(q.astype(jnp.bfloat16), k.astype(kind), *rest), want, 2e-6)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "implementation, mass", sweep(itertools.product(FORMS, ["sum", "max"]), (FORMS[1], "sum"))
)
def test_they_are_what_attention_itself_records(implementation, mass):
    """Two sets of slots under one softmax: each set's masses from its own call and the common lse."""
    q, k, _, q_pos, k_pos, _ = draw(4, order="any")
    q, k = (jnp.asarray(x, jnp.float32) for x in (q, k))
    q_pos, k_pos = jnp.asarray(q_pos, jnp.int32), jnp.asarray(k_pos, jnp.int32)
    sets = [Keys(k[:, :, at], k[:, :, at], k_pos[:, :, at]) for at in (slice(0, 60), slice(60, None))]
    _, lse, masses = jax.jit(lambda: attend(q, sets, q_pos, scale=0.25, mass=(Reduction(mass),)))()
    for one, (recorded,) in zip(sets, masses, strict=True):
        found = attention_stats(
            q, one.k, lse, q_pos, one.pos, want=(mass,), scale=0.25, implementation=implementation
        )
        check(found, {mass: np.asarray(recorded, np.float64)}, 1e-6)


@pytest.mark.rotating
@each_form
def test_they_are_what_snapkv_scores_with(implementation):
    """SnapKV's window of two rows, one shorter than the other, over slots with biases."""
    q, k, _, q_pos, k_pos, bias = draw(9, t=LAST + SHORTER, s=40, bias=True)
    q, k, bias = (jnp.asarray(x, jnp.float32) for x in (q, k, bias))
    q_pos, k_pos = (jnp.asarray(x, jnp.int32) for x in (q_pos, k_pos))
    length, spec = (q_pos >= 0).sum(-1, dtype=jnp.int32), AttentionSpec(0.25, 2.0, Rope())
    window = Queries(LAST)(Inputs(q, q, k, q, q_pos, length))
    word = WindowAttention(LAST, reduce="mean", hide_window=False)
    seen = Observed({key_of(Queries(LAST)): window}, None, length, length, 0, spec)
    how = dict(scale=0.25, softcap=2.0)

    @jax.jit
    def both():
        _, lse, _ = attend(q, Keys(k, k, k_pos, bias), q_pos, **how)
        found = attention_stats(
            q,
            k,
            lse,
            q_pos,
            k_pos,
            bias,
            want=("last_mean",),
            last=LAST,
            implementation=implementation,
            **how,
        )
        return found, word(View(k, k, k_pos, bias, {}), seen)

    found, want = both()
    check(found, {"last_mean": np.asarray(want, np.float64)}, 1e-6)


@each_form
def test_a_query_that_attended_to_nothing_gives_nothing(implementation):
    """Its lse is -inf, whatever the positions say."""
    drawn = draw(11, t=9, s=20)
    lse, _, want = by_hand(drawn)
    q, k, lse, q_pos, k_pos, _ = poisoned(drawn, lse)
    call = jax.jit(
        lambda lse: attention_stats(
            q, k, lse, q_pos, k_pos, want=("sum",), scale=0.25, implementation=implementation
        )["sum"]
    )
    one = call(jnp.where(jnp.arange(9) == 0, lse, -jnp.inf))
    rest = call(jnp.where(jnp.arange(9) == 0, -jnp.inf, lse))
    check({"sum": one + rest}, {"sum": want["sum"]}, 2e-6)
    assert (rest < one + rest).any() and (one < one + rest).any()


@pytest.mark.rotating
@each_form
def test_one_row_of_positions_serves_all_heads(implementation):
    drawn = draw(10, t=20, s=200)
    drawn[4][:] = drawn[4][:, :1]
    lse, threshold, want = by_hand(drawn)
    q, k, lse, q_pos, k_pos, _ = poisoned(drawn, lse)
    how = asked(drawn, threshold)
    call = jax.jit(lambda *x: attention_stats(*x, implementation=implementation, **how))
    check(call(q, k, lse, q_pos, k_pos[:, :1]), want, 2e-6)


@each_form
def test_a_row_without_queries_gives_nothing(implementation):
    drawn = draw(8, t=9, s=20)
    drawn[3][1] = -1
    q, k, lse, q_pos, k_pos, _ = poisoned(drawn, np.zeros(drawn[2].shape))
    how = asked(drawn, 0.5)
    found = jax.jit(partial(attention_stats, implementation=implementation, **how))(q, k, lse, q_pos, k_pos)
    for x in found.values():
        assert (x[1] == 0).all() and np.isfinite(x).all()


def test_the_causal_order_leaves_half_of_the_blocks():
    pos = jnp.arange(32, dtype=jnp.int32).reshape(1, 4, 8)
    first, final = visits(pos, pos, None)
    assert first.tolist() == [[0, 1, 2, 3]] and final.tolist() == [[3, 3, 3, 3]]
    first, final = visits(pos, pos, 5)
    assert first.tolist() == [[0, 1, 2, 3]] and final.tolist() == [[1, 2, 3, 3]]
    first, final = visits(jnp.full((1, 2, 8), -1, jnp.int32), pos, None)
    assert first.tolist() == [[1] * 4] and final.tolist() == [[0] * 4]


@pytest.mark.rotating
def test_only_the_last_queries_are_visited_where_nothing_else_is_wanted():
    """Queries before the last ones are no numbers, and so is their lse."""
    drawn = draw(5, t=40)
    lse, threshold, want = by_hand(drawn)
    q, k, lse, q_pos, k_pos, _ = poisoned(drawn, lse)
    q, lse = (x.at[:, :, : 40 - SHORTER - LAST].set(jnp.nan) for x in (q, lse))
    how = dict(want=("last_mean",), last=LAST, scale=0.25)
    for implementation in FORMS:
        call = jax.jit(partial(attention_stats, implementation=implementation, **how))
        found = call(q, k, lse, q_pos, k_pos)
        check(found, {"last_mean": want["last_mean"]}, 2e-6)


@pytest.mark.rotating
@each_form
def test_no_gradient_flows_through_a_statistic(implementation):
    drawn = draw(6, t=9, s=20)
    lse, _, _ = by_hand(drawn)
    q, *rest = poisoned(drawn, lse)

    def of(q):
        found = attention_stats(q, *rest, want=("sum",), scale=0.25, implementation=implementation)
        return found["sum"].sum() + q.sum()

    np.testing.assert_array_equal(jax.grad(of)(q), np.ones(q.shape))


def test_what_cannot_run_says_why():
    drawn = draw(7, t=9, s=20)
    lse, _, _ = by_hand(drawn)
    q, k, *rest = poisoned(drawn, lse)
    how = dict(want=("sum",), scale=0.25)
    with pytest.raises(NotImplementedError, match="there is no such form"):
        attention_stats(q, k, *rest, implementation="cuda", **how)
    with pytest.raises(NotImplementedError, match="keys of float16, expected float32 or bfloat16"):
        attention_stats(q, k.astype(jnp.float16), *rest, implementation="tpu", **how)
    many = jax.eval_shape(lambda: (jnp.zeros((2, 2, 2**25, 16)), jnp.zeros((2, 1, 2**25), jnp.int32)))
    with pytest.raises(NotImplementedError, match="131072 blocks of keys, .* split the batch"):
        jax.eval_shape(
            lambda k, k_pos: attention_stats(q, k, *rest[:2], k_pos, implementation="tpu", **how), *many
        )
    with pytest.raises(ValueError, match="KV heads that divide"):
        attention_stats(q[:, :3], k, rest[0][:, :3], *rest[1:], **how)
    for want in ((), ("sum", "sum"), ("mean",)):
        with pytest.raises(ValueError, match="want must be some of"):
            attention_stats(q, k, *rest, want=want, scale=0.25)
    with pytest.raises(ValueError, match="'last_mean' and last >= 1 go together"):
        attention_stats(q, k, *rest, want=("last_mean",), scale=0.25)
    with pytest.raises(ValueError, match="'count' and threshold >= 0 go together"):
        attention_stats(q, k, *rest, threshold=0.1, **how)

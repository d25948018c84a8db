"""Scores against the papers' equations in float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import AttentionSpec, Observed, View
from kvjax.keep.algebra import ChunkSum, Pool
from kvjax.keep.observations.observe import Mass, Queries
from kvjax.keep.observations.trace import AccumulatedMass
from kvjax.keep.scores.geometry import KeyDistinctness
from kvjax.keep.scores.score import AccumulatedAttention, KeyNorm, Position, RandomScore, WindowAttention
from kvjax.ops.base.rope import Rope

B, N, K, S, H = 2, 6, 3, 20, 8
G = N // K
LENGTH = np.array([20, 13])
SCALE, CAP = 0.4, 3.0


def f32(x):
    return jnp.asarray(x, jnp.float32)


def slots(rng):
    """Slots in position order, as after a prompt: the second row is shorter and ends in empty slots."""
    pos = np.where(np.arange(S) < LENGTH[:, None, None], np.arange(S), -1)
    pos = np.broadcast_to(pos, (B, K, S)).astype(np.int32)
    k, v = rng.normal(size=(2, B, K, S, H))
    return View(f32(k), f32(v), jnp.asarray(pos), f32(rng.normal(size=pos.shape)), {})


@pytest.fixture
def view(rng):
    return slots(rng)


def seen_by(observed=None, mass=None, layer=1, softcap=CAP, length=LENGTH):
    length = jnp.asarray(length, jnp.int32)
    return Observed(observed or {}, mass, length, length // 2, layer, AttentionSpec(SCALE, softcap, Rope()))


def window_of(rng, last):
    """Return the rotated queries of the last tokens of each row, right-aligned, and their positions."""
    q = f32(rng.normal(size=(B, N, last, H)))
    return q, jnp.asarray(LENGTH[:, None] - last + np.arange(last), jnp.int32)


def probabilities(view, q, q_pos):
    """p [B, K, G, W, S]: softmax over the visible slots of cap * tanh(q k scale / cap) + bias."""
    k, bias, pos = np.asarray(view.k, np.float64), np.asarray(view.bias, np.float64), np.asarray(view.pos)
    rows = np.asarray(q, np.float64).reshape(B, K, G, -1, H)
    s = np.einsum("bkgwh,bksh->bkgws", rows, k) * SCALE
    s = CAP * np.tanh(s / CAP) + bias[:, :, None, None]
    seen = (pos >= 0)[:, :, None, None] & (pos[:, :, None, None] <= np.asarray(q_pos)[:, None, None, :, None])
    p = np.where(seen, np.exp(s), 0)
    return p / np.maximum(p.sum(-1, keepdims=True), 1e-300)


def check(score, want, view):
    """Equal on the slots that hold a token."""
    live = np.asarray(view.pos) >= 0
    np.testing.assert_allclose(
        np.asarray(score)[live], np.broadcast_to(want, live.shape)[live], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_window_attention_sums_what_the_last_queries_give_each_older_slot(rng, view, reduce):
    last = 4
    q, q_pos = window_of(rng, last)
    got = WindowAttention(last, reduce=reduce)(view, seen_by({key_of(Queries(last)): (q, q_pos)}))
    want = getattr(np, reduce)(probabilities(view, q, q_pos), 3).mean(2)
    want = np.where(np.asarray(view.pos) >= (LENGTH - last)[:, None, None], 0, want)
    check(got, want, view)


def test_window_attention_averages_over_the_queries_that_a_short_row_has(rng, view):
    last = 4
    q, q_pos = window_of(rng, last)
    q_pos = q_pos.at[1, :2].set(-1)
    word = WindowAttention(last, reduce="mean", hide_window=False)
    got = word(view, seen_by({key_of(Queries(last)): (q, q_pos)}))
    p = probabilities(view, q, q_pos)
    want = np.stack([p[0].mean(2).mean(1), p[1, :, :, 2:].mean(2).mean(1)])
    check(got, want, view)


def test_the_last_query_alone_shared_by_a_layer_is_the_score_of_tova(rng, view):
    q, q_pos = window_of(rng, 1)
    word = WindowAttention(1, heads="layer", hide_window=False)
    got = word(view, seen_by({key_of(Queries(1)): (q, q_pos)}))
    check(got, probabilities(view, q, q_pos)[:, :, :, 0].mean((1, 2))[:, None], view)
    # In a decode step the attention of the step itself is used: its sum over a group, a common factor.
    mass = f32(rng.random((B, K, S)))
    step = word(view, seen_by(mass=mass))
    np.testing.assert_allclose(
        step, np.broadcast_to(np.asarray(mass).mean(1, keepdims=True), step.shape), rtol=1e-6
    )


def test_accumulated_attention_is_the_remembered_mass(rng, view):
    mass = rng.random((B, K, S))
    view = view._replace(traces={key_of(AccumulatedMass(Mass("sum"))): f32(mass)})
    check(AccumulatedAttention()(view, seen_by()), mass, view)
    viewers = LENGTH[:, None, None] - np.asarray(view.pos)
    check(AccumulatedAttention(per_query=True)(view, seen_by()), mass / viewers, view)
    assert AccumulatedAttention().traces == {AccumulatedMass(Mass("sum"))}


def test_key_norm_prefers_small_keys_and_position_prefers_new_ones(view):
    check(KeyNorm()(view, seen_by()), -np.sqrt((np.asarray(view.k, np.float64) ** 2).sum(-1)), view)
    check(Position()(view, seen_by()), np.asarray(view.pos, np.float64), view)


def test_key_distinctness_is_minus_the_cosine_to_the_mean_unit_key(view):
    k, live = np.asarray(view.k, np.float64), np.asarray(view.pos) >= 0
    unit = k / np.linalg.norm(k, axis=-1, keepdims=True)
    mean = np.mean(unit, 2, where=live[..., None], keepdims=True)
    cosine = (unit * mean).sum(-1) / np.linalg.norm(mean, axis=-1)
    check(KeyDistinctness()(view, seen_by()), -cosine, view)


def test_random_scores_depend_on_seed_layer_head_and_position_alone(rng, view):
    draw = RandomScore(3)
    scores = np.asarray(draw(view, seen_by(layer=1)))
    order = rng.permutation(S)
    mixed = jax.tree.map(lambda x: x[::-1][:, :, order], view)
    np.testing.assert_array_equal(draw(mixed, seen_by(layer=1))[0], scores[1][:, order])
    others = [
        RandomScore(4)(view, seen_by(layer=1)),
        draw(view, seen_by(layer=2)),
        draw(view, seen_by())[:, ::-1],
    ]
    for other in others:
        assert (np.asarray(other)[0] != scores[0]).mean() > 0.6
    live = scores[0]
    assert len(np.unique(live)) == live.size and 0 <= live.min() and live.max() < 1
    assert abs(live.mean() - 0.5) < 4 * np.sqrt(1 / 12 / live.size)


def pool_by_hand(x, kernel, kind):
    half = kernel // 2
    padded = np.pad(x, [(0, 0), (0, 0), (half, half)], constant_values=0 if kind == "mean" else -np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=-1)
    return windows.mean(-1) if kind == "mean" else windows.max(-1)


@pytest.mark.parametrize("kind", ["mean", "max"])
@pytest.mark.parametrize("kernel", [1, 5, 7])
def test_pools_smooth_over_neighbours(rng, kernel, kind):
    x = rng.normal(size=(B, K, S))
    np.testing.assert_allclose(
        Pool(kernel, kind)(f32(x)), pool_by_hand(x, kernel, kind), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("arguments", [(4,), (0,), (5, "median")])
def test_pools_that_mean_nothing_are_refused(arguments):
    with pytest.raises(ValueError, match="a pool needs an odd kernel"):
        Pool(*arguments)


@pytest.mark.parametrize("kind", ["mean", "max"])
def test_what_lies_in_empty_slots_does_not_leak_into_a_pooled_score(view, kind):
    word = KeyNorm() >> Pool(3, kind)
    empty = (view.pos < 0)[..., None]
    dirty = view._replace(k=jnp.where(empty, jnp.nan, view.k))
    got = word(dirty, seen_by())
    norms = -np.sqrt((np.asarray(view.k, np.float64) ** 2).sum(-1))
    norms = np.where(np.asarray(view.pos) < 0, 0 if kind == "mean" else -np.inf, norms)
    check(got, pool_by_hand(norms, 3, kind), view)


def test_a_pooled_score_needs_and_remembers_what_its_score_does():
    word = AccumulatedAttention() >> Pool(3)
    assert word.traces == {AccumulatedMass(Mass("sum"))} and word.ordered and not word.score.ordered
    assert (WindowAttention(4) >> Pool(3)).needs == {Queries(4)}


@pytest.mark.parametrize("tokens", [1, 3, 50])
def test_chunks_of_a_text_share_the_sum_of_the_slots_that_are_left_of_them(rng, view, tokens):
    kept = np.sort(np.stack([rng.permutation(60)[:S] for _ in range(B * K)])).reshape(B, K, S)
    pos = np.where(np.asarray(view.pos) >= 0, kept, -1)
    view = view._replace(pos=jnp.asarray(pos, jnp.int32))
    score, want = np.asarray(KeyNorm()(view, seen_by()), np.float64), np.zeros(pos.shape)
    for b, k, s in zip(*np.nonzero(pos >= 0), strict=True):
        same = (pos[b, k] >= 0) & (pos[b, k] // tokens == pos[b, k, s] // tokens)
        want[b, k, s] = score[b, k][same].sum()
    check(ChunkSum(KeyNorm(), tokens)(view, seen_by()), want, view)

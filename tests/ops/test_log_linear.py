"""Log-linear attention: against stored results, its definition (no merging), and itself cut in any way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.recurrent import linear_attention as plain
from kvjax.ops.recurrent.log_linear import (
    LevelState,
    empty_levels,
    level,
    levels_for,
    log_linear,
    log_linear_attention,
    log_linear_gated_delta,
    log_linear_step,
)
from kvjax.ops.recurrent.recurrence import RecurrenceInputs
from tests.ops.oracles import oracle, rms
from tests.parity.ops.log_linear import OPS
from tests.sweep import sweep

B, T, H, K, V, L = 2, 41, 2, 4, 3, 8
FORMS = [{"recurrent": True}, {}, {"chunk": 7}]
one_of_each = pytest.mark.parametrize("how", [FORMS[0], FORMS[2]], ids=["recurrent", "chunks of 7"])
SIMPLEST, RICHEST = (False, False), (True, True)
members = pytest.mark.parametrize(
    "vector, erase", sweep([SIMPLEST, (True, False), (False, True), RICHEST], SIMPLEST, RICHEST),
    ids=["mamba-2", "gla", "gated delta", "kda"],
)  # fmt: skip
simplest_and_richest = pytest.mark.parametrize(
    "vector, erase", sweep([SIMPLEST, RICHEST], RICHEST), ids=["mamba-2", "kda"]
)
compiled = jax.jit(log_linear, static_argnames=("chunk", "recurrent"))
attention, gated_delta = (
    jax.jit(f, static_argnames=("scale", "recurrent")) for f in (log_linear_attention, log_linear_gated_delta)
)


@pytest.fixture
def double():
    """float64, which the layers' casts of their inputs promote to."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def run(fed, state, segments=None, mask=None, **how):
    """`log_linear` in numpy arrays. It always gets segments and a mask, so that tests share compilations."""
    shape = fed[0].k.shape[:2]
    segments = np.zeros(shape, np.int32) if segments is None else segments
    mask = np.ones(shape, bool) if mask is None else mask
    return jax.tree.map(np.asarray, compiled(*fed, state, segments, mask=mask, **how))


def draw(rng, *, vector=True, erase=True, levels=L):
    """Random tokens (unit keys, log decays between -0.5 and 0) and level scales between 0 and 2."""
    q, k = (rng.normal(size=(B, T, H, K)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(B, T, H, V))
    g = -0.5 * rng.random((B, T, H, K if vector else 1))
    beta = 2 * rng.random((B, T, H, 1))
    return RecurrenceInputs(q, k, beta * v, g, beta * k if erase else None), 2 * rng.random((B, T, H, levels))


def draw_state(rng, following, levels=L):
    """Random levels, where the position before `following` has any."""
    used = [[n > 0 and (x == 0 or n - 1 >> x - 1 & 1 == 1) for x in range(levels)] for n in following]
    states = rng.normal(size=(len(following), levels, H, K, V)) * np.asarray(used)[..., None, None, None]
    return LevelState(states, np.asarray(following, np.int32))


def take(tree, rows=slice(None), times=slice(None)):
    return jax.tree.map(lambda x: x[rows, times], tree)


def row_of(state, row):
    return jax.tree.map(lambda x: x[row : row + 1], state)


def by_hand(tokens, scales, state):
    """Compute the definition in float64: nothing is ever merged; tokens and given levels keep a state each.

    A given level stands where one of its tokens was: the last token, for l >= 1 with bit l - 1 cleared.
    """
    q, k, v, g, p = (None if x is None else np.asarray(x, np.float64) for x in tokens[:5])
    lam, given = np.asarray(scales, np.float64), np.asarray(state.levels, np.float64)
    top, out, final = lam.shape[-1] - 1, np.zeros(v.shape), np.zeros(given.shape)
    level_of = lambda t, s: min((t ^ s).bit_length(), top)  # noqa: E731
    for b in range(q.shape[0]):
        n = int(state.next[b])
        kept = [(n - 1 if x == 0 else (n - 1) ^ (1 << x - 1), given[b, x]) for x in range(top + 1) if n]
        for i in range(q.shape[1]):
            kept = [(s, np.exp(g[b, i])[..., None] * x) for s, x in kept]
            if p is not None:
                kept = [(s, x - np.einsum("hk,hj,hjv->hkv", k[b, i], p[b, i], x)) for s, x in kept]
            kept.append((n + i, np.einsum("hk,hv->hkv", k[b, i], v[b, i])))
            for s, x in kept:
                weight = lam[b, i, :, level_of(n + i, s)][:, None]
                out[b, i] += weight * np.einsum("hk,hkv->hv", q[b, i], x)
        for s, x in kept:
            final[b, level_of(n + q.shape[1] - 1, s)] += x
    return out, final


def close(got, want):
    """Equal outputs and states, (o, LevelState) each."""
    np.testing.assert_allclose(got[0], want[0], atol=1e-12)
    np.testing.assert_allclose(got[1].levels, want[1].levels, atol=1e-12)
    np.testing.assert_array_equal(got[1].next, want[1].next)


def test_levels_are_bits_of_the_difference():
    t = jnp.arange(70, dtype=jnp.int32)
    got = np.asarray(level(t[:, None], t[None]))
    want = [[(a ^ b).bit_length() for b in range(70)] for a in range(70)]
    np.testing.assert_array_equal(got, want)
    for n in range(1, 70):
        assert levels_for(n) == int(np.ceil(np.log2(n))) + 1 == got[:n, :n].max() + 1


@pytest.mark.rotating
@pytest.mark.parametrize("name", OPS)
def test_bfloat16_inputs_keep_float32_levels(name):
    inputs, want = oracle(name)
    half = {n: jnp.asarray(x, jnp.bfloat16) for n, x in inputs.items()}
    with jax.numpy_dtype_promotion("standard"):
        got = jax.jit(OPS[name])(half)
    assert all(got[n].dtype == np.float32 and rms(got[n], want[n]) < 1e-2 for n in want)


@pytest.mark.rotating
@one_of_each
@members
def test_float64_results_are_exact_from_any_position_of_each_row(rng, double, vector, erase, how):
    fed, state = draw(rng, vector=vector, erase=erase), draw_state(rng, [23, 0])
    want, levels = by_hand(*fed, state)
    got, last = run(fed, state, **how)
    assert got.dtype == last.levels.dtype == np.float64 and last.next.tolist() == [23 + T, T]
    assert rms(got, want) < 1e-10 and rms(last.levels, levels) < 1e-10


@pytest.mark.rotating
@one_of_each
@pytest.mark.parametrize("levels", sweep([1, 3], 3))
def test_the_topmost_level_absorbs_what_is_further_away(rng, double, levels, how):
    fed, state = draw(rng, levels=levels), draw_state(rng, [3, 0], levels=levels)
    want, final = by_hand(*fed, state)
    got, last = run(fed, state, **how)
    assert rms(got, want) < 1e-10 and rms(last.levels, final) < 1e-10
    early = np.broadcast_to(np.arange(T) < 20, (B, T))
    again, last = run(fed, run(fed, state, mask=early, **how)[1], mask=~early, **how)
    assert rms(again[:, 20:], want[:, 20:]) < 1e-10 and rms(last.levels, final) < 1e-10


def test_levels_that_do_not_fit_are_refused(rng):
    tokens, scales = draw(rng, levels=6)
    with pytest.raises(ValueError, match="hold 32 tokens apart, got 41 tokens"):
        compiled(tokens, scales)
    with pytest.raises(ValueError, match="the state has 8 levels and level_scales 6"):
        compiled(*take((tokens, scales), times=slice(9)), draw_state(rng, [0, 0]))


@pytest.mark.rotating
def test_a_sequence_may_be_cut_in_two(rng, double):
    fed, state, cut = draw(rng), draw_state(rng, [5, 18]), 26
    first, between = run(take(fed, times=slice(cut)), state)
    second, last = run(take(fed, times=slice(cut, T)), between)
    assert between.next.tolist() == [5 + cut, 18 + cut]
    close((np.concatenate([first, second], 1), last), run(fed, state))


@one_of_each
def test_a_sequence_may_be_cut_anywhere_in_each_row(rng, double, how):
    """Cut by masks, so that every cut is the same program."""
    fed, state = draw(rng), draw_state(rng, [5, 18])
    want, end = run(fed, state, **how)
    for cut in range(T + 1):
        early = np.arange(T) < np.asarray([[cut], [T - cut]])
        first, between = run(fed, state, mask=early, **how)
        second, last = run(fed, between, mask=~early, **how)
        assert between.next.tolist() == [5 + cut, 18 + T - cut]
        close((np.where(early[..., None, None], first, second), last), (want, end))


@pytest.mark.rotating
@simplest_and_richest
def test_one_step_decodes_at_any_position_of_each_row(rng, double, vector, erase):
    """Rows stop around powers of two, each after its own number of tokens, and go on together."""
    fed = take(draw(rng, vector=vector, erase=erase), rows=0)
    stops = np.asarray([0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33])
    many = jax.tree.map(lambda x: np.repeat(x[None], len(stops), 0), fed)
    want, _ = run(many, draw_state(rng, 0 * stops))
    _, state = run(many, draw_state(rng, 0 * stops), mask=np.arange(T)[None] < stops[:, None])
    state, decode = jax.tree.map(jnp.asarray, state), jax.jit(lambda *x: log_linear_step(*x))
    for ahead in range(5):
        assert state.next.tolist() == (stops + ahead).tolist()
        token, scales = jax.tree.map(lambda x, at=stops + ahead: x[at], fed)
        out, state = decode(state, token, scales)
        np.testing.assert_allclose(out, want[0, stops + ahead], atol=1e-12)
    assert decode._cache_size() == 1


def test_steps_from_nothing_are_the_sequence(rng, double):
    fed = draw(rng)
    state, out = empty_levels(fed[0], L), []
    want, levels = by_hand(*fed, state)
    decode = jax.jit(log_linear_step)
    for t in range(T):
        one, state = decode(state, *take(fed, times=t))
        out.append(one)
    close((np.stack(out, 1), state), (want, LevelState(levels, np.full(B, T))))


@one_of_each
@simplest_and_richest
def test_packed_segments_are_each_alone(rng, double, vector, erase, how):
    fed, state = draw(rng, vector=vector, erase=erase), draw_state(rng, [6, 23])
    ends = [[9, 33, T], [20, 21, T]]
    segments = np.asarray([np.searchsorted(e, np.arange(T), side="right") for e in ends], np.int32)
    got, last = run(fed, state, segments, **how)
    cuts = [(b, *cut) for b in range(B) for cut in zip([0, *ends[b]], ends[b], strict=False)]
    for row, start, stop in cuts:
        before = row_of(state, row) if start == 0 else draw_state(rng, [0])
        want, levels = by_hand(*take(fed, slice(row, row + 1), slice(start, stop)), before)
        assert rms(got[row, start:stop], want[0]) < 1e-10
        if stop == T:
            assert rms(last.levels[row], levels[0]) < 1e-10 and last.next[row] == stop - start


@one_of_each
@simplest_and_richest
def test_masked_tokens_change_nothing_wherever_they_are(rng, double, vector, erase, how):
    fed, state = draw(rng, vector=vector, erase=erase), draw_state(rng, [6, 0])
    real = np.asarray([np.arange(T) < T - 11, rng.random(T) < 0.6])
    real[1, :3] = False
    other = jax.tree.map(lambda x: np.where(real[:, :, None, None], x, 9.0), fed)
    got, last = run(other, state, mask=real, **how)
    for row in range(B):
        want, levels = by_hand(*take(fed, slice(row, row + 1), np.flatnonzero(real[row])), row_of(state, row))
        assert rms(got[row, real[row]], want[0]) < 1e-10 and rms(last.levels[row], levels[0]) < 1e-10
        assert last.next[row] == state.next[row] + real[row].sum()


@one_of_each
def test_a_call_of_nothing_but_padding_keeps_every_bit(rng, double, how):
    fed, state = draw(rng), draw_state(rng, [24, 0])
    _, last = run(fed, state, mask=np.zeros((B, T), bool), **how)
    for got, want in zip(last, state, strict=True):
        np.testing.assert_array_equal(got, want)


def test_masks_and_segments_go_together(rng, double):
    """A segment may begin with a token that is left out, and a row may be left out altogether."""
    fed, state = draw(rng), draw_state(rng, [6, 9])
    segments = np.broadcast_to((np.arange(T) >= 13).astype(np.int32), (B, T))
    real = np.stack([~np.isin(np.arange(T), [12, 13, 14, 20, T - 1]), np.zeros(T, bool)])
    by_time, chunks = (run(fed, state, segments, real, **how) for how in (FORMS[0], FORMS[2]))
    close(by_time, chunks)
    mine = real[0] & (segments[0] == 1)
    want, levels = by_hand(*take(fed, slice(1), np.flatnonzero(mine)), draw_state(rng, [0]))
    assert rms(chunks[0][0, mine], want[0]) < 1e-10 and rms(chunks[1].levels[0], levels[0]) < 1e-10
    assert chunks[1].next.tolist() == [24, 0] and not chunks[1].levels[1].any()


@pytest.mark.rotating
def test_scales_of_one_are_the_plain_member_without_erasing(rng, double):
    (q, k, v, g, *_), scales = draw(rng)
    out, state = attention(q, k, v, g, np.ones_like(scales))
    want, final = jax.jit(lambda *x: plain.gla(*x, scale=1.0, recurrent=True))(q, k, v, g)
    assert rms(out, want) < 1e-10 and rms(np.asarray(state.levels).sum(1), final) < 1e-10


@pytest.mark.rotating
def test_scales_of_one_are_the_plain_member_with_erasing(rng, double):
    (q, k, v, g, *_), scales = draw(rng, vector=False)
    beta = rng.random((B, T, H))
    out, state = gated_delta(q, k, v, g[..., 0], beta, np.ones_like(scales), scale=K**-0.5)
    want, final = jax.jit(lambda *x: plain.gated_delta_rule(*x, recurrent=True))(q, k, v, g[..., 0], beta)
    assert rms(out, want) < 1e-10 and rms(np.asarray(state.levels).sum(1), final) < 1e-10


def test_keys_serve_a_group_of_value_heads(rng, double):
    (q, k, v, g, *_), scales = draw(rng)
    q, k, beta = q[:, :, :1], k[:, :, :1], rng.random((B, T, H))
    want = gated_delta(*(np.repeat(x, H, 2) for x in (q, k)), v, g, beta, scales, recurrent=True)
    close(gated_delta(q, k, v, g, beta, scales, recurrent=True), want)


def slopes(fed, state, recurrent=False):
    """Gradients of tokens, scales and levels, in a list."""

    def loss(fed, levels):
        out, last = log_linear(*fed, LevelState(levels, following), recurrent=recurrent)
        return (out**2).sum() + (last.levels**2).sum()

    following = jnp.asarray(state.next)
    return jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)))(fed, state.levels))


@pytest.mark.rotating
def test_gradients_of_both_forms_agree(rng, double):
    fed, state = draw(rng), draw_state(rng, [6, 0])
    fed = fed[0]._replace(log_decay=24 * fed[0].log_decay), fed[1]
    for x, y in zip(slopes(fed, state), slopes(fed, state, recurrent=True), strict=True):
        assert rms(x, y) < 1e-10


@pytest.mark.rotating
def test_gradients_stay_finite_in_float32_under_strong_decay(rng):
    fed, state = draw(rng, vector=False), draw_state(rng, [6, 0])
    fed = fed[0]._replace(log_decay=24 * fed[0].log_decay), fed[1]
    assert all(x.dtype == np.float32 and np.isfinite(x).all() for x in slopes(fed, state))

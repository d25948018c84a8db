"""Decoding over pages picked out of a cache: the plain form and the TPU kernel against float64 numpy.

Everything that must not be read is no number: pages that were not picked, and other layers. Pages behind a
list's count name no page at all.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.decode.picked_decode import picked_decode, tpu_picked_decode
from kvjax.pallas_kernels import streaming
from tests.kernels.close import check, with_races
from tests.sweep import sweep

L, B, K, SLOTS = 2, 2, 2, 512
# Pages of every list: all that fit the table, none, one, and some.
COUNTS = {"mixed": [[9, 0], [1, 5]], "empty ends": [[0, 7], [9, 0]], "empty": [[0, 0], [0, 0]]}


def draw(seed, *, group=2, t=1, width=128, page=16, counts="mixed", dtype=jnp.float32):
    """(q, k, v, pages, counts, pos, q_pos); a third of the picked slots are empty."""
    rng = np.random.default_rng(seed)
    count, most = np.minimum(COUNTS[counts], SLOTS // page), 9
    k, v = (np.full((L, B, K, SLOTS, width), np.nan) for _ in range(2))
    pages, pos = np.full((B, K, most), 10**6), np.full((B, K, most * page), -1)
    for i in np.ndindex(B, K):
        pages[*i, : count[i]] = rng.permutation(SLOTS // page)[: count[i]]
        for n, p in enumerate(pages[*i, : count[i]]):
            rows = slice(p * page, (p + 1) * page)
            for x in (k, v):
                x[1, *i, rows] = rng.standard_normal((page, width))
            held = rng.integers(0, 1000, page)
            pos[*i, n * page : (n + 1) * page] = np.where(rng.random(page) < 1 / 3, -1, held)
    q = rng.standard_normal((B, group * K, t, width))
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    asked = np.arange(800, 800 + t) + np.array([[0], [150]])
    numbers = (jnp.asarray(x, jnp.int32) for x in (pages, count, pos, asked))
    return q, k, v, *numbers


def bias(seed, heads, page):
    """Draw what is added to logits, of KV heads or query heads; a fifth of it hides its slots."""
    x = np.random.default_rng(seed).standard_normal((B, heads, 9 * page))
    return jnp.asarray(np.where(x < -0.84, -np.inf, x), jnp.float32)


def by_hand(inputs, *, page, scale, window=None, softcap=None, bias=None):
    """(out, lse), query by query."""
    q, k, v = (np.asarray(x.astype(jnp.float32), np.float64) for x in inputs[:3])
    pages, counts, pos, q_pos = (np.asarray(x) for x in inputs[3:])
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b, n, t in np.ndindex(q.shape[:3]):
        i = b, n // (q.shape[1] // K)
        slots = [p * page + s for p in pages[i][: counts[i]] for s in range(page)]
        held = pos[i][: len(slots)]
        seen = (held >= 0) & (held <= q_pos[b, t])
        if window is not None:
            seen &= held > q_pos[b, t] - window
        added = np.zeros(len(slots))
        if bias is not None:
            added = np.asarray(bias, np.float64)[b, n // (q.shape[1] // bias.shape[1])][: len(slots)]
        seen &= ~np.isneginf(added)
        rows = np.array(slots, int)[seen]
        if not len(rows):
            continue
        z = k[1][i][rows] @ q[b, n, t] * scale
        z = z if softcap is None else softcap * np.tanh(z / softcap)
        z = z + added[seen]
        p = np.exp(z - z.max())
        lse[b, n, t] = z.max() + np.log(p.sum())
        out[b, n, t] = p / p.sum() @ v[1][i][rows]
    return out, lse


CASES = {
    "all there is": (
        dict(t=2, group=3, counts="mixed", page=16),
        dict(page=16, window=700, softcap=5.0, bias=bias(1, K, 16)),
    ),
    "quest": (dict(), dict(page=16)),
    "no group": (dict(group=1), dict(page=16)),
    "wide": (dict(width=256, group=5), dict(page=16)),
    "several queries": (dict(t=3, counts="empty ends"), dict(page=16, window=700)),
    "soft-cap": (dict(group=16), dict(page=16, softcap=5.0)),
    "smallest pages": (dict(page=8), dict(page=8)),
    "large pages": (dict(page=64), dict(page=64)),
    "bfloat16": (dict(dtype=jnp.bfloat16), dict(page=16)),
}


@pytest.mark.rotating
@pytest.mark.parametrize("case", sweep(CASES, "all there is"))
def test_what_is_picked_is_attended_and_nothing_else(case):
    how, options = CASES[case]
    inputs, options = draw(0, **how), options | dict(scale=0.09)
    want, bar = by_hand(inputs, **options), 1e-2 if how.get("dtype") == jnp.bfloat16 else 2e-6
    for form in ("reference", "tpu interpret"):
        check(jax.jit(partial(picked_decode, implementation=form, **options))(*inputs, 1), want, bar)


@pytest.mark.parametrize("form", sweep(["reference", "tpu interpret"]))
def test_where_nothing_is_picked_nothing_is_seen(form):
    out, lse = picked_decode(*draw(3, counts="empty"), 1, page=16, scale=1.0, implementation=form)
    assert (np.asarray(out) == 0).all() and np.isneginf(lse).all()


def in_steps(inputs, mode):
    options = dict(page=16, scale=0.09, window=None, softcap=None, block=128, interpret=mode)
    return jax.jit(lambda *x: tpu_picked_decode(*x, jnp.asarray(1, jnp.int32), **options))(*inputs)


@pytest.mark.parametrize(
    "counts, dma",
    sweep(
        [(c, dma) for c in ("mixed", "empty ends") for dma in ("on_wait", "eager")], ("empty ends", "on_wait")
    ),
)
def test_pages_that_take_several_steps_do_not_race(counts, dma):
    inputs = draw(1, counts=counts)
    got, races = with_races(partial(in_steps, inputs), dma)
    check(got, by_hand(inputs, page=16, scale=0.09), 2e-6)
    assert not races


@pytest.mark.rotating
def test_a_missing_wait_is_found(monkeypatch):
    monkeypatch.setattr(streaming, "wait", lambda copy: None)
    assert with_races(partial(in_steps, draw(1)), "eager")[1]


def test_what_cannot_run_says_why():
    inputs = draw(2)
    q, k, v, pages, counts, pos, asked = inputs
    with pytest.raises(ValueError, match=r"pos \[2, 2, 143\] do not fit: expected KV heads that divide"):
        picked_decode(q, k, v, pages, counts, pos[..., 1:], asked, 1, page=16, scale=1.0)
    forced = dict(scale=1.0, implementation="tpu interpret")
    with pytest.raises(NotImplementedError, match="rows are 64 wide, expected a multiple of 128"):
        thin = (q[..., :64], k[..., :64], v[..., :64])
        picked_decode(*thin, pages, counts, pos, asked, 1, page=16, **forced)
    with pytest.raises(NotImplementedError, match="pages of 4 slots of float32, expected a multiple of 8"):
        picked_decode(q, k, v, pages, counts, pos[..., : 9 * 4], asked, 1, page=4, **forced)


@pytest.mark.rotating
def test_biases_of_query_heads_have_a_form_of_their_own():
    inputs, options = draw(0, group=3, t=2), dict(page=16, scale=0.09, bias=bias(2, 3 * K, 16))
    check(picked_decode(*inputs, 1, **options), by_hand(inputs, **options), 2e-6)
    with pytest.raises(NotImplementedError, match="biases of every query head have no kernel"):
        picked_decode(*inputs, 1, implementation="tpu interpret", **options)
    with pytest.raises(ValueError, match=r"bias is \[2, 4, 144\], expected one for each of 144 slots"):
        picked_decode(*inputs, 1, **options | dict(bias=bias(2, 2 * K, 16)))

"""Page scores: the plain form against float64 numpy, the TPU kernel against the same, both against Quest.

Pages behind a list's count are no numbers.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.grammar import Budget
from kvjax.ops.attention.union import attend
from kvjax.ops.decode.page_pool import make_pool
from kvjax.ops.decode.page_scores import best_pages, page_scores, tpu_page_scores
from kvjax.ops.decode.paged_decode import paged_decode
from kvjax.read.pages import PageBounds
from kvjax.state.cache import Slots
from kvjax.state.picked_pages import visited
from tests.ops.oracles import rms
from tests.sweep import sweep

B, K = 2, 2


def draw(
    seed, *, group=2, t=1, width=128, stored=None, pages=300, kind="bounds", q=np.float32, kept=np.float32
):
    """(q, summary, counts) with lists that are full, end in a block, in another one, and are empty."""
    rng = np.random.default_rng(seed)
    counts = np.array([[pages, pages // 2], [3, 0]])
    query = rng.standard_normal((B, K * group, t, width))
    ends = np.sort(rng.standard_normal((2, B, K, pages, stored or width)) + 0.5, 0)
    ends[..., width:] = 0
    ends = np.where((np.arange(pages) < counts[..., None])[..., None], ends, np.nan)
    summary = {"low": ends[0], "high": ends[1]} if kind == "bounds" else {"centroid": ends[0]}
    summary = {name: jnp.asarray(x, kept)[None] for name, x in summary.items()}
    return jnp.asarray(query, q), summary, jnp.asarray(counts, jnp.int32)


def by_hand(q, summary, counts):
    """[B, K, P], channel by channel."""
    q, counts = np.asarray(q.astype(jnp.float32), np.float64), np.asarray(counts)
    parts = [np.asarray(x[0].astype(jnp.float32), np.float64)[..., : q.shape[-1]] for x in summary.values()]
    b, heads, pages = parts[0].shape[:3]
    rows = q.reshape(b, heads, -1, q.shape[-1])
    best = np.max([rows[:, :, :, None] * x[:, :, None] for x in parts], 0).sum(-1).max(2)
    return np.where(np.arange(pages) < counts[..., None], best, -np.inf)


def check(got, want, bar):
    got = np.asarray(got, np.float64)
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    live = np.isfinite(want)
    assert np.isfinite(got[live]).all() and rms(got[live], want[live]) < bar


CASES = {
    "bounds": dict(),
    "centroids": dict(kind="centroid"),
    "several queries": dict(t=3, group=3),
    "few pages": dict(pages=20),
    "one block": dict(pages=128),
    "half precision": dict(q=jnp.bfloat16, kept=jnp.bfloat16),
    "half precision summaries": dict(kept=jnp.bfloat16),
    "half precision queries": dict(q=jnp.bfloat16),
    "wide 256": dict(width=256),
    **{f"padded {width}": dict(width=width, stored=-(-width // 128) * 128) for width in (64, 80, 96, 192)},
}


@pytest.mark.rotating
@pytest.mark.parametrize("case", sweep(CASES, "several queries", "centroids", "half precision"))
def test_both_forms_are_the_equation(case):
    q, summary, counts = draw(1, **CASES[case])
    want = by_hand(q, summary, counts)
    check(jax.jit(partial(page_scores, implementation="reference"))(q, summary, counts), want, 2e-6)
    call = jax.jit(lambda *x: tpu_page_scores(*x, block_pages=128, interpret=True))
    check(call(q, tuple(summary.values()), counts), want, 2e-6)


@pytest.mark.parametrize("implementation", sweep(["reference", "tpu interpret"], "tpu interpret"))
def test_of_a_stack_one_layer_is_read(implementation):
    q, summary, counts = draw(6, pages=20)
    stack = {name: jnp.full((3, *x.shape[1:]), jnp.nan).at[2].set(x[0]) for name, x in summary.items()}
    call = jax.jit(lambda layer: page_scores(q, stack, counts, layer, implementation=implementation))
    check(call(2), by_hand(q, summary, counts), 2e-6)


@pytest.mark.parametrize("group", sweep(range(1, 17)))
def test_groups_of_every_size_are_one_list(group):
    drawn = draw(2, group=group, pages=20)
    check(page_scores(*drawn, implementation="tpu interpret"), by_hand(*drawn), 2e-6)


def test_a_page_below_zero_is_not_raised_by_rows_that_are_none():
    q, summary, counts = draw(3, group=3, kind="centroid", pages=20)
    q, summary = jnp.abs(q), {name: -jnp.abs(x) for name, x in summary.items()}
    got = page_scores(q, summary, counts, implementation="tpu interpret")
    check(got, by_hand(q, summary, counts), 2e-6)
    assert (got < 0).all()


PAGE, BODY, WIDTH, LIVE = 8, 12, 128, np.array([12, 7])


@pytest.fixture
def body(rng):
    """Slots of whole pages, the second row with fewer of them, as Quest's reading sees them."""
    k, v = (jnp.asarray(rng.standard_normal((B, K, PAGE * BODY, WIDTH)), jnp.float32) for _ in range(2))
    pos = np.where(np.arange(PAGE * BODY) < PAGE * LIVE[:, None, None], np.arange(PAGE * BODY), -1).repeat(
        K, 1
    )
    return Slots(k, v, jnp.asarray(pos, jnp.int32), summary=PageBounds(Budget(0.5), PAGE).summarise(k))


@pytest.mark.parametrize("implementation", sweep(["reference", "tpu interpret"], "tpu interpret"))
def test_quest_visits_the_best_pages_by_its_bounds(rng, body, implementation):
    """In float64 numpy, channel by channel; paged decoding reads the same of these pages."""
    quest = PageBounds(Budget(0.5), PAGE)
    q = jnp.asarray(rng.standard_normal((B, 4, 1, WIDTH)), jnp.float32)
    at = jnp.asarray(LIVE * PAGE, jnp.int32)[:, None]
    stacked = jax.tree.map(lambda x: x[None], body)
    pages, count = quest.select(q, stacked, 0, at[:, 0], implementation)
    full = jnp.broadcast_to(jnp.asarray(LIVE, jnp.int32)[:, None], (B, K))
    bounds = by_hand(q, stacked.summary, full)
    np.testing.assert_array_equal(count, -(-LIVE // 2)[:, None].repeat(K, 1))
    for i, k in np.ndindex(B, K):
        best = np.argsort(-bounds[i, k])[: count[i, k]]
        assert set(pages[i, k, : count[i, k]].tolist()) == set(best.tolist())

    seen = visited(stacked, 0, PAGE, pages, count).keys()
    pool = make_pool(*(x.reshape(1, -1, PAGE, WIDTH) for x in (body.k, body.v)))
    own = jnp.arange(B * K, dtype=jnp.int32).reshape(B, K, 1) * BODY
    out, lse, _ = paged_decode(q, pool, own + pages, count * PAGE, at, scale=0.25)
    want, want_lse, _ = attend(q, seen, at, scale=0.25)
    np.testing.assert_allclose(out, want, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-6)


def test_the_best_pages_are_those_of_a_sort(rng):
    scores = rng.standard_normal((B, K, 9))
    counts, wanted = np.array([[9, 6], [2, 0]]), np.array([[3, 6], [4, 1]])
    scores = np.where(np.arange(9) < counts[..., None], scores, np.nan)
    for first, last in ((0, 0), (0, 1), (1, 2)):
        pages, count = best_pages(
            jnp.asarray(scores, jnp.float32), jnp.asarray(counts), jnp.asarray(wanted), most=5, first=first,
            last=last,
        )  # fmt: skip
        for i, k in np.ndindex(B, K):
            held = counts[i, k]
            fixed = {p for p in range(held) if p < first or p >= held - last}
            rest = sorted(set(range(held)) - fixed, key=lambda p, s=scores[i, k]: -s[p])
            n = min(max(wanted[i, k], first + last), held, 5)
            want = sorted(([*fixed, *rest])[:n])
            assert pages[i, k].tolist() == want + [-1] * (5 - n) and count[i, k] == n


@pytest.mark.rotating
def test_no_gradient_flows_through_a_score():
    q, summary, counts = draw(4, pages=20)
    of = jax.grad(
        lambda q: page_scores(q, summary, counts, implementation="tpu interpret")[0].sum() + q.sum()
    )
    np.testing.assert_array_equal(of(q), np.ones(q.shape))


def test_what_cannot_run_says_why():
    q, summary, counts = draw(5, pages=20)
    with pytest.raises(NotImplementedError, match="there is no such form"):
        page_scores(q, summary, counts, implementation="cuda")
    thin = {name: x[..., :64] for name, x in summary.items()}
    with pytest.raises(NotImplementedError, match="summaries are 64 wide, expected a multiple of 128"):
        page_scores(q[..., :64], thin, counts, implementation="tpu")
    with pytest.raises(NotImplementedError, match="low of float16"):
        half = {name: x.astype(jnp.float16) for name, x in summary.items()}
        page_scores(q, half, counts, implementation="tpu")
    with pytest.raises(ValueError, match="do not fit"):
        page_scores(q, thin, counts)
    with pytest.raises(ValueError, match="a summary has 'low' and 'high', or 'centroid', got low"):
        page_scores(q, {"low": summary["low"]}, counts)
    with pytest.raises(ValueError, match="most must be from first"):
        best_pages(jnp.zeros((B, K, 20)), counts, counts, most=1, last=2)

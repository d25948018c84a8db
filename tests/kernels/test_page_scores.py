"""Page scores: the plain form and both kernels against float64 numpy and Quest, the choice against a sort.

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
from tests.kernels.cuda import FORM, lowered_for_cuda
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
def test_all_forms_are_the_equation(case):
    q, summary, counts = draw(1, **CASES[case])
    want = by_hand(q, summary, counts)
    for form in ("reference", FORM):
        check(jax.jit(partial(page_scores, implementation=form))(q, summary, counts), want, 2e-6)
    call = jax.jit(lambda *x: tpu_page_scores(*x, block_pages=128, interpret=True))
    check(call(q, tuple(summary.values()), counts), want, 2e-6)


UNPADDED = {
    "heads of 64": dict(width=64, group=4),
    "heads of 80, seven to a group": dict(width=80, group=7, pages=33),
    "heads of 192": dict(width=192),
    "heads of 512": dict(width=512, pages=33),
    "three queries of one head": dict(width=48, t=3, group=1, pages=33),
    "a single page": dict(width=32, pages=1),
}


@pytest.mark.parametrize("case", sweep(UNPADDED, "heads of 80, seven to a group"))
def test_a_gpu_reads_summaries_of_any_width(case):
    drawn = draw(7, **UNPADDED[case])
    check(jax.jit(partial(page_scores, implementation=FORM))(*drawn), by_hand(*drawn), 2e-6)


@pytest.mark.parametrize("implementation", sweep(["reference", "tpu interpret", FORM], "tpu interpret"))
def test_of_a_stack_one_layer_is_read(implementation):
    q, summary, counts = draw(6, pages=20)
    stack = {name: jnp.full((3, *x.shape[1:]), jnp.nan).at[2].set(x[0]) for name, x in summary.items()}
    call = jax.jit(lambda layer: page_scores(q, stack, counts, layer, implementation=implementation))
    check(call(2), by_hand(q, summary, counts), 2e-6)


@pytest.mark.parametrize("group", sweep(range(1, 17)))
def test_groups_of_every_size_are_one_list(group):
    drawn = draw(2, group=group, pages=20)
    for form in ("tpu interpret", FORM):
        check(page_scores(*drawn, implementation=form), by_hand(*drawn), 2e-6)


def test_a_page_below_zero_is_not_raised_by_rows_that_are_none():
    q, summary, counts = draw(3, group=3, kind="centroid", pages=20)
    q, summary = jnp.abs(q), {name: -jnp.abs(x) for name, x in summary.items()}
    for form in ("tpu interpret", FORM):
        got = page_scores(q, summary, counts, implementation=form)
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


FORMS = ("reference", "tpu interpret", FORM)


@pytest.mark.parametrize("implementation", sweep(FORMS, "tpu interpret", FORM))
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


@pytest.fixture
def ranked(rng):
    """(scores, counts, most, the pages that a sort selects); many scores are equal, and some are infinite."""
    scores = rng.integers(-3, 3, (2, 3, 37)) + rng.choice([0.0, 0.5], (2, 3, 37))
    scores[0, 1, ::2] = np.inf
    scores[1] = np.where(np.arange(37) < np.array([20, 5, 0])[:, None], scores[1], -np.inf)
    counts = np.array([[37, 12, 1], [20, 3, 0]])
    order = np.argsort(-scores, -1, kind="stable")
    want = [[set(order[i, k, : counts[i, k]].tolist()) for k in range(3)] for i in range(2)]
    return jnp.asarray(scores, jnp.float32), jnp.asarray(counts, jnp.int32), 37, want


@pytest.mark.parametrize("implementation", ["reference", FORM])
def test_the_best_pages_are_those_of_a_sort(ranked, implementation):
    """Of equal scores the older pages; all numbers of a row are different pages."""
    scores, counts, most, want = ranked
    pages = np.asarray(best_pages(scores, counts, most=most, implementation=implementation))
    assert pages.shape == (2, 3, most)
    for i, k in np.ndindex(2, 3):
        assert set(pages[i, k, : counts[i, k]].tolist()) == want[i][k]
        assert sorted(pages[i, k].tolist()) == list(range(37))


@pytest.mark.parametrize("pages", sweep((1, 16, 129, 2100), 129))
def test_a_gpu_chooses_among_any_number_of_pages(rng, pages):
    scores = jnp.asarray(rng.standard_normal((1, 2, pages)) * 10.0 ** rng.integers(-30, 30, pages), "float32")
    most = -(-pages // 2)
    counts = jnp.asarray([[most, most // 2]], jnp.int32)
    got = np.asarray(best_pages(scores, counts, most=most, implementation=FORM))
    for k, count in enumerate(np.asarray(counts)[0]):
        order = np.argsort(-np.asarray(scores)[0, k], kind="stable")
        assert got[0, k, :count].tolist() == sorted(order[:count].tolist())


def test_both_are_kernels_on_a_gpu():
    """A GPU takes them where nothing is forced, and XLA's sort where a program cannot hold the pages."""
    q, summary, counts = draw(5, pages=20)
    text = lowered_for_cuda(lambda *x: best_pages(page_scores(*x), x[2], most=10), q, summary, counts)
    assert all(text.count(f'name = "{name}"') == 1 for name in ("page_scores", "best_pages"))
    many = jax.ShapeDtypeStruct((1, 1, 20000), jnp.float32)
    assert "name = " not in lowered_for_cuda(lambda x, n: best_pages(x, n, most=9), many, counts[:1, :1])


@pytest.mark.rotating
def test_no_gradient_flows_through_a_score():
    q, summary, counts = draw(4, pages=20)
    of = jax.grad(
        lambda q: page_scores(q, summary, counts, implementation="tpu interpret")[0].sum() + q.sum()
    )
    np.testing.assert_array_equal(of(q), np.ones(q.shape))


def test_what_cannot_run_says_why():
    q, summary, counts = draw(5, pages=20)
    with pytest.raises(NotImplementedError, match="there is no such form, expected reference, tpu"):
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
    with pytest.raises(NotImplementedError, match="600 wide, expected at most 512"):
        wide = {name: jnp.pad(x, ((0, 0),) * 4 + ((0, 472),)) for name, x in summary.items()}
        page_scores(q, wide, counts, implementation=FORM)
    with pytest.raises(NotImplementedError, match="low of float16"):
        page_scores(q, half, counts, implementation=FORM)
    with pytest.raises(NotImplementedError, match="20000 pages, expected at most 16384"):
        best_pages(jnp.zeros((1, 1, 20000)), counts[:1, :1], most=1, implementation=FORM)
    with pytest.raises(ValueError, match="most must be at most the 20 pages, got 21"):
        best_pages(jnp.zeros((B, K, 20)), counts, most=21)

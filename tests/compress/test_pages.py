"""Pages by default: how long they are, that what is kept stays the same, and that bytes follow budgets."""

import dataclasses
import io
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import kvjax
from kvjax.commands.explain_print import weight
from kvjax.compat.shipped_fits import ready
from kvjax.compress.group import GroupMethod
from kvjax.compress.pages import page_of
from kvjax.grammar import Budget, Keep, Method
from kvjax.keep.budgets.budget import AcrossHeads, PerLayer, Threshold
from kvjax.keep.scores.score import Position
from kvjax.methods import takes_budget
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.ops.decode.ragged_decode import refusal
from kvjax.plan.cache_sizes import CacheSizes
from kvjax.state.cache import kept_positions, nbytes
from kvjax.state.shardings import heavier
from kvjax.store.affine import Affine
from tests.sweep import sweep

DEEP = Config(vocab=32, d_model=32, layers=30, heads=4, kv_heads=2, head_dim=64, d_ff=32, max_positions=4096)
TOKENS, BUDGETS = 2048, (0.25, 0.75)
# Of keys and values in bfloat16, and a position.
SLOT = 2 * 2 * DEEP.head_dim + 4


def group(allocate, budget=0.25, page=None, codecs=(None, None), merge=None):
    """Return what `page_of` reads of the groups."""
    keep = Keep(Position(), Budget(budget), allocate, page=page, merge=merge)
    return [GroupMethod(keep, codecs, 1, 0, None, 0)]


@cache
def in_pages():
    """Ids of the methods that lay out slots in pages and need no fit, all of which that need no fit."""
    found = []
    for info in kvjax.methods():
        given = {"budget": 0.5} if takes_budget(info.id) else {}
        method = kvjax.method(info.id, **given)
        if method.keep is not None and not method.keep.allocate.uniform:
            found.append(info)
    return found


@pytest.mark.parametrize("tokens", [48, 255, 256, 1024, 2048, 65536])
def test_page_is_the_largest_that_wastes_a_64th_of_a_list(tokens):
    page, kept = page_of(group(AcrossHeads()), tokens, tokens), tokens // 4
    assert page & (page - 1) == 0 and 1 <= page <= 128
    assert 64 * (page - 1) <= kept and (page == 128 or 64 * (2 * page - 1) > kept)


def test_page_that_is_given_is_kept():
    assert page_of(group(AcrossHeads(), page=48), 2048, 2048) == 48


def test_page_holds_whole_granules_of_every_group():
    coarse = [gm.replaced(granule=n) for n in (6, 4) for gm in group(AcrossHeads())]
    assert page_of([*group(AcrossHeads()), *coarse], 2048, 2048) == 12


def test_page_follows_shares_of_layers_and_what_a_threshold_may_leave():
    def of(*given):
        return page_of(group(*given), 2048, 2048)

    assert of(PerLayer((0.5, None, 0.25))) == of(AcrossHeads(), 192) == 4
    assert of(Threshold(0.0), 1.0) == of(AcrossHeads(), 512) == 8


@pytest.mark.parametrize("tokens", [33, 512, 2048, 16384])
def test_page_on_a_tpu_is_one_that_the_kernel_reads(monkeypatch, tokens):
    monkeypatch.setattr("kvjax.compress.pages.platform", lambda: "tpu")
    q = jnp.zeros((1, 8, 1, 128), jnp.bfloat16)
    for dtype in (jnp.bfloat16, jnp.float32):
        k = jnp.zeros((256, 128), dtype)
        assert refusal(q, k, k, page_of(group(AcrossHeads()), tokens, tokens), (0, 2, tokens)) == ""
    codes = jnp.zeros((256, 128), jnp.uint8)
    page = page_of(group(AcrossHeads(), codecs=(Affine(8), Affine(8))), tokens, tokens)
    # Short lists of codes are walked: pages of 128 slots would be most of them.
    assert page == (128 if tokens // 4 >= 512 else 32)
    assert (refusal(q, codes, codes, page, (2, 1, 512)) == "") == (page == 128)


@cache
def deep_sizes(id):
    methods = [kvjax.method(id, budget=b) for b in BUDGETS]
    return CacheSizes(DEEP, "bfloat16", TOKENS, [Method(), *methods]), methods


FREE = [i.id for i in in_pages() if takes_budget(i.id) and not i.training]


@pytest.mark.rotating
@pytest.mark.parametrize("id", sweep(FREE, "kvzip", "adakv"))
def test_bytes_of_30_layers_are_within_2_percent_of_the_budget(id):
    sizes, methods = deep_sizes(id)
    lists = DEEP.layers * DEEP.kv_heads
    for budget, method in zip(BUDGETS, methods, strict=True):
        slot = SLOT + 4 * len(method.keep.score.traces)
        want = lists * (budget * TOKENS * slot) + 4
        held = sizes.nbytes(method)
        # A dense slot after every list is for the next token.
        assert abs(held - lists * slot - want) <= 0.02 * want


@cache
def shipped():
    return kvjax.load("recall-tiny")


ALL = [i.id for i in in_pages() if takes_budget(i.id)]


SAME = ("kvzip(budget=0.25)", "adakv(budget=0.25, window=16)", "pyramidkv(budget=0.5, window=16)")


@pytest.mark.rotating
@pytest.mark.parametrize("text", SAME)
def test_every_verb_holds_the_bytes_of_the_budget(text, tmp_path):
    """A prefill, generating, explaining and a comparison, of 512 tokens."""
    one, tokens = shipped(), 512
    row = np.random.default_rng(0).integers(3, 200, (1, tokens))
    method = kvjax.method(text)
    _, cache = kvjax.prefill(one, row, method=method, room=0)
    full = nbytes(kvjax.prefill(one, row, room=0)[1])
    slot = full / tokens
    want = method.keep.budget.amount * full
    # One slot of a list is for the next token.
    assert abs(nbytes(cache) - slot - want) <= 0.02 * want
    (told, *_) = weight(ready(one, method), one.config, tokens, "float32")
    share = float(re.search(r", ([\d.]+)% of the full cache's", told)[1]) / 100
    assert abs(share * full - slot - want) <= 0.02 * want
    written = kvjax.generate(one, row, method=text, max_new_tokens=1, stop=()).cache
    assert [pool.page_tokens for pool in written.pools] == [pool.page_tokens for pool in cache.pools]
    assert abs(nbytes(written) - 2 * slot - want) <= 0.02 * want
    found = kvjax.compare(
        one, [text], tasks=["get"], samples=1, length=tokens, protocols=["agnostic"], baselines=False,
        out=tmp_path / "run", console=Console(file=io.StringIO()),
    )  # fmt: skip
    (cell,) = found.cells
    assert abs(cell.kept_bytes - slot - want) <= 0.02 * want


@pytest.mark.rotating
@pytest.mark.parametrize("id", sweep(ALL, "kvzip", "adakv"))
def test_33_tokens_never_weigh_more_than_the_full_cache(id):
    methods = [ready(shipped(), kvjax.method(id, budget=b)) for b in (0.25, 0.5, 0.75)]
    sizes = CacheSizes(shipped().config, "float32", 33, [Method(), *methods])
    for room in (0, 128):
        full = sizes.nbytes(Method(), room)
        assert all(not heavier(sizes.nbytes(m, room), full) for m in methods)


@pytest.mark.parametrize("id", sweep(["dms", "kvzap", "wg-kv", "duoattention"], "dms"))
def test_lists_that_evict_have_no_pages_for_their_protected_window(id):
    tokens, window, page = 512, 256, 8
    method = ready(shipped(), kvjax.method(id, window=window, page=page))
    cache = CacheSizes(shipped().config, "float32", tokens, [method]).cache(method)
    lists = shipped().config.layers * shipped().config.kv_heads
    assert {group.bodies[0].most * page for group in cache.groups} == {tokens - window}
    # A page has an owner, a list says where its pages begin and how many of their slots are in use.
    slot = 2 * 4 * shipped().config.head_dim + 4 + 4 * len(method.keep.score.traces)
    held = lists * (tokens * slot + (tokens - window) // page * 4 + 8) + 4
    assert nbytes(cache) == held
    assert sum(pool.owner.shape[0] for pool in cache.pools) * page == lists * (tokens - window)


THRESHOLDS = [
    info.id
    for info in in_pages()
    if info.id != "leankv"
    and isinstance(
        kvjax.method(info.id, **(dict(budget=1.0) if takes_budget(info.id) else {})).keep.allocate, Threshold
    )
]


@pytest.mark.rotating
@pytest.mark.parametrize("id", sweep(THRESHOLDS, "dms", "kvzap"))
def test_thresholds_weigh_no_more_than_the_full_cache_and_what_they_remember(id):
    """Where all stays: beside keys, values and positions, what scores remember, and the pages' tables."""
    method, config = ready(shipped(), kvjax.method(id)), shipped().config
    lists = config.layers * config.kv_heads
    for tokens in (33, 128, 512):
        sizes = CacheSizes(config, "float32", tokens, [Method(), method])
        held, full = sizes.cache(method), sizes.nbytes(Method())
        slot, remembered = full / lists / sizes.tokens, beside(held)
        page = next((pool.page_tokens for pool in held.pools), 1)
        # A page that is begun per list, and one slot for the next token.
        assert nbytes(held) - remembered - full <= lists * page * slot
        if tokens == 33 and id in ("dms", "kvzap", "wg-kv"):
            # Their windows hold all tokens: pools have the one page that none can be without.
            assert {pool.owner.shape[0] for pool in held.pools} == {1}


@pytest.mark.rotating
@pytest.mark.parametrize(("id", "queries"), [("scissorhands", 400), ("corm", 256)])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_queries_that_rows_carry_weigh_half_a_cache_of_so_many_tokens_and_more_below(id, queries, kv_heads):
    """As the docstrings say: at a budget of half, they are made up for beyond `queries` times the group."""
    config = dataclasses.replace(DEEP, layers=2, kv_heads=kv_heads)
    more = {"newest": 8} if id == "corm" else {}
    method, even = kvjax.method(id, budget=0.5, **more), queries * config.heads // kv_heads
    for tokens, above in ((33, True), (even * 9 // 10, True), (even * 11 // 10, False)):
        sizes = CacheSizes(config, "bfloat16", tokens, [Method(), method])
        assert bool(heavier(sizes.nbytes(method), sizes.nbytes(Method()))) == above


def beside(cache):
    """Bytes of a cache that are no keys, values or positions."""
    kept = [cache.next]
    for part in [*cache.pools, *(group.tail for group in cache.groups if group.tail is not None)]:
        kept += [part.k, part.v, part.pos]
    return nbytes(cache) - sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))


@pytest.mark.rotating
@pytest.mark.parametrize("id", sweep(["kvzip", "adakv"], "adakv"))
def test_pages_change_nothing_that_is_kept(id):
    config = Config(vocab=64, d_model=32, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=48)
    model = Model(config, init(config, jax.random.key(0)))
    rows = [np.random.default_rng(i).integers(0, 64, n).tolist() for i, n in enumerate((40, 33))]
    hyper = dict(budget=0.5, **(dict(window=4) if id == "adakv" else {}))
    caches = [
        kvjax.prefill(model, rows, method=kvjax.method(id, **hyper, **page), room=4)[1]
        for page in ({}, {"page": 16})
    ]
    sets = [[np.sort(x, -1)[..., ::-1] for x in kept_positions(c)] for c in caches]
    for mine, other in zip(*sets, strict=True):
        both = min(mine.shape[-1], other.shape[-1])
        np.testing.assert_array_equal(mine[..., :both], other[..., :both])
        assert (mine[..., both:] == -1).all() and (other[..., both:] == -1).all()
    assert nbytes(caches[0]) < nbytes(caches[1])

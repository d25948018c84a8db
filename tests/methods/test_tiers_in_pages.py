"""A second tier where heads or layers have unequal budgets: MiKV over Ada-KV's heads and CAKE's layers."""

import copy
import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.compress.pages import most_left
from kvjax.grammar import Budget, Keep, Method, Store, chain
from kvjax.keep.budgets.budget import AcrossHeads, AcrossLayers, PerLayer, Threshold
from kvjax.keep.budgets.preference import ByAttention
from kvjax.keep.budgets.pyramid import Pyramid
from kvjax.keep.scores.score import Position
from kvjax.methods.user import from_file
from kvjax.state.cache import Paged, nbytes
from kvjax.state.page_gather import gather_pages
from kvjax.steps import Run, settle
from kvjax.store.affine import Affine
from tests.float64.reference import Prompt, rope
from tests.float64.reference import Row as Slotwise
from tests.methods.battery import (
    MAIN,
    PACKED,
    ROOM,
    B,
    T,
    kept_of,
    model,
    observed,
    off,
    params,
    positions,
    prompt_of,
    step,
)
from tests.methods.rows import SNAP, PromptSizes, coded, count, paged
from tests.methods.table import BY_LABEL
from tests.methods.table_bases import sums
from tests.store.test_affine import affine_by_hand
from tests.sweep import sweep

LOW, EIGHT, PLAIN = Store(Affine(4, group=8), Affine(4, group=8)), Store(Affine(8), Affine(8)), Store()
LABELS = ["cake", "adakv", "pyramidkv grouped", "kvzip", "headkv"]


def tiered(label, lower, store=None):
    """Give a method of the table a second tier for what it would drop."""
    keep = dataclasses.replace(BY_LABEL[label].method().keep, lower=lower)
    return chain(keep) if store is None else chain(keep, store)


def held(cache, tier):
    """Per layer, the dense keys of one tier of all rows; a tail is the first tier where that has no pages."""
    found = []
    for group in cache.groups:
        segment = (group.tail, *group.bodies)[tier] if len(group.bodies) == 1 else group.bodies[tier]
        for i in range(next(iter(jax.tree.leaves(segment))).shape[0]):
            one = segment.layer(i)
            found.append(gather_pages(one, cache.pools[one.pool]) if isinstance(one, Paged) else one.keys())
    return found


def tiers(cache):
    """Per layer, row and list, the positions in the first tier (without new tokens) and in the second one."""
    each = [[np.asarray(keys.pos) for keys in held(cache, tier)] for tier in (0, 1)]
    return [
        [
            [tuple({int(p) for p in x[b, k] if p >= 0} for x in layer) for k in range(layer[0].shape[1])]
            for b in range(layer[0].shape[0])
        ]
        for layer in zip(*each, strict=True)
    ]


def by_hand(x, bits, group):
    """x [.., H] as affine codes of groups of channels give it back."""
    codes, scale, zero = affine_by_hand(x.reshape(1, 1, -1, x.shape[-1]), bits, "token", group)
    want = codes * scale.astype(np.float64)[..., None] + zero.astype(np.float64)[..., None]
    return want.reshape(x.shape)


def four_bits(layer, head):
    return partial(by_hand, bits=4, group=8)


def lowered(prompt, kept, codes=(four_bits, four_bits)):
    """Put the codes of what is not kept in place of the prompt's keys and values.

    codes: of keys and of values; (layer, head) -> what comes back of rows.
    """
    new, theta, pos = copy.copy(prompt), prompt.decoder.config.rope.theta, np.arange(prompt.length)
    new.raw_k, new.v = [], []
    for layer, (k, v, stays) in enumerate(zip(prompt.k, prompt.v, kept, strict=True)):
        back = [
            np.stack([of(layer, i)(rows) for i, rows in enumerate(x)])
            for of, x in zip(codes, (k, v), strict=True)
        ]
        k, v = (np.where(stays[..., None], x, low) for x, low in zip((k, v), back, strict=True))
        new.raw_k.append(rope(k, -pos, theta))
        new.v.append(v)
    return new


def test_the_word_for_it_gives_every_keep_a_second_tier():
    cake = BY_LABEL["cake"].method()
    assert kvjax.tiered(cake, bits=4, group=8).keep == tiered("cake", LOW).keep
    mikv = kvjax.method("mikv", budget=0.5, low=4, group=8)
    bare = Method(dataclasses.replace(mikv.keep, lower=None), mikv.store)
    assert kvjax.tiered(bare, bits=4, group=8).keep == mikv.keep


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("int8", "drops no slots: give a method that drops some"),
        ("mikv", "has a second tier already"),
        ("keepkv", "leave out the merge"),
        ("kvzap", "after every token"),
        ("snapkv + kivi", "second tier, which needs that tokens are encoded one by one"),
    ],
)
def test_what_cannot_have_a_second_tier_says_why(method, message):
    with pytest.raises(kvjax.InputError, match=message):
        kvjax.tiered(BY_LABEL[method].method())


FILE = """
import kvjax

def lowered():
    cake = kvjax.method("cake", budget=0.5, window={window}, kernel={kernel}, page=4, tau1=1.6, tau2=0.6)
    return kvjax.tiered(cake, bits=4, group=8)
"""


@pytest.mark.rotating
@pytest.mark.parametrize("label", sweep(LABELS[:3], "cake"))
def test_a_prompts_tiers_are_what_stays_and_the_codes_of_all_else(label):
    row = BY_LABEL[label]
    method, name = tiered(label, LOW), row.model
    run, read = Run(model(name).config, method), observed(name)
    cache = jax.jit(partial(settle, run, tokens=T, room=ROOM, compress=True))(params(name), read, None)
    found, at = tiers(cache), 0
    for keys, fresh in zip(held(cache, 1), read.fresh, strict=True):
        pos = np.asarray(keys.pos)
        for got, x in ((keys.k, fresh.k), (keys.v, fresh.v)):
            want = np.take_along_axis(by_hand(np.asarray(x[0]), 4, 8), np.maximum(pos, 0)[..., None], 2)
            # A scale may be the float16 beside another one.
            np.testing.assert_allclose(np.asarray(got)[pos >= 0], want[pos >= 0], atol=4e-3)
        for b in range(B):
            stays = kept_of(label, prompt_of(name, "main", b))[at]
            assert found[at][b] == [(set(np.flatnonzero(x)), set(np.flatnonzero(~x))) for x in stays]
        at += 1


@pytest.mark.parametrize("label", sweep(LABELS))
@pytest.mark.rotating
def test_a_conversation_attends_to_what_stays_and_to_the_codes_of_all_else(label):
    m = model(BY_LABEL[label].model)
    _, cache = kvjax.prefill(m, MAIN.first, method=tiered(label, LOW), room=ROOM)
    rows = []
    for b in range(B):
        prompt = prompt_of(BY_LABEL[label].model, "main", b)
        kept = kept_of(label, prompt)
        for layer, stays in zip(tiers(cache), kept, strict=True):
            assert layer[b] == [(set(np.flatnonzero(x)), set(np.flatnonzero(~x))) for x in stays]
        rows.append(Slotwise(lowered(prompt, kept), [np.ones_like(x) for x in kept]))
    before = tiers(cache)
    for token in MAIN.steps:
        logits, cache = step(m, cache, token, append=True)
        for b in range(B):
            assert off(logits[b], rows[b].step(token[b])) < 2e-3
            assert [lists[b] for lists in positions(cache)] == rows[b].positions()
        assert tiers(cache) == before


@pytest.mark.rotating
@pytest.mark.parametrize("label", ["adakv", "kvzip"])
def test_a_second_tier_may_be_fitted_to_layers(label):
    m, method = model("4/2"), tiered(label, BY_LABEL["csr"].method().store)
    _, cache = kvjax.prefill(m, MAIN.first, method=method, room=ROOM)
    rows = []
    for b in range(B):
        prompt = prompt_of("4/2", "main", b)
        kept = kept_of(label, prompt)
        new = lowered(prompt, kept, (sums("key"), sums("value")))
        rows.append(Slotwise(new, [np.ones_like(x) for x in kept]))
    for token in MAIN.steps:
        logits, cache = step(m, cache, token, append=True)
        for b in range(B):
            assert off(logits[b], rows[b].step(token[b])) < 2e-3


@pytest.mark.rotating
def test_forks_and_files_go_on_as_what_they_come_from(tmp_path):
    row = BY_LABEL["cake"]
    (tmp_path / "mine.py").write_text(FILE.format(**SNAP))
    method = from_file(f"{tmp_path / 'mine.py'}:lowered")
    assert method.keep == tiered("cake", LOW).keep
    m = model(row.model)
    _, cache = kvjax.prefill(m, MAIN.first, method=method, room=ROOM)
    kvjax.save_cache(tmp_path / "cache.safetensors", cache)
    read, forked = kvjax.load_cache(tmp_path / "cache.safetensors"), kvjax.fork(cache, 2)
    assert tiers(read) == tiers(cache)
    assert [layer[1::2] for layer in tiers(forked)] == tiers(cache)
    want, _ = step(m, cache, MAIN.steps[0], append=True)
    assert off(step(m, read, MAIN.steps[0], append=True)[0], want) == 0
    both, _ = step(m, forked, np.repeat(MAIN.steps[0], 2), append=True)
    assert max(off(both[::2], want), off(both[1::2], want)) < 1e-6
    with pytest.raises(kvjax.InputError, match="a selection cannot be undone"):
        kvjax.rollback(forked, 1)


@pytest.mark.parametrize("label", sweep(LABELS[:3]))
@pytest.mark.rotating
def test_where_both_tiers_are_exact_a_second_turn_chooses_as_one_prompt_does(label):
    """Nothing is lost on the way, so a second turn chooses among all tokens of both."""
    row = BY_LABEL[label]
    m, method = model(row.model), tiered(label, PLAIN)
    _, first = kvjax.prefill(m, MAIN.first, method=method, room=ROOM)
    logits, cache = kvjax.prefill(m, MAIN.second, cache=first, room=8)
    want, full = kvjax.prefill(m, [a + b for a, b in zip(MAIN.first, MAIN.second, strict=True)])
    assert off(logits, want) < 1e-5
    found = tiers(cache)
    for b in range(B):
        prompt = Prompt(prompt_of(row.model, "main", b).decoder, MAIN.first[b] + MAIN.second[b])
        for layer, stays in zip(found, kept_of(label, prompt), strict=True):
            assert layer[b] == [(set(np.flatnonzero(x)), set(np.flatnonzero(~x))) for x in stays]


@pytest.mark.parametrize("label", sweep(["mikv", "adakv", "cake"]))
@pytest.mark.rotating
def test_a_row_that_ended_in_an_earlier_chunk_keeps_its_tiers(label):
    uniform = label == "mikv"
    method = kvjax.method("mikv", budget=0.5, low=4, group=8) if uniform else tiered(label, LOW)
    m = model("4/2" if uniform else BY_LABEL[label].model)
    tokens = [(MAIN.first[0] * 2)[:n] for n in (48, 32, 20)]
    _, cache = kvjax.prefill(m, tokens, method=method, room=8, chunk=16)
    firsts = [[count(n)] * 2 for n in (48, 32, 20)]
    total = 0
    for layer, some in zip(positions(cache), tiers(cache), strict=True):
        for row, lists in enumerate(layer):
            assert lists == [set(range(len(tokens[row])))] * 2
            assert all(len(a) + len(b) == len(tokens[row]) for a, b in some[row])
        sizes = np.array([[len(first) for first, _ in lists] for lists in some])
        total = total + sizes.sum(1)
        if label != "cake":
            assert (sizes.sum(1) == np.sum(firsts, 1)).all()
    assert (total == m.config.layers * np.sum(firsts, 1)).all()


@pytest.mark.parametrize("label", sweep(["cake", "adakv"], "cake"))
def test_bytes_are_those_of_two_pools(label):
    row, one = BY_LABEL[label], label == "cake"
    c = model(row.model).config
    run, read = Run(c, tiered(label, LOW, EIGHT)), observed(row.model)
    sizes = dict(tokens=T, room=ROOM, compress=True)
    cache = jax.eval_shape(lambda p, x: settle(run, p, x, None, **sizes), params(row.model), read)
    s = PromptSizes(len(PACKED), c.kv_heads, c.heads, c.head_dim, c.layers, T, ROOM)
    first = paged(lambda s, i: s.k * count(s.tokens), slot=coded(8), one_pool=one)(s)
    left = lambda s, i: s.k * (s.tokens - count(s.tokens))  # noqa: E731
    # The room and the rows' next positions are there once.
    second = paged(left, slot=coded(4, 2), one_pool=one)(s._replace(room=0)) - 4 * s.b
    assert nbytes(cache) == first + second


ALLOCATIONS = [
    AcrossHeads(), AcrossHeads(0.5, blend=False), AcrossLayers(), PerLayer((0.5, 3.0, None)), Threshold(0.3),
    Pyramid(4.0, 3, "paper"), Pyramid(4.0, 3, "paper", Budget(0.3)), Pyramid(4.0, 3, "kvpress", Budget(0.3)),
    ByAttention(3),
]  # fmt: skip


@pytest.mark.rotating
@pytest.mark.parametrize("budget", [Budget(0.3), Budget(7)], ids=str)
@pytest.mark.parametrize("allocate", sweep(ALLOCATIONS, AcrossHeads(), ALLOCATIONS[-1]))
def test_what_does_not_stay_fits_what_is_made_for_it(allocate, budget, rng):
    """For rows of any length, and tight where counts are a matter of lengths."""
    tokens, layers, heads = 24, 3, 2
    length = np.arange(1, tokens + 1, dtype=np.int32)
    scores = rng.random((layers, tokens, heads, tokens)).astype(np.float32)
    scores = np.where(np.arange(tokens) < length[:, None, None], scores, -np.inf)
    wanted = jnp.asarray(rng.random((layers, tokens, heads)), jnp.float32)
    more = [wanted] * isinstance(allocate, ByAttention)
    kept = np.asarray(allocate.counts(jnp.asarray(scores), budget.count(jnp.asarray(length)), *more))
    left = np.maximum(length[None, :, None] - kept, 0).sum(-1)
    keep = Keep(Position(), budget, allocate)
    most = np.array(most_left(keep, tokens, layers, heads))
    if allocate.across_layers:
        assert left.sum(0).max() == most.sum()
    else:
        assert (left.max(1) <= most).all()
        if isinstance(allocate, AcrossHeads | PerLayer) or getattr(allocate, "variant", "") == "paper":
            assert (left.max(1) == most).all()

"""Picks that persist: which slots every layer reads, in float64, and what steps are said to read."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.compress.unread import unread_bytes
from kvjax.models.config import Config
from kvjax.models.mixers.attention import Attention
from kvjax.models.model import Model
from kvjax.models.params import init, plan
from kvjax.read.persistent import PersistentSlots
from kvjax.steps import Run
from tests.float64.reads import tidal
from tests.float64.reference import Decoder, Prompt, Row
from tests.methods.battery import MAIN, VOCAB, B, off, positions

SIZES = dict(vocab=VOCAB, d_model=32, head_dim=16, d_ff=48, layers=6, heads=4, kv_heads=2)
METHOD = kvjax.method("tidaldecode", budget=0.25, reselect=3, newest=3, skip_layers=1)
NEWEST, PICKS = 3, (1, 3)


def model(**more):
    config = Config(**SIZES | more)
    return Model(config, init(config, jax.random.key(4)))


def quarter(slots):
    return max(1, slots // 4)


def test_layers_read_what_the_layer_below_that_ranks_has_picked():
    m, read = model(), [{} for _ in range(B)]
    _, cache = kvjax.prefill(m, MAIN.first, method=METHOD, room=8)
    rows = []
    for tokens, seen in zip(MAIN.first, read, strict=True):
        prompt = Prompt(Decoder(m), tokens)
        attends = tidal(quarter, picks=PICKS, newest=NEWEST, skip=1, seen=seen)
        rows.append(Row(prompt, [np.ones((len(k), len(tokens)), bool) for k in prompt.k], attends=attends))
    for token in MAIN.steps:
        logits, cache = kvjax.step(m, cache, token)
        want = np.stack([row.step(t) for row, t in zip(rows, token, strict=True)])
        assert off(logits, want) < 3e-5
    for row, seen in zip(rows, read, strict=True):
        whole, newest = set(range(row.next)), {row.next - 1 - i for i in range(NEWEST + 1)}
        for head in range(2):
            assert seen[0, head] == seen[1, head] == seen[3, head] == whole
            assert len(seen[2, head] - newest) == quarter(row.next - 1 - NEWEST) and newest <= seen[2, head]
            assert seen[4, head] == seen[5, head]
    assert any(seen[2, head] != seen[4, head] for seen in read for head in range(2))


@pytest.mark.rotating
def test_a_layer_that_evicted_by_itself_reads_the_picked_tokens_that_it_holds():
    """Layers have methods of their own: picks are tokens, not slots, where some of them evict."""
    m = model()
    evicts = kvjax.chain(kvjax.method("snapkv", budget=0.5, window=NEWEST), METHOD)
    method = kvjax.by_layer([METHOD, METHOD, evicts, METHOD, METHOD, evicts])
    _, cache = kvjax.prefill(m, MAIN.first, method=method, room=8)
    held, rows = positions(cache), []
    for b, tokens in enumerate(MAIN.first):
        prompt = Prompt(Decoder(m), tokens)
        kept = [
            np.stack([np.isin(np.arange(len(tokens)), sorted(one)) for one in layer[b]]) for layer in held
        ]
        assert kept[0].all() and not kept[2].all()
        rows.append(Row(prompt, kept, attends=tidal(quarter, picks=PICKS, newest=NEWEST, skip=1)))
    for token in MAIN.steps:
        logits, cache = kvjax.step(m, cache, token)
        assert off(logits, np.stack([row.step(t) for row, t in zip(rows, token, strict=True)])) < 3e-5


def test_only_layers_that_take_picks_leave_bytes_unread():
    m = model()
    _, cache = kvjax.prefill(m, MAIN.first, method=METHOD, room=8)
    gms = Run(m.config, METHOD).groups(m.params)
    body = cache.groups[2].bodies[0].capacity
    slot = 2 * 16 * 4
    left = B * 2 * (body - quarter(body)) * slot
    found = [unread_bytes(gm, group) for gm, group in zip(gms, cache.groups, strict=True)]
    assert found == [0, 0, left, 0, left, left]


@pytest.mark.rotating
def test_layers_with_a_window_neither_pick_nor_take():
    m = model(windows=(None, 5, None, 5, None, None))
    gms = Run(m.config, METHOD).groups(m.params)
    assert [gm.picker for gm in gms] == [None, None, 2, None, 4, 4]
    _, cache = kvjax.prefill(m, MAIN.first, method=METHOD, room=8)
    assert np.isfinite(kvjax.step(m, cache, MAIN.steps[0])[0]).all()


@pytest.mark.rotating
def test_what_cannot_share_picks_is_refused():
    stacked = model()
    params = init(stacked.config, jax.random.key(4), groups=plan(stacked.config, stacked=True))
    with pytest.raises(ValueError, match="picks slots in layer 0 for those above it, and layers 0 to 1 are"):
        every = kvjax.method("tidaldecode", budget=0.25, reselect=3, skip_layers=0)
        Run(stacked.config, every).groups(params)
    mixed = tuple(Attention(kv_heads=2 if i else 1) for i in range(6))
    with pytest.raises(InputError, match="unequal numbers of lists, and cannot share picks"):
        kvjax.prefill(model(mixers=mixed), MAIN.first, method=METHOD)


def test_the_paper_picks_in_its_third_and_fourteenth_layer():
    word = PersistentSlots(kvjax.method("tidaldecode", budget=0.5).read.budget)
    assert word.starts(32) == (2, 13) and dataclasses.replace(word, again=1).starts(32) == (2, 2)

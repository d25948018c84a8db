"""Restore tokens: the loss of their fit against float64 numpy, positions, refusals, what a fit is worth."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.fitting.prompts.restore import restored, run_of
from kvjax.grammar import Budget, Keep
from kvjax.grammar.fitted import Fitted, with_fitted
from kvjax.grammar.when import STEP
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.patterns import Recent
from kvjax.keep.prompts.restore import RestoreTokens
from kvjax.keep.scores.score import KeyNorm
from tests.fitting.test_learned import questions
from tests.fitting.test_marked import batch_of, method_of, right, said, samples_of
from tests.float64.reference import Prompt
from tests.float64.reference import Row as Slotwise
from tests.methods import marked
from tests.methods.battery import MAIN, decoder, model
from tests.methods.table import BY_LABEL

MANY = marked.RESTORED.tokens
short = dict(rate=0.0, epochs=1)


def method(fitted=marked.RESTORED.fitted, **more):
    return method_of("restorekv", fitted, **more)


@pytest.mark.rotating
def test_the_loss_of_restore_tokens_is_what_it_is_by_hand():
    m, samples, off = model("4/2"), questions(), []
    for sample in samples:
        plain = Prompt(decoder("4/2"), sample.context)
        found = marked.RESTORED(plain)
        q = said(Slotwise(found, marked.RESTORED.kept(found)), sample)
        p = said(Slotwise(plain, [np.ones((2, plain.length), bool)] * 2), sample)
        off += ((np.exp(p) - np.exp(q)) * (p - q)).sum(-1).tolist()
    full = method(budget=0.5)
    run = run_of(m, full, full.keep.restore.fitted)
    got = jax.jit(restored, static_argnums=0)(run, with_fitted(m.params, full), batch_of(m, samples))
    assert abs(got / np.mean(off) - 1) < 1e-4


@pytest.mark.rotating
def test_restore_tokens_stand_behind_every_turn_and_take_slots_of_its_budget():
    m, rows = model("4/2"), MAIN.first
    lengths = np.array([len(row) for row in rows])
    _, cache = kvjax.prefill(m, rows, method=method(budget=0.5), room=4)
    assert cache.next.tolist() == (lengths + MANY).tolist()
    total = 0
    for pos in kvjax.kept_positions(cache):
        for b, length in enumerate(lengths):
            stand = pos[b][pos[b] >= length]
            assert stand.reshape(2, -1).tolist() == [[*range(length, length + MANY)]] * 2
        total += (np.asarray(pos) >= 0).sum((1, 2))
    assert total.tolist() == (2 * 2 * (lengths // 2)).tolist()
    chunked = kvjax.prefill(m, rows, method=method(budget=0.5), room=4, chunk=8)[1]
    assert chunked.next.tolist() == (lengths + MANY * -(-lengths // 8)).tolist()


@pytest.mark.rotating
def test_twenty_steps_bring_what_is_left_nearer_to_all_slots():
    m, start = model("4/2"), method(None, budget=0.5)
    batch, off = batch_of(m, questions()), []
    for rate in (0.0, 1e-2):
        found = kvjax.fit(m, start, questions(), epochs=20, rate=rate, rank=2)
        run, params = run_of(m, start, found), with_fitted(m.params, method(found, budget=0.5))
        off.append(float(jax.jit(restored, static_argnums=0)(run, params, batch)))
    assert off[1] < off[0]


def test_what_restore_tokens_cannot_do_is_said():
    with pytest.raises(ValueError, match="restore tokens, at least 1, got 0"):
        RestoreTokens(0)
    word, m = RestoreTokens(MANY, marked.RESTORED.fitted), model("4/2")
    with pytest.raises(ValueError, match="all layers at the end of prompts alone"):
        kvjax.chain(Keep(KeyNorm(), Budget(0.5), Uniform(), (Recent(1),), when=STEP, restore=word))
    with pytest.raises(InputError, match=r"must stay \(.*RestoreTokens.*more than the budget of 1 slots"):
        kvjax.prefill(m, MAIN.first, method=method(budget=0.1), room=1)
    with pytest.raises(InputError, match=r"\(one, tokens, width\) of its restore tokens are \(1, 2, 32\)"):
        kvjax.prefill(m, MAIN.first, method=method(budget=0.5, tokens=3), room=1)
    with pytest.raises(InputError, match="never fitted to a model: run `kvjax fit 'restorekv:budget=0.5,"):
        kvjax.prefill(m, MAIN.first, method=method(None, budget=0.5), room=1)
    with pytest.raises(InputError, match="restore tokens take up what leaves a cache, and nothing leaves"):
        kvjax.fit(m, "restorekv", questions())
    near = dataclasses.replace(m.config, max_positions=max(map(len, MAIN.first)) + MANY - 1)
    with pytest.raises(InputError, match="the prompt reaches position"):
        kvjax.prefill(dataclasses.replace(m, config=near), MAIN.first, method=method(budget=0.5), room=0)
    arrays = {
        n: np.repeat(x[:1], 3, 0) if len(x) == 2 else x for n, x in marked.RESTORED.fitted.arrays.items()
    }
    with pytest.raises(InputError, match="layer 0 is .* the window"):
        three = Fitted(arrays, "RestoreTokens", "")
        kvjax.prefill(model("windowed"), MAIN.first, method=method(three, budget=0.5), room=1)


def test_the_sentence_is_kvzips_with_restore_tokens():
    keep, base = method(budget=0.5).keep, BY_LABEL["kvzip"].method().keep
    assert dataclasses.replace(keep, restore=None, protect=base.protect) == base


@pytest.mark.slow
def test_a_fit_of_restore_tokens_finds_what_kvzip_loses():
    m = kvjax.load("recall-tiny")
    seen, hyper = samples_of(m, 128, 32), dict(budget=0.125, page=16)
    fits = [kvjax.fit(m, kvjax.method("restorekv", **hyper), seen, **x) for x in (short, dict(epochs=6))]
    batch = batch_of(m, samples_of(m, 16, 8))
    loss = jax.jit(restored, static_argnums=0)
    methods = [kvjax.method("restorekv", fitted=x, **hyper) for x in fits]
    start, end = (
        loss(run_of(m, one, x), with_fitted(m.params, one), batch)
        for one, x in zip(methods, fits, strict=True)
    )
    assert end < 0.9 * start
    before, after = (right(m, one)[1] for one in methods)
    assert after > before

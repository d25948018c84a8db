"""EvolKV's search for budgets of layers: what it counts, and that it finds the layer that answers need."""

import importlib.util

import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.eval.tasks.sample import ForcedSample
from kvjax.fitting.statistics.search import _asked, _right, _run
from tests.methods.battery import MAIN, model

HYPER = dict(budget=0.4, window=3, kernel=3, page=4)


def questions(m, method):
    """Answers of which the model says some by itself, behind what the method leaves of their contexts."""
    out = []
    for i, context in enumerate(MAIN.first):
        logits, cache = kvjax.prefill(m, [[*context, 4, 8]], method=method, room=8)
        answer = []
        for turn in range(2 + i % 2):
            said = int(np.argmax(logits[0]))
            answer.append(said if (i + turn) % 2 else (said + 1) % 64)
            logits, cache = kvjax.step(m, cache, [answer[-1]])
        out.append(ForcedSample("", "get", tuple(context), (4, 8), tuple(answer), ((0, 3),)))
    return out


@pytest.mark.rotating
def test_what_is_counted_is_what_the_model_says_behind_compressed_prompts_token_by_token():
    m = model("4/2")
    run, fitted = _run(m, kvjax.method("evolkv", **HYPER))
    samples = questions(m, run.method)
    params = m.params | {"fitted": {fitted.digest: {n: np.asarray(x) for n, x in fitted.arrays.items()}}}
    right, count = _right(run, params, _asked(m, samples))
    want = sum((i + turn) % 2 for i, s in enumerate(samples) for turn in range(len(s.answer)))
    assert 0 < want < count == sum(len(s.answer) for s in samples)
    assert right == want


def test_what_cannot_be_searched_for_is_refused_before_anything_runs():
    m = model("4/2")
    samples = [ForcedSample("", "get", tuple(MAIN.first[0]), (4,), (5,), ((0, 3),))]
    with pytest.raises(InputError, match="keeps all of 33 tokens, and budgets are searched for"):
        kvjax.fit(m, "evolkv", samples, budget=1.0)
    with pytest.raises(InputError, match="has no option 'rate', it takes layers, epochs, seed"):
        kvjax.fit(m, "evolkv", samples, budget=0.5, rate=1.0)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("cmaes") is None, reason="pip install 'kvjax[fit]'")
def test_a_search_finds_budgets_that_answer_more_questions_than_equal_ones():
    from kvjax.commands.texts import read_texts

    m = kvjax.load("recall-tiny")
    read = lambda seed: read_texts(  # noqa: E731
        m, text=None, tasks=None, rows=16, length=512, seed=seed, questions=True
    )
    method = kvjax.method("evolkv", budget=0.25, window=16, page=16)
    found = kvjax.fit(m, method, read(0), epochs=4)
    run, fitted = _run(m, method)
    asked = _asked(m, [s for s in read(1) if s.answer and s.spans])
    share = [
        float(np.divide(*_right(run, m.params | {"fitted": {fitted.digest: arrays}}, asked)))
        for arrays in (fitted.arrays, found.arrays)
    ]
    assert share[1] > share[0] + 0.1

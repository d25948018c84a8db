"""A classifier of tokens: its regression, its labels, what it keeps, and what is refused."""

import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.prompts.classifier import RIDGE, Classifier, kept_by_kvzip, regression
from tests.prompts.test_shorten import TEXTS, outputs_of


@pytest.fixture(scope="module")
def model():
    return kvjax.load("bytes-tiny")


@pytest.fixture(scope="module")
def classifier(model):
    return kvjax.fit_classifier(model, TEXTS)


def test_the_regression_is_the_minimum_of_its_loss():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3))
    y = x @ [1.0, -2.0, 0.5] + 0.3 + rng.normal(size=60) > 0

    def loss(w, b):
        z = np.where(y, 1, -1) * (x @ w + b)
        return np.log1p(np.exp(-z)).mean() + RIDGE * np.square(x).mean() * w @ w / 2

    w, b = regression(x, y)
    for step in rng.normal(size=(20, 4)) * 1e-3:
        assert loss(w, b) < loss(w + step[:3], b + step[3])
    assert np.sign(w).tolist() == [1, -1, 1]


def test_labels_are_the_tokens_of_the_largest_kvzip_scores(model):
    ids = ids_of(TEXTS[2])
    found = kvjax.scores(model, [ids.tolist()], "kvzip(budget=0.25)", continuation=[[1]]).scores
    layers = [s[0] for s in found if s is not None]
    largest = [max(s[k, t] for s in layers for k in range(len(s))) for t in range(len(ids))]
    kept = kept_by_kvzip(model, ids, 0.25)
    assert kept.sum() == round(len(ids) / 4)
    assert min(np.array(largest)[kept]) >= max(np.array(largest)[~kept])
    # A text has fewer tokens than outputs have channels, so its own labels can be told apart.
    fitted = kvjax.fit_classifier(model, [TEXTS[2]], keep=0.25)
    assert ((fitted.logits(model, ids) > 0) == kept).all()


@pytest.mark.rotating
def test_the_tokens_of_the_largest_odds_stay_and_agree_with_kvzip(model, classifier):
    short = kvjax.shorten(model, TEXTS[:2], keep=0.3, by="llmlingua2", classifier=classifier)
    odds = [(outputs_of(model, t) - classifier.mean) @ classifier.weight + classifier.bias for t in TEXTS[:2]]
    total = sum(map(len, odds))
    limit = np.sort(np.concatenate(odds))[::-1][round(0.3 * total) - 1]
    want = [np.flatnonzero(o >= limit).tolist() for o in odds]
    assert [one.positions.tolist() for one in short.kept] == [w for w in want if w]
    assert short.tokens == round(0.3 * total)
    # Half of the labels are true, so half of them would agree by chance.
    agree = []
    for text, mine in zip(TEXTS, (classifier.logits(model, ids_of(t)) for t in TEXTS), strict=True):
        agree += ((mine > 0) == kept_by_kvzip(model, ids_of(text), 0.5)).tolist()
    assert np.mean(agree) > 0.9


def ids_of(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def test_what_cannot_be_fitted_or_used_is_refused(model):
    for texts, keep, message in (
        ([], 0.5, "expected a list of texts"),
        ("one", 0.5, "expected a list of texts"),
        (["a"], 1.0, "a number in"),
    ):
        with pytest.raises(InputError, match=message):
            kvjax.fit_classifier(model, texts, keep=keep)
    with pytest.raises(
        InputError, match="needs a classifier, got None: give classifier=kvjax.fit_classifier"
    ):
        kvjax.shorten(model, TEXTS, by="llmlingua2")
    foreign = Classifier(np.zeros(model.config.d_model), np.zeros(model.config.d_model), 0.0, "other")
    with pytest.raises(InputError, match="fitted on outputs of other"):
        kvjax.shorten(model, TEXTS, by="llmlingua2", classifier=foreign)

"""The study of link tokens: its page shows its data, and what it measures of a whole text is the model's."""

import numpy as np

import kvjax
from scripts.studies import linked


def test_the_page_shows_the_data():
    assert linked.PAGE.agrees() and len(linked.DATA.read()["rows"]) == 4


def test_a_context_that_is_one_text_has_the_models_own_probabilities(monkeypatch):
    monkeypatch.setattr(linked, "PIECES", 2)
    model = kvjax.load("recall-tiny")
    text, answer = linked.rows_of(model, 1, seed=3)[0]
    assert len(text) == linked.LENGTH + linked.AFTER
    links = [kvjax.fit_links(model, [text], tokens=2, documents=n, rate=0.0) for n in (1, 2)]
    found = linked.measured(model, text, answer, *links)
    logits = np.asarray(model(np.asarray([text]))[0], np.float64)
    said = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    said -= logits.max(-1, keepdims=True)
    want = -said[np.arange(len(text) - answer - 1, len(text) - 1), text[-answer:]].mean()
    np.testing.assert_allclose(found["one text"][0], want, rtol=1e-4, atol=1e-6)
    assert len({round(surprise, 6) for surprise, _ in found.values()}) == 4

"""Link tokens between joined texts, against a decoder in float64 that hides other documents."""

import dataclasses
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.fitting.prompts.links import joined_documents, surprise
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.models.model import Model
from kvjax.steps import Run
from tests.float64.reference import Decoder, Prompt
from tests.methods.battery import model, off

VOCAB, LINKS, DOCUMENTS = 64, 3, 3
DRAW = np.random.default_rng(3)
TEXTS = [[DRAW.integers(0, VOCAB, n).tolist() for n in row] for row in ((9, 4, 7), (5, 8, 6))]
AFTER = [DRAW.integers(0, VOCAB, 6).tolist() for _ in TEXTS]


def given(texts=DOCUMENTS) -> Fitted:
    width = model("4/2").config.d_model
    return Fitted({"links": DRAW.normal(size=(1, texts, LINKS, width)).astype(np.float32)}, "Links", "")


@cache
def links() -> Fitted:
    return given()


def read_apart():
    """Return a cache for each document, of both rows."""
    return [kvjax.prefill(model("4/2"), [row[i] for row in TEXTS])[1] for i in range(DOCUMENTS)]


@cache
def wanted(b):
    """Return the logits of row b's documents, links and what follows; links are further tokens."""
    m = model("4/2")
    embed = jnp.concatenate(
        [m.params["embed"], jnp.asarray(links().arrays["links"][0]).reshape(-1, m.config.d_model)]
    )
    wide = Model(m.config, {**m.params, "embed": embed})
    tokens, segment = [], []
    for i, text in enumerate(TEXTS[b]):
        tokens += [*text, *(VOCAB + LINKS * i + j for j in range(LINKS))]
        segment += [i + 1] * len(text) + [0] * LINKS
    segment = np.array([*segment, *[0] * len(AFTER[b])])
    # The authors' mask: what belongs to a document sees its document, and everything else sees all.
    hidden = (segment[:, None] != segment[None]) & (segment[:, None] != 0)
    return Prompt(Decoder(wide), [*tokens, *AFTER[b]], hides=lambda *_: hidden).all_logits


def test_links_attend_to_all_texts_before_them_and_texts_to_themselves_alone():
    past = kvjax.join(model("4/2"), read_apart(), room=8, links=links())
    assert past.next.tolist() == [sum(map(len, row)) + DOCUMENTS * LINKS for row in TEXTS]
    logits, past = kvjax.verify(model("4/2"), past, AFTER)
    for b in range(2):
        assert off(logits[b], wanted(b)[-len(AFTER[b]) :]) < 1e-5
    # They matter.
    bare, _ = kvjax.verify(model("4/2"), kvjax.join(model("4/2"), read_apart(), room=8), AFTER)
    assert off(bare, logits) > 1e-3


def test_a_fit_minimises_what_the_texts_that_follow_are_worth_over_linked_documents():
    m = model("4/2").in_runs()
    batch = joined_documents(m, TEXTS, AFTER, LINKS)
    got = surprise(Run(m.config, Method()), m.params, jnp.asarray(links().arrays["links"][0]), batch)
    want = []
    for b, ids in enumerate(AFTER):
        said = wanted(b)[-len(ids) : -1]
        logp = said - np.log(np.exp(said - said.max(-1, keepdims=True)).sum(-1, keepdims=True))
        logp -= said.max(-1, keepdims=True)
        want.append(-np.take_along_axis(logp, np.array(ids[1:])[:, None], -1))
    np.testing.assert_allclose(got, np.mean(want), rtol=1e-5)


@pytest.mark.rotating
def test_links_are_read_over_compressed_texts_and_all_stay():
    m = model("4/2")
    method = kvjax.method("snapkv", budget=0.5, window=1)
    half = [kvjax.prefill(m, [row[i] for row in TEXTS], method=method)[1] for i in range(3)]
    past = kvjax.join(m, half, room=8, links=links())
    held = kvjax.kept_positions(past)[0]
    ends = np.cumsum([[len(t) for t in row] for row in TEXTS], 1) + LINKS * np.arange(3)
    for b in range(2):
        live = set(np.asarray(held[b][0]).tolist()) - {-1}
        assert {int(e) + j for e in ends[b] for j in range(LINKS)} <= live
        assert len(live) < past.next[b]


@pytest.mark.rotating
def test_fitted_links_make_what_follows_likelier():
    """Texts repeat their first document at their end, which only a link can point out."""
    m, draw = model("4/2"), np.random.default_rng(5)
    rows = [(draw.integers(0, VOCAB, 12).tolist() * 4)[:40] for _ in range(8)]
    how = dict(tokens=2, documents=3, batch=4, seed=1)
    before, after = (kvjax.fit_links(m, rows, epochs=n, rate=r, **how) for n, r in ((1, 0.0), (20, 0.02)))
    parts = [[r[:9], r[9:14], r[14:20]] for r in rows]
    batch = joined_documents(m.in_runs(), parts, [r[20:] for r in rows], 2)
    run = Run(m.in_runs().config, Method())
    said = [
        float(surprise(run, m.in_runs().params, jnp.asarray(x.arrays["links"][0]), batch))
        for x in (before, after)
    ]
    assert said[1] < said[0] - 0.05


def test_links_that_do_not_fit_are_refused():
    m, caches = model("4/2"), read_apart()
    wrong = {
        "links are for at most 2 texts, got 3 caches": given(2),
        "links are for a model of another": dataclasses.replace(links(), model="another"),
        "links are arrays for Gate, expected what": dataclasses.replace(links(), word="Gate"),
    }
    for why, one in wrong.items():
        with pytest.raises(InputError, match=why):
            kvjax.join(m, caches, links=one)
    with pytest.raises(InputError, match="recompute and links were given, expected one of them"):
        kvjax.join(m, caches, links=links(), texts=[[r[i] for r in TEXTS] for i in range(3)], recompute=0.5)
    with pytest.raises(InputError, match="too short for 10 documents"):
        kvjax.fit_links(m, [list(range(20))])
    with pytest.raises(InputError, match="share=1.5 was given"):
        kvjax.fit_links(m, [list(range(60))], share=1.5)

"""Drafts over few slots of the cache that judges them: exact, in the same memory (TriForce, MagicDec)."""

import dataclasses
import gc
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

import kvjax
from kvjax.api.drafts import drafting
from kvjax.grammar import Budget, Method
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.read.pages import PageBounds
from kvjax.state.cache import nbytes
from tests.methods.battery import model

PROMPTS = [np.random.default_rng(n).integers(0, 64, n).tolist() for n in (67, 41)]
PAGE, READ = 8, "quest(budget=8, page=8, skip_layers=0)"
WHOLE = "quest(budget=1.0, page=8, skip_layers=0)"


class Noting(PageBounds):
    """Quest's read, which notes the pages that every layer picks."""

    noted: ClassVar[list] = []

    def select(self, q, body, layer, length, implementation=None):
        pages, counts = super().select(q, body, layer, length, implementation)
        jax.debug.callback(lambda *x: self.noted.append([np.asarray(y) for y in x]), layer, pages, counts)
        return pages, counts


def test_greedy_texts_are_those_of_all_slots_and_no_second_cache_is_held():
    config = dataclasses.replace(model("4/2").config, layers=1)
    m = Model(config, init(config, jax.random.key(1)))
    plain = kvjax.generate(m, PROMPTS, max_new_tokens=24, stop=[])
    gc.collect()
    others = sum(x.nbytes for x in jax.live_arrays())
    held = []

    def note(row, tokens):
        held.append(sum(x.nbytes for x in jax.live_arrays()) - others)

    out = kvjax.speculate(
        m, PROMPTS, draft=kvjax.FewerSlots(READ), k=3, max_new_tokens=24, stop=[], on_tokens=note
    )
    assert (out.tokens == np.asarray(plain.tokens)).all()
    assert 0 < out.accepted < out.drafted and out.passes < 24
    # Beside one cache there are logits and probabilities of the tokens of a round, less than half a cache.
    assert nbytes(out.cache) <= max(held) < 1.5 * nbytes(out.cache)
    assert out.cache.next.tolist() == plain.cache.next.tolist()
    more = [kvjax.prefill(m, [[1, 2], [3]], cache=c)[0] for c in (out.cache, plain.cache)]
    np.testing.assert_allclose(more[0], more[1], rtol=1e-4, atol=1e-5)


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("method", "alike"),
    [
        ("snapkv(budget=0.5, window=4)", "snapkv(budget=0.5, window=4)"),
        ("adakv(budget=0.5, window=4)", "adakv(budget=0.5, window=4)"),
        # The newest tokens, which fill no page, are not encoded yet.
        ("int4(group=16)", f"int4(group=16)+{WHOLE}"),
        ("kivi(bits=4, group=4, residual=4)", f"kivi(bits=4, group=4, residual=4)+{WHOLE}"),
        (None, f"{WHOLE[:-1]}, resident=0.5)"),
    ],
)
def test_a_compressed_cache_is_drafted_from_and_judges(method, alike):
    m, read = model("4/2"), READ if method else f"{READ[:-1]}, resident=0.5)"
    plain = kvjax.generate(m, PROMPTS, method=alike, max_new_tokens=20, stop=[])
    out = kvjax.speculate(
        m, PROMPTS, method=method, draft=kvjax.FewerSlots(read), k=3, max_new_tokens=20, stop=[]
    )
    assert (out.tokens == np.asarray(plain.tokens)).all() and out.passes < 20


@pytest.mark.rotating
def test_a_draft_reads_one_page_and_the_newest_tokens_and_what_checks_reads_all():
    m, read = model("4/2"), Method(read=Noting(Budget(8), PAGE, 0))
    how, keys = kvjax.Sampler(1.0).settings, jax.random.split(jax.random.key(2), 2)

    def proposed(cache, last, most):
        writer = drafting(kvjax.FewerSlots(read), m, PROMPTS, how, 16, cache.method)
        texts = [[*row, int(token)] for row, token in zip(PROMPTS, last, strict=True)]
        found, cache = writer.propose(texts, np.array(most), 3, keys, cache)
        jax.effects_barrier()
        return found, cache

    logits, cache = kvjax.prefill(m, PROMPTS, method=read, room=16)
    last = np.asarray(logits).argmax(-1)
    Noting.noted.clear()
    found, cache = proposed(cache, last, [3, 2])
    assert {int(n) for _, _, counts in Noting.noted for n in counts.ravel()} == {1}
    assert len(Noting.noted) == 3 * 2
    # As many slots as the probabilities of a cache that is read so in every step.
    _, alone = kvjax.prefill(m, PROMPTS, method=READ, room=16)
    for i, token in enumerate(np.stack([last, *found.tokens.T[:2]])):
        logits, alone = kvjax.step(m, alone, token)
        for row in np.flatnonzero(np.array([3, 2]) > i):
            want = jax.nn.softmax(logits)[row]
            np.testing.assert_allclose(found.probabilities[row, i], want, rtol=1e-4, atol=1e-6)
    # Values of all other pages may be no numbers; the model that checks would see them.
    first = [Noting.noted[i] for i in range(2)]
    poisoned = []
    for group, (layer, pages, _) in zip(cache.groups, first, strict=True):
        assert int(layer) == 0
        v = np.array(group.bodies[0].v)
        picked = np.zeros(v.shape[1:4], bool)
        for b, h in np.ndindex(*pages.shape[:2]):
            at = int(pages[b, h, 0]) * PAGE
            picked[b, h, at : at + PAGE] = True
        v = np.where(picked[None, ..., None], v, np.nan)
        poisoned.append(
            dataclasses.replace(group, bodies=(dataclasses.replace(group.bodies[0], v=jnp.asarray(v)),))
        )
    cache = dataclasses.replace(cache, groups=tuple(poisoned))
    again, cache = proposed(cache, last, [1, 1])
    np.testing.assert_array_equal(again.probabilities[:, 0], found.probabilities[:, 0])
    tokens = kvjax.api.prefill.padded(m, [[1], [2]], None)
    logits = kvjax.api.verify.over_slots(m, cache, tokens, picking=False)[0]
    assert np.isnan(logits).all()


@pytest.mark.rotating
def test_drawn_texts_have_the_distribution_of_all_slots():
    m, rows = model("4/2"), 800
    prompt = np.random.default_rng(1).permutation(64).tolist()
    out = kvjax.speculate(
        m, [prompt] * rows, draft=kvjax.FewerSlots(READ), k=2, max_new_tokens=3, stop=[],
        key=jax.random.key(5), sampler=kvjax.Sampler(1.0, top_k=6),
    )  # fmt: skip
    assert 0 < out.accepted < out.drafted
    first = int(np.bincount(out.tokens[:, 0]).argmax())
    for seen in ([], [first]):
        drawn = out.tokens[(out.tokens[:, : len(seen)] == np.asarray(seen, int)).all(1), len(seen)]
        given = np.asarray(kvjax.prefill(m, [[*prompt, *seen]])[0][0], np.float64)
        best = np.argsort(-given)[:6]
        p = np.exp(given[best] - given.max())
        counts = [(drawn == token).sum() for token in best]
        assert sum(counts) == len(drawn) > 100
        assert chisquare(counts, p / p.sum() * len(drawn)).pvalue > 1e-4


@pytest.mark.rotating
def test_a_draft_that_is_no_read_of_pages_is_refused():
    m = model("4/2")
    for read, method, why in (
        ("int4(group=16)", None, "FewerSlots was given int4, expected a method that is a read and nothing"),
        ("lserve(budget=0.5, page=16)", None, "expected a method that is a read and nothing else"),
        ("kcache(budget=0.5)", None, "kcache picks single tokens.*larger pages"),
        (READ, READ, "a method has at most one read"),
        (READ, "h2o(budget=0.5)", "h2o \\+ quest cannot judge drafts: its slots leave"),
        ("infllm(budget=0.5, page=8, newest=8, sinks=8)", None, "infllm cannot judge drafts: what it remem"),
    ):
        with pytest.raises(ValueError, match=why):
            kvjax.speculate(m, PROMPTS, method=method, draft=kvjax.FewerSlots(read))

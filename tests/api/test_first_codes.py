"""Drafts from the first codes of the cache that judges them: exact, in the same memory (QuantSpec)."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

import kvjax
from kvjax.api.drafts import drafting
from kvjax.grammar import Method, Store
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.state.cache import nbytes
from kvjax.store.affine import Affine
from tests.methods.battery import model

PROMPTS = [np.random.default_rng(n).integers(0, 64, n).tolist() for n in (40, 29)]
BOTH = "quantspec(group=8, residual=8)"
# The first codes alone, as a method: what a draft must read.
FIRST = Method(store=Store(Affine(4, "channel", group=8), Affine(4, together=8), 8))


def test_greedy_texts_are_those_of_both_codes_and_no_second_cache_is_held():
    config = dataclasses.replace(model("4/2").config, layers=1)
    m = Model(config, init(config, jax.random.key(1)))
    plain = kvjax.generate(m, PROMPTS, method=BOTH, max_new_tokens=16, stop=[])
    gc.collect()
    others = sum(x.nbytes for x in jax.live_arrays())
    held = []

    def note(row, tokens):
        held.append(sum(x.nbytes for x in jax.live_arrays()) - others)

    out = kvjax.speculate(
        m, PROMPTS, method=BOTH, draft=kvjax.FirstCodes(), k=3, max_new_tokens=16, stop=[], on_tokens=note
    )
    assert (out.tokens == np.asarray(plain.tokens)).all()
    assert out.acceptance > 0.5 and out.passes < 16
    # Beside one cache there are logits and probabilities of the tokens of a round, less than half a cache.
    assert nbytes(out.cache) <= max(held) < 1.5 * nbytes(out.cache)
    assert out.cache.next.tolist() == plain.cache.next.tolist()
    more = [kvjax.prefill(m, [[1, 2], [3]], cache=c)[0] for c in (out.cache, plain.cache)]
    np.testing.assert_allclose(more[0], more[1], rtol=1e-4, atol=1e-5)


def stored(cache):
    """All arrays, without the keys of empty slots, which may be any numbers."""
    groups = [
        dataclasses.replace(
            g, tail=dataclasses.replace(g.tail, k=jnp.where((g.tail.pos >= 0)[..., None], g.tail.k, 0))
        )
        for g in cache.groups
    ]
    return [np.array(x) for x in jax.tree.leaves(dataclasses.replace(cache, groups=tuple(groups)))]


@pytest.mark.rotating
def test_a_draft_reads_the_first_codes_and_leaves_the_cache_as_it_was():
    m = model("4/2")
    logits, cache = kvjax.prefill(m, PROMPTS, method=BOTH, room=16)
    before = stored(cache)
    last = np.asarray(logits).argmax(-1)
    how = kvjax.Sampler(1.0).settings
    writer = drafting(kvjax.FirstCodes(), m, PROMPTS, how, 16, cache.method)
    texts = [[*row, int(token)] for row, token in zip(PROMPTS, last, strict=True)]
    most = np.array([3, 2])
    found, cache = writer.propose(texts, most, 3, jax.random.split(jax.random.key(2), 2), cache)
    for got, want in zip(stored(cache), before, strict=True):
        np.testing.assert_array_equal(got, want)
    _, alone = kvjax.prefill(m, PROMPTS, method=FIRST, room=16)
    tokens = np.stack([last, *found.tokens.T])
    for i in range(3):
        logits, alone = kvjax.step(m, alone, tokens[i])
        want = jax.nn.softmax(logits)
        for row in np.flatnonzero(most > i):
            np.testing.assert_allclose(found.probabilities[row, i], want[row], rtol=1e-4, atol=1e-6)


@pytest.mark.rotating
def test_drawn_texts_have_the_distribution_of_both_codes():
    m, rows = model("4/2"), 800
    prompt = np.random.default_rng(1).permutation(64).tolist()
    out = kvjax.speculate(
        m, [prompt] * rows, method=BOTH, draft=kvjax.FirstCodes(), k=2, max_new_tokens=3, stop=[],
        key=jax.random.key(5), sampler=kvjax.Sampler(1.0, top_k=6),
    )  # fmt: skip
    assert 0 < out.accepted < out.drafted
    first = int(np.bincount(out.tokens[:, 0]).argmax())
    logits, cache = kvjax.prefill(m, [prompt], method=BOTH, room=8)
    second, _ = kvjax.step(m, cache, np.array([first]))
    for seen, given in (([], logits), ([first], second)):
        drawn = out.tokens[(out.tokens[:, : len(seen)] == np.asarray(seen, int)).all(1), len(seen)]
        given = np.asarray(given[0], np.float64)
        best = np.argsort(-given)[:6]
        p = np.exp(given[best] - given.max())
        counts = [(drawn == token).sum() for token in best]
        assert sum(counts) == len(drawn) > 100
        assert chisquare(counts, p / p.sum() * len(drawn)).pvalue > 1e-4


@pytest.mark.rotating
def test_codes_without_two_parts_are_refused():
    for method in ("int8", None):
        with pytest.raises(kvjax.InputError, match="has no codes of two parts.* choose the method quantspec"):
            kvjax.speculate(model("4/2"), PROMPTS, method=method, draft=kvjax.FirstCodes())

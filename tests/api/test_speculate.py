"""Speculative decoding: greedy texts are those of `generate`, drawn ones have the model's distribution."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from scipy.stats import chisquare
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import kvjax
from kvjax.api.drafts import _other_word, drafting
from kvjax.base.errors import InputError
from tests.methods.battery import model

PROMPTS = [np.random.default_rng(n).integers(0, 64, n).tolist() for n in (40, 29)]
# What drafts: methods that only store, that evict prompts, or while decoding, and that read some slots.
DRAFTS = {
    "int4": "int4(group=16)",
    "snapkv": "snapkv(budget=0.5, window=4)",
    "h2o": "h2o(budget=0.5)",
    "quest": "quest(budget=0.5, page=4, skip_layers=0)",
    "lookup": kvjax.Lookup(2),
}


@pytest.mark.rotating
@pytest.mark.parametrize(
    "name",
    ["snapkv", "lookup", *(pytest.param(n, marks=pytest.mark.rotating) for n in ("int4", "h2o", "quest"))],
)
def test_greedy_texts_are_those_of_greedy_decoding(name):
    m = model("4/2")
    plain = kvjax.generate(m, PROMPTS, max_new_tokens=20, stop=[])
    out = kvjax.speculate(m, PROMPTS, draft=DRAFTS[name], k=3, max_new_tokens=20, stop=[])
    assert (out.tokens == np.asarray(plain.tokens)).all()
    assert out.passes <= 20 and out.accepted <= out.drafted
    # The cache holds every token that was written: both go on alike.
    assert out.cache.next.tolist() == plain.cache.next.tolist()
    more = [kvjax.prefill(m, [[1, 2], [3]], cache=c)[0] for c in (out.cache, plain.cache)]
    np.testing.assert_allclose(more[0], more[1], rtol=1e-4, atol=1e-5)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "method",
    [
        pytest.param("int8", marks=pytest.mark.rotating),
        pytest.param("kivi(bits=4, group=4, residual=4)", marks=pytest.mark.rotating),
        pytest.param("adakv(budget=0.5, window=4)", marks=pytest.mark.rotating),
        "quest(budget=0.5, page=4, skip_layers=0)",
        "moba(budget=0.5, page=4) + int8",
    ],
)
def test_a_compressed_cache_judges_as_it_decodes(method):
    m = model("4/2")
    plain = kvjax.generate(m, PROMPTS, method=method, max_new_tokens=16, stop=[])
    out = kvjax.speculate(m, PROMPTS, method=method, draft=kvjax.Lookup(), k=4, max_new_tokens=16, stop=[])
    assert (out.tokens == np.asarray(plain.tokens)).all()


@pytest.mark.rotating
def test_a_draft_that_is_the_model_is_taken_whole():
    m = model("4/2")
    out = kvjax.speculate(m, PROMPTS, draft=m, k=4, max_new_tokens=16, stop=[])
    # The first token comes of the prompt; each pass after it takes four of the draft and adds one.
    assert out.acceptance == 1.0 and out.passes == 3 and out.lengths.tolist() == [16, 16]


def test_texts_end_at_a_stop_token_inside_a_draft():
    m = model("4/2")
    whole = kvjax.generate(m, PROMPTS, max_new_tokens=16, stop=[]).tokens
    stop = [int(whole[0, 6]), int(whole[1, 9])]
    plain = kvjax.generate(m, PROMPTS, max_new_tokens=16, stop=stop)
    out = kvjax.speculate(m, PROMPTS, draft=m, k=4, max_new_tokens=16, stop=stop)
    assert out.lengths.tolist() == plain.lengths.tolist()
    assert out.cache.next.tolist() == plain.cache.next.tolist()
    for row, other, n in zip(out.tokens, np.asarray(plain.tokens), out.lengths, strict=True):
        assert row[:n].tolist() == other[:n].tolist() and (row[n:] == -1).all()


@pytest.mark.rotating
@pytest.mark.parametrize("draft", ["method", "lookup", "model"])
def test_drawn_texts_have_the_distribution_of_the_model(draft):
    """The first and the second token of many draws, against the probabilities of the model itself."""
    m, rows = model("4/2"), 1500
    # All tokens stand in the prompt, so that every one has a follower to look up.
    prompt = np.random.default_rng(1).permutation(64).tolist()
    words = {"method": "int4(group=16)", "lookup": kvjax.Lookup(1), "model": model("deep")}
    word, top_k = words[draft], 6 if draft == "method" else None
    out = kvjax.speculate(
        m, [prompt] * rows, draft=word, k=2, max_new_tokens=3, stop=[], key=jax.random.key(5),
        sampler=kvjax.Sampler(1.0, top_k=top_k),
    )  # fmt: skip
    assert 0 < out.accepted < out.drafted
    first = int(np.bincount(out.tokens[:, 0]).argmax())
    for seen in ([], [first]):
        drawn = out.tokens[(out.tokens[:, : len(seen)] == np.asarray(seen, int)).all(1), len(seen)]
        logits = np.asarray(kvjax.prefill(m, [[*prompt, *seen]])[0][0], np.float64)
        best = np.argsort(-logits)[:6]
        p = np.exp(logits - logits.max())
        p = p / (p[best] if top_k else p).sum()
        counts, shares = [(drawn == token).sum() for token in best], p[best].tolist()
        if not top_k:
            counts, shares = [*counts, len(drawn) - sum(counts)], [*shares, 1 - sum(shares)]
        assert sum(counts) == len(drawn) > 100
        assert chisquare(counts, np.array(shares) * len(drawn)).pvalue > 1e-4


@pytest.mark.rotating
def test_what_cannot_be_judged_or_drafted_is_refused_before_anything_runs():
    m = model("4/2")
    with pytest.raises(InputError, match="h2o cannot judge drafts: its slots leave while tokens are added"):
        kvjax.speculate(m, PROMPTS, method="h2o(budget=0.5)", draft="int8")
    with pytest.raises(InputError, match="expected a method of the model itself"):
        drafting(3, m, PROMPTS, kvjax.Sampler().settings, 8)
    with pytest.raises(InputError, match="k is 0"):
        kvjax.speculate(m, PROMPTS, draft="int8", k=0)
    with pytest.raises(InputError, match="220 tokens and the model 64"):
        kvjax.speculate(m, PROMPTS, draft=kvjax.load("recall-tiny"))


def test_a_draft_of_another_tokenizer_of_the_same_size_is_refused_by_the_first_token_that_differs():
    m = kvjax.load("recall-tiny")
    spec = json.loads(m.tokenizer.to_str())
    vocab = spec["model"]["vocab"]
    words = {i: word for word, i in vocab.items()}
    vocab[words[30]], vocab[words[40]] = 40, 30
    other = dataclasses.replace(m, tokenizer=Tokenizer.from_str(json.dumps(spec)))
    with pytest.raises(InputError, match=f"token 30 is '{words[40]}' to the draft and '{words[30]}' to the"):
        drafting(other, m, [[1, 2, 3]], kvjax.Sampler().settings, 8)


def test_tokens_that_are_added_to_a_vocabulary_may_have_other_names_in_a_draft():
    plain, chats = (Tokenizer(WordLevel({"a": 0, "b": 1, name: 2}, "a")) for name in ("<unused>", "<think>"))
    assert _other_word(plain, chats) == (2, "<unused>", "<think>")
    chats.add_special_tokens(["<think>"])
    assert _other_word(plain, chats) is None
    assert _other_word(plain, None) is None

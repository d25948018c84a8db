"""Likelihoods of texts: the full cache's against float64, a method's against single steps, and refusals."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.api import likelihood as text_likelihood
from kvjax.base.errors import InputError
from kvjax.state.cache import kept_positions
from tests.float64.reference import Prompt, softmax
from tests.methods.battery import VOCAB, decoder, model

LENGTHS = (30, 19, 26)
TEXTS = [np.random.default_rng(5).integers(0, VOCAB, n).tolist() for n in LENGTHS]


@pytest.fixture(autouse=True)
def pieces(monkeypatch):
    """Texts of several pieces; the last piece is short."""
    monkeypatch.setattr(text_likelihood, "PIECE", 8)


def logprobs64(logits, targets):
    return np.log(softmax(np.asarray(logits, np.float64)))[np.arange(len(targets)), targets]


@pytest.mark.rotating
def test_without_a_method_it_is_that_of_the_whole_text_in_float64():
    found = kvjax.likelihood(model("4/2"), TEXTS)
    wanted = [logprobs64(Prompt(decoder("4/2"), row).all_logits[:-1], row[1:]) for row in TEXTS]
    for got, want, length in zip(found.logprobs, wanted, LENGTHS, strict=True):
        np.testing.assert_allclose(got[1:length], want, rtol=0, atol=2e-5)
        assert np.isnan(got[0]) and np.isnan(got[length:]).all()
    assert found.tokens.tolist() == [n - 1 for n in LENGTHS]
    mean = np.concatenate(wanted).mean()
    assert found.nll == pytest.approx(-mean, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(-mean), rel=1e-5)
    later = kvjax.likelihood(model("4/2"), TEXTS, context=11)
    np.testing.assert_allclose(later.logprobs[:, 11:], found.logprobs[:, 11:], rtol=0, atol=2e-5)
    assert np.isnan(later.logprobs[:, :11]).all() and later.tokens.tolist() == [n - 11 for n in LENGTHS]


def stepped(method, context):
    """log p [B, T] of the tokens behind the context, from a prefill and single steps, and the slots left."""
    one, rows = model("4/2"), np.zeros((len(TEXTS), max(LENGTHS)), np.int32)
    for row, text in zip(rows, TEXTS, strict=True):
        row[: len(text)] = text
    logits, cache = kvjax.prefill(one, rows[:, :context], method=method, room=rows.shape[1])
    out = [logits]
    for tokens in rows.T[context:-1]:
        logits, cache = kvjax.step(one, cache, jnp.asarray(tokens))
        out.append(logits)
    slots = int((kept_positions(cache)[0] >= 0).sum(-1).max())
    pairs = zip(np.stack(out, 1), rows[:, context:], strict=True)
    return np.stack([logprobs64(*pair) for pair in pairs]), slots


# Those that are read in one pass, in one for every granule, and token by token.
METHODS = {
    "h2o": ("h2o(budget=0.5)", 12, 15),
    "a streaming window": ("streamingllm(budget=10)", 4, 10),
    "codes": ("int8", 1, None),
    "granules": ("snapkv(budget=0.5, window=3) + kivi(group=4, residual=4)", 12, None),
    "a read": ("quest(budget=0.5, page=4, skip_layers=0)", 12, None),
}


ALWAYS = ("h2o", "codes")
TURNED = [pytest.param(name, marks=pytest.mark.rotating) for name in METHODS if name not in ALWAYS]


@pytest.mark.rotating
@pytest.mark.parametrize("name", [*ALWAYS, *TURNED])
def test_a_methods_are_those_of_single_steps(name):
    method, context, most = METHODS[name]
    found = kvjax.likelihood(model("4/2"), TEXTS, method=method, context=context)
    want, slots = stepped(method, context)
    there = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    want = np.where(there[:, context:], want, np.nan)
    np.testing.assert_allclose(found.logprobs[:, context:], want, rtol=0, atol=2e-5)
    assert most is None or slots <= most


CONTEXTS = [20, 9, 13]
ROWS = ("snapkv(budget=0.5, window=2)", pytest.param("h2o(budget=0.5)", marks=pytest.mark.rotating))


@pytest.mark.rotating
@pytest.mark.parametrize("method", ROWS)
def test_contexts_of_rows_give_what_each_row_gives_alone(method):
    one = model("4/2")
    found = kvjax.likelihood(one, TEXTS, method=method, context=CONTEXTS)
    full = kvjax.likelihood(one, TEXTS, context=CONTEXTS)
    for row, (text, start) in enumerate(zip(TEXTS, CONTEXTS, strict=True)):
        alone = kvjax.likelihood(one, [text], method=method, context=start)
        np.testing.assert_allclose(found.logprobs[row, : len(text)], alone.logprobs[0], rtol=0, atol=2e-5)
        np.testing.assert_array_equal(found.greedy[row, : len(text)], alone.greedy[0])
        assert np.isnan(found.logprobs[row, :start]).all() and not np.isnan(alone.logprobs[0, start:]).any()
    assert found.tokens.tolist() == [n - c for n, c in zip(LENGTHS, CONTEXTS, strict=True)]
    assert np.nanmax(np.abs(found.logprobs - full.logprobs)) > 1e-3 and found.cache_bytes < full.cache_bytes


def test_greedy_tokens_are_the_likeliest_in_float64():
    row = TEXTS[0]
    best = Prompt(decoder("4/2"), row).all_logits.argmax(-1)
    texts = [row[: n + 1] + [int(best[n])] for n in (9, 14, 20)]
    found = kvjax.likelihood(model("4/2"), texts, context=[10, 8, 21])
    for text, start, greedy in zip(texts, (10, 8, 21), found.greedy, strict=True):
        want = best[: len(text) - 1] == np.array(text[1:])
        np.testing.assert_array_equal(greedy[start : len(text)], want[start - 1 :])
        assert greedy[len(text) - 1] and not greedy[len(text) :].any()


@pytest.mark.rotating
def test_the_last_token_of_a_text_takes_no_position():
    """The longest row ends at the last position, and a shorter one is given more tokens than it."""
    config = dataclasses.replace(model("4/2").config, max_positions=29)
    short = dataclasses.replace(model("4/2"), config=config)
    found, want = (kvjax.likelihood(one, TEXTS[:2], context=[25, 4]) for one in (short, model("4/2")))
    np.testing.assert_allclose(found.logprobs, want.logprobs, rtol=0, atol=2e-5)


@pytest.mark.rotating
def test_a_chunk_compresses_again_behind_so_many_scored_tokens():
    one, row, method = model("4/2"), TEXTS[0][:26], "snapkv(budget=6, window=2)"
    found = kvjax.likelihood(one, [row], method=method, context=10, chunk=5)
    logits, cache = kvjax.prefill(one, [row[:10]], method=method, chunk=5, room=32)
    want = [logits]
    for at in range(10, 25, 5):
        piece, held = row[at : at + 5], kvjax.fork(cache, 1)
        for token in piece:
            logits, held = kvjax.step(one, held, jnp.array([token], jnp.int32))
            want.append(logits)
        _, cache = kvjax.prefill(one, [piece], cache=cache, room=32)
    want = np.concatenate(want)[: len(row) - 10]
    np.testing.assert_allclose(found.logprobs[0, 10:], logprobs64(want, row[10:]), rtol=0, atol=2e-5)
    once = kvjax.likelihood(one, [row], method=method, context=10)
    assert np.abs(once.logprobs[0, 20:] - found.logprobs[0, 20:]).max() > 1e-3


@pytest.mark.rotating
def test_strings_are_read_by_the_tokenizer_and_have_bytes():
    recall = kvjax.load("recall-tiny")
    text = "along the river <set> brave otter 17 4 52 <.> <get> brave otter 17 4 52 <.>"
    ids = recall.tokenizer.encode(text).ids
    found = kvjax.likelihood(recall, [text], context=12)
    np.testing.assert_array_equal(found.logprobs, kvjax.likelihood(recall, [ids], context=12).logprobs)
    assert recall.tokenizer.decode(ids[12:], skip_special_tokens=False) == "otter 17 4 52 <.>"
    assert found.bytes == 17
    total = -np.nansum(found.logprobs.astype(np.float64)) / math.log(2)
    assert found.bits_per_byte == pytest.approx(total / 17, rel=1e-5)
    with pytest.raises(InputError, match="texts hold what the tokenizer cannot read"):
        kvjax.likelihood(recall, ["along zzzz"])
    # What the text says again is likely.
    assert found.logprobs[0, 13:16].min() > -0.1


REFUSED = {
    "a prompt's method": (dict(method="snapkv(budget=4, window=2)"), "acts at the ends of prompts.*context="),
    "a short text": (dict(context=19), "row 1 has 19 tokens, expected more than the context of 19: lower"),
    "no context": (dict(context=0), "context"),
    "contexts of other rows": (dict(context=[4, 4]), r"context is \[4, 4\], expected a whole"),
    "uneven chunks": (dict(chunk=4), "chunk= goes with texts of one length"),
    "a string": (dict(texts="a b"), r"texts is one string, expected a list of them"),
    "no tokenizer": (dict(texts=["a b"]), "the model has no tokenizer: give token ids"),
    "too long": (dict(texts=[[1] * 9000]), "reaches position 8999, this model's last is"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_likelihood_says_why(given, message):
    with pytest.raises(InputError, match=message):
        kvjax.likelihood(**{"model": model("4/2"), "texts": TEXTS} | given)


@pytest.mark.rotating
def test_a_text_without_bytes_has_no_bits_per_byte():
    found = kvjax.likelihood(model("4/2"), [TEXTS[0][:8]], context=4)
    with pytest.raises(InputError, match="no tokenizer: use perplexity"):
        _ = found._replace(bytes=None).bits_per_byte


def test_logits_that_are_no_numbers_are_refused():
    one = model("4/2")
    broken = one.params | {"norm": jnp.full_like(one.params["norm"], jnp.nan)}
    with pytest.raises(InputError, match="not a number|NaN"):
        kvjax.likelihood(kvjax.Model(one.config, broken), TEXTS)

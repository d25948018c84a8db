"""Beam search and several samples per prompt: against all texts there are, and against reading each alone."""

import itertools

import jax
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init

VOCAB, NEW, STOP = 4, 3, 2
PROMPTS = [[3, 1, 0, 2, 1], [0, 3]]


@pytest.fixture(scope="module")
def model():
    config = Config(vocab=VOCAB, d_model=16, layers=1, heads=2, kv_heads=1, head_dim=8, d_ff=16)
    return Model(config, init(config, jax.random.key(5)))


@pytest.fixture(scope="module")
def texts(model):
    """Per prompt, log-probabilities of every token after every text of NEW tokens, in float64."""
    found = []
    for prompt in PROMPTS:
        every = list(itertools.product(range(VOCAB), repeat=NEW))
        logits = np.asarray(model(np.array([[*prompt, *text] for text in every])), np.float64)
        logits = logits[:, len(prompt) - 1 : -1]
        found.append({text: log_softmax(x) for text, x in zip(every, logits, strict=True)})
    return found


def log_softmax(x):
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def continuations(logprobs):
    """All different texts up to their stop token, with their summed log-probabilities, the best first."""
    out = {}
    for text, each in logprobs.items():
        size = text.index(STOP) + 1 if STOP in text else NEW
        out[text[:size]] = sum(each[i, text[i]] for i in range(size))
    return sorted(out.items(), key=lambda item: -item[1])


def searched(logprobs, beams):
    """Beam search, text by text."""
    alive = [((), 0.0)]
    for i in range(NEW):
        longer = [(t, s) for t, s in alive if t[-1:] == (STOP,)]
        for text, score in alive:
            if text[-1:] != (STOP,):
                each = next(x for other, x in logprobs.items() if other[:i] == text)[i]
                longer += [((*text, v), score + each[v]) for v in range(VOCAB)]
        alive = sorted(longer, key=lambda item: -item[1])[:beams]
    return alive


def check(out, row, beams, want):
    mine = slice(row * beams, row * beams + len(want))
    assert (out.rows[row * beams : (row + 1) * beams] == row).all()
    got = [
        tuple(r[:n]) for r, n in zip(np.asarray(out.tokens)[mine].tolist(), out.lengths[mine], strict=True)
    ]
    assert got == [text for text, _ in want]
    np.testing.assert_allclose(out.scores[mine], [score for _, score in want], atol=1e-4)
    np.testing.assert_allclose(out.logprobs[mine].sum(-1), out.scores[mine], atol=1e-5)


@pytest.mark.rotating
def test_enough_beams_find_every_text_in_the_order_of_its_probability(model, texts):
    beams = VOCAB**NEW
    out = kvjax.generate(model, PROMPTS, max_new_tokens=NEW, beams=beams, stop=[STOP])
    for row, logprobs in enumerate(texts):
        want = continuations(logprobs)
        check(out, row, beams, want)
        assert (out.scores[row * beams + len(want) : (row + 1) * beams] == -np.inf).all()


@pytest.mark.rotating
def test_few_beams_find_what_a_plain_search_finds_and_their_cache_holds_it(model, texts):
    out = kvjax.generate(model, PROMPTS, max_new_tokens=NEW, beams=2, stop=[STOP])
    for row, logprobs in enumerate(texts):
        check(out, row, 2, searched(logprobs, 2))
    assert out.cache.next.tolist() == [
        len(PROMPTS[r]) + n for r, n in zip(out.rows, out.lengths, strict=True)
    ]
    more, _ = kvjax.prefill(model, [[1]] * 4, cache=out.cache, room=1)
    for row, tokens, n, logits in zip(out.rows, np.asarray(out.tokens), out.lengths, more, strict=True):
        text = [*PROMPTS[row], *tokens.tolist()[:n], 1]
        np.testing.assert_allclose(logits, model(np.array([text]))[0, -1], atol=1e-4)


@pytest.mark.rotating
def test_beams_over_a_compressed_cache_begin_with_the_greedy_text_at_one_beams_width(model):
    method = kvjax.method("adakv", budget=0.75, window=1, page=2)
    one = kvjax.generate(model, [PROMPTS[0]], method=method, max_new_tokens=2)
    out = kvjax.generate(model, [PROMPTS[0]], method=method, max_new_tokens=2, beams=VOCAB**2)
    assert one.tokens[0].tolist() in out.tokens.tolist()
    assert float(out.scores[0]) >= float(one.scores[0]) - 1e-5


@pytest.mark.rotating
def test_processors_change_what_beams_find(model):
    banned = lambda logits, tokens: logits.at[:, 1].set(-np.inf)  # noqa: E731
    out = kvjax.generate(model, PROMPTS, max_new_tokens=NEW, beams=3, processors=(banned,))
    assert not (out.tokens == 1).any() and (out.tokens >= 0).all() and np.isfinite(out.scores).all()


@pytest.mark.rotating
def test_samples_of_a_prompt_are_those_of_its_copies_read_one_by_one(model):
    options = dict(max_new_tokens=NEW, sampler=kvjax.Sampler(2.0), key=jax.random.key(3))
    out = kvjax.generate(model, PROMPTS, samples=3, **options)
    copies = kvjax.generate(model, [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3, **options)
    np.testing.assert_array_equal(out.tokens, copies.tokens)
    np.testing.assert_allclose(out.scores, copies.logprobs.sum(-1), atol=1e-5)
    assert out.rows.tolist() == [0, 0, 0, 1, 1, 1] and len({tuple(t) for t in out.tokens.tolist()}) > 2


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(beams=0), "beams is 0, expected at least 1"),
        (dict(samples=-1), "samples is -1, expected at least 1"),
        (dict(samples=2), "samples=2 was given at temperature 0, expected a draw"),
        (
            dict(beams=2, samples=2, sampler=kvjax.Sampler(1.0)),
            "beams=2 was given with samples= and a sampler",
        ),
        (dict(beams=2, stop_strings=["a"]), "given with stop_strings="),
        (dict(beams=2, on_token=print), "given with on_token="),
    ],
)
def test_options_that_exclude_each_other_are_refused(model, options, message):
    with pytest.raises(InputError, match=message):
        kvjax.generate(model, PROMPTS, max_new_tokens=2, **options)

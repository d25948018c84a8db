"""Tokens that newer ones drop (DCP): bytes, ways to read a text, what is refused, and what a fit is worth."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import log_softmax

import kvjax
from kvjax.api.chunks import bucket
from kvjax.commands.texts import read_texts
from kvjax.compat.model_fit import check_fit
from kvjax.fitting.gates.dropping import Softened, dropped, log_sparse_sigmoid
from kvjax.fitting.loops.cuts import CutTexts, cut_after_contexts
from kvjax.grammar import Budget, Keep
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import NEVER, Inputs
from kvjax.grammar.when import STEP, Every
from kvjax.keep.budgets.budget import Threshold, UpTo
from kvjax.keep.gates import dropping
from kvjax.keep.gates.dropping import FirstDroppingToken, NotDropped
from kvjax.methods import chain
from kvjax.models.config import Config
from kvjax.models.mixers.attention import Attention
from kvjax.state.cache import nbytes
from tests.fitting.test_learned import arrays_of, questions
from tests.float64.reference import Prompt, rms_norm, rope, softmax
from tests.methods import learned
from tests.methods.battery import MAIN, decoder, model, off, positions

DCP = kvjax.method("dcp", fitted=learned.DROPPING)
TOKENS = [*MAIN.first[0], *MAIN.second[0]][:24]


def read_of(row):
    """Read a row's prompt in float64, whose tokens hide others."""
    return Prompt(decoder("4/2"), row, hides=learned.dcp_hides)


@pytest.mark.rotating
def test_a_cache_weighs_the_longest_list_of_each_layer_and_room():
    m = model("4/2")
    _, cache = kvjax.prefill(m, MAIN.first, method=DCP, room=5)
    longest = np.max([[kept[0].sum() for kept in learned.dcp_kept(read_of(r))] for r in MAIN.first], 0)
    assert (longest < 16).any()  # so that fewer slots are held than there were tokens
    slot = 2 * 16 * 4 + 4 + 4 * learned.INTERACTS
    want = sum(4 * 2 * (bucket(int(n)) + 5) * slot for n in longest)
    assert nbytes(cache) == want + 4 * 4


@pytest.mark.rotating
def test_a_prompt_in_chunks_or_turns_and_single_steps_leave_the_same():
    m, texts = model("4/2"), [a[:9] + b[:3] for a, b in zip(MAIN.first, MAIN.second, strict=True)]
    logits, whole = kvjax.prefill(m, texts, method=DCP, room=3)
    want = np.stack([read_of(text).all_logits[-1] for text in texts])
    assert off(logits, want) < 3e-5
    walked = kvjax.prefill(m, [text[:-3] for text in texts], method=DCP, room=3)[1]
    turns = kvjax.prefill(m, [text[-3:] for text in texts], cache=walked, room=3)
    chunks = kvjax.prefill(m, texts, method=DCP, room=3, chunk=5)
    for i in (-3, -2, -1):
        said, walked = kvjax.step(m, walked, [text[i] for text in texts])
    for got, cache in (turns, chunks, (said, walked)):
        assert off(got, logits) < 1e-5
        assert positions(cache) == positions(whole)


@pytest.mark.rotating
def test_strips_of_new_tokens_drop_what_all_at_once_drop(rng, monkeypatch):
    hidden = jnp.asarray(rng.normal(size=(2, 7, 32)), jnp.float32)
    pos = jnp.asarray([[5, 6, 7, 8, 9, 10, -1]] * 2)
    told = {learned.DROPPING.digest: {name: x[0] for name, x in arrays_of(learned.DROPPING).items()}}
    x, word = jnp.zeros((2, 2, 7, 16)), FirstDroppingToken(learned.DROPPING)

    def since():
        inputs = Inputs(x, x, x, hidden, pos, pos.max(1), told)
        return word.since(inputs, {key_of(t): t.start(inputs, 2) for t in word.traces}, pos[:, None])

    whole = jax.jit(since)()
    assert (whole == NEVER).any() and (whole < NEVER).any()
    monkeypatch.setattr(dropping, "STRIP", 3)
    np.testing.assert_array_equal(jax.jit(lambda: since())(), whole)


@pytest.mark.parametrize(
    ("keep", "why"),
    [
        (dict(when=Every(4)), "are evicted in every step or at the end"),
        (dict(allocate=Threshold(0.0)), "are evicted in every step or at the end"),
    ],
)
def test_what_is_dropped_leaves_where_the_next_token_comes(keep, why):
    given = dict(
        score=NotDropped(FirstDroppingToken(learned.DROPPING)),
        budget=Budget(1.0),
        allocate=UpTo(0.0),
        when=STEP,
    )
    with pytest.raises(ValueError, match=why):
        chain(Keep(**given | keep))


def test_interactions_of_another_width_are_refused():
    with pytest.raises(kvjax.InputError, match="was fitted to another model.*kvjax fit dcp"):
        check_fit(DCP, Config(vocab=8, d_model=16, layers=2, heads=2, kv_heads=1, head_dim=8, d_ff=16))


def test_slots_that_several_layers_read_are_refused():
    own, mixers = model("4/2").config, (Attention(), Attention(source=0))
    with pytest.raises(kvjax.InputError, match="tokens drop slots of their own layer, and several layers"):
        check_fit(DCP, dataclasses.replace(own, mixers=mixers))


# --- what is learned ----------------------------------------------------------------------------------

ALPHA, SPARSITY, SAID = 1.6, 0.7, 17


def sparse_sigmoid(x, alpha):
    """p whose slope in p x + H(p) is 0, or the end of [0, 1] that it rises to."""

    def slope(p):
        return x - (p ** (alpha - 1) - (1 - p) ** (alpha - 1)) / (alpha - 1)

    return 1.0 if slope(1.0) >= 0 else 0.0 if slope(0.0) <= 0 else brentq(slope, 0.0, 1.0, xtol=1e-13)


@pytest.mark.parametrize("alpha", [1.001, 1.5, 2.0, 8.0])
def test_a_sparse_sigmoid_is_the_best_of_its_definition(alpha):
    x = np.linspace(-3, 3, 41)
    got = np.exp(log_sparse_sigmoid(jnp.asarray(x, jnp.float32), jnp.float32(alpha)))
    np.testing.assert_allclose(got, [sparse_sigmoid(one, alpha) for one in x], atol=2e-3)
    # The definition itself, on a grid.
    p = np.linspace(0, 1, 100001)
    entropy = (p - p**alpha + (1 - p) - (1 - p) ** alpha) / (alpha * (alpha - 1))
    best = [p[np.argmax(p * one + entropy)] for one in x]
    np.testing.assert_allclose([sparse_sigmoid(one, alpha) for one in x], best, atol=1e-3)


@pytest.mark.rotating
def test_the_loss_of_interactions_is_what_it_is_by_hand():
    """Soft drops multiply over queries, and are added to the logits of all heads of a layer."""
    d, pos, said, left = decoder("4/2"), np.arange(len(TOKENS)), [], []
    for drops in (False, True):
        x = d.rest["embed"][np.asarray(TOKENS)]
        for layer, weights in enumerate(d.layers):
            raw_q, raw_k, v = d.project(weights, x)
            q, k = (rope(y, pos, d.config.rope.theta) for y in (raw_q, raw_k))
            s = q @ np.repeat(k, 2, 0).swapaxes(1, 2) / np.sqrt(d.config.head_dim)
            if drops:
                h = rms_norm(x, weights["attn_norm"], d.config.norm_eps)
                each = SOFT * learned.dcp_interactions(h, h, layer)
                stays = np.ones(s.shape[1:])
                for n in range(len(pos)):
                    for j in range(n):
                        now = max(sparse_sigmoid(each[n, j], ALPHA), 1e-7)
                        stays[n, j] = stays[n - 1, j] * now
                        left.append(stays[n, j])
                s = s + np.log(stays)
            out = softmax(np.where(pos[None] > pos[:, None], -np.inf, s)) @ np.repeat(v, 2, 0)
            x = d.finish(weights, x, out)
        said.append(log_softmax(d.logits(x)[SAID:], -1))
    want = (np.exp(said[0]) * (said[0] - said[1])).sum(-1).mean() + SPARSITY * np.mean(left)
    arrays = arrays_of(learned.DROPPING)
    arrays |= {"query": SOFT * arrays["query"], "bias": SOFT * arrays["bias"]}
    many = jnp.asarray([len(TOKENS)], jnp.int32)
    cut = CutTexts(jnp.asarray([TOKENS], jnp.int32), many, many, jnp.asarray(pos[None] >= SAID), jnp.int32(0))
    loss = jax.jit(dropped, static_argnums=(0, 4))
    m = model("4/2")
    got = loss(m.config, m.params, arrays, Softened(cut, jnp.float32(ALPHA)), SPARSITY)
    assert abs(got / want - 1) < 1e-3


# Interactions of the table are large, and would be as good as steps.
SOFT = 0.1


def loss_of(m, samples, alpha):
    """Return the loss of interactions on questions."""
    (texts,) = cut_after_contexts(m, [samples], 1, 0, iter)
    batch, loss = Softened(texts, jnp.float32(alpha)), jax.jit(dropped, static_argnums=(0, 4))
    return lambda fitted: float(loss(m.config, m.params, arrays_of(fitted), batch, 1.0))


@pytest.mark.rotating
def test_twenty_steps_of_a_fit_lower_its_loss():
    m, asked = model("4/2"), questions()
    short = dict(epochs=20, batch=len(asked), alpha=1.0)
    start, end = (kvjax.fit(m, "dcp", asked, rate=rate, **short) for rate in (0.0, 1e-1))
    loss = loss_of(m, asked, 1.0)
    assert end.model == m.signature and loss(end) < 0.9 * loss(start)


def left_of(m, method, samples):
    """Measure the bytes of a cache of contexts, and the share of answers that are found in it."""
    cache = kvjax.prefill(m, [one.context for one in samples], method=method, room=24)[1]
    weighs, longest = nbytes(cache), max(len(one.answer) for one in samples)
    asked = [one.question for one in samples]
    said = kvjax.generate(m, asked, cache=cache, max_new_tokens=longest, stop=[]).tokens
    right = [tuple(row[: len(one.answer)]) == one.answer for row, one in zip(said, samples, strict=True)]
    return weighs, np.mean(right)


def with_bias(fitted, bias):
    """Interactions by which fewer tokens are dropped the larger `bias` is."""
    arrays = fitted.arrays | {"bias": np.full_like(fitted.arrays["bias"], bias)}
    return dataclasses.replace(fitted, arrays=arrays)


@pytest.mark.slow
def test_a_fit_finds_what_unfitted_interactions_of_as_many_bytes_lose():
    m = kvjax.load("recall-tiny")
    seen, other = (
        read_texts(m, text=None, tasks=None, rows=n, length=256, seed=n, questions=True) for n in (32, 8)
    )
    start, end = (kvjax.fit(m, "dcp", seen, epochs=12, **more) for more in (dict(rate=0.0), {}))
    asked = read_texts(m, text=None, tasks=["get"], rows=16, length=256, seed=99, questions=True)
    weighs, found = left_of(m, kvjax.method("dcp", fitted=end), asked)
    assert weighs < 0.7 * left_of(m, None, asked)[0]
    low, high = -4.0, 8.0
    for _ in range(5):
        bias = (low + high) / 2
        unfitted = left_of(m, kvjax.method("dcp", fitted=with_bias(start, bias)), asked)
        low, high = (bias, high) if unfitted[0] < weighs else (low, bias)
    unfitted = left_of(m, kvjax.method("dcp", fitted=with_bias(start, high)), asked)
    assert unfitted[0] >= weighs and found > unfitted[1] + 0.3
    loss = loss_of(m, other, 4.0)
    assert loss(end) < 0.8 * loss(with_bias(start, high))

"""Neurocache: windows and compressed states of what left them, against float64, and what a fit is worth."""

import dataclasses

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

import kvjax
from kvjax.base.errors import InputError
from kvjax.commands.texts import read_texts
from kvjax.fitting.merges.hidden_cache import said_in, surprise
from kvjax.grammar.fitted import Fitted
from kvjax.state.cache import nbytes
from tests.fitting.test_learned import arrays_of, questions
from tests.float64.reference import rms_norm, rope, softmax
from tests.methods.battery import MAIN, decoder, model, off
from tests.methods.learned import PAST, STATES

WINDOW, TOP = PAST["window"], PAST["top"]


def method(**more):
    return kvjax.method("neurocache", **PAST | {"fitted": STATES} | more)


def retrieved(states, t):
    """Find the numbers of the states that token t and the one before it find, with their right neighbours."""
    found = []
    for asking in (t, t - 1):
        last = asking - WINDOW
        far = [np.square(states[asking] - states[s]).sum() for s in range(last + 1)]
        for s in np.argsort(far, kind="stable")[:TOP]:
            found += [s, min(s + 1, last)]
    return found


def by_hand(tokens):
    """Compute logits of a windowed decoder whose upper two layers attend to what states are found, too."""
    d = decoder("deep")
    a = {name: np.asarray(x, np.float64) for name, x in STATES.arrays.items()}
    c, pos, x = d.config, np.arange(len(tokens)), d.rest["embed"][np.asarray(tokens)]
    far = (pos[None] > pos[:, None]) | (pos[:, None] - pos[None] >= WINDOW)
    for i, layer in enumerate(d.layers):
        h = rms_norm(x, layer["attn_norm"], c.norm_eps)
        q, k, v = d.project(layer, x)
        k, v = (np.repeat(y, 2, 0) for y in (rope(k, pos, c.rope.theta), v))
        s = rope(q, pos, c.rope.theta) @ k.swapaxes(1, 2) / 4
        out = (softmax(np.where(far, -np.inf, s)) @ v).swapaxes(0, 1).reshape(len(x), -1) @ layer["o"]
        if i == 1:
            y = h @ a["compress"][0]
            y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
            states = y * a["norm"][0] + a["norm_bias"][0]
            found = [retrieved(states, t) for t in pos]
        if i == 0:
            w = layer
        else:
            w = {n: layer[n] + a[f"{n}_down"][i - 1] @ a[f"{n}_up"][i - 1] for n in ("q", "o", "gate", "up")}
            w["down"] = layer["down"] + a["down_down"][i - 1] @ a["down_up"][i - 1]
            keys, values = ((states @ a[n][i - 1]).reshape(len(x), 2, 16) for n in "kv")
            for t, slots in enumerate(found):
                if slots:
                    asks = (h[t] @ w["q"]).reshape(2, 2, 16)
                    p = softmax(np.einsum("kgh,skh->kgs", asks, keys[slots]) / 4)
                    out[t] += np.einsum("kgs,skh->kgh", p, values[slots]).reshape(-1) @ w["o"]
        x = x + out
        h = rms_norm(x, layer["mlp_norm"], c.norm_eps)
        gate = h @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
    return d.logits(x)


@pytest.mark.rotating
def test_upper_layers_attend_to_the_nearest_states_of_what_left_the_windows():
    m, rows = model("deep"), MAIN.first
    logits, cache = kvjax.prefill(m, rows, method=method(), room=4)
    assert off(logits, np.stack([by_hand(r)[-1] for r in rows])) < 3e-5
    # Slots of three layers' windows and the token that is attended, and one state of D / 8 per token.
    slots, states = 3 * 2 * (WINDOW + 1) * (2 * 16 + 1), (32 + 4) * 4
    assert nbytes(cache) == 4 * len(rows) * (slots + states + 1 + 1)
    texts = [list(r) for r in rows]
    for tokens in MAIN.steps[:2]:
        logits, cache = kvjax.step(m, cache, tokens)
        texts = [[*r, t] for r, t in zip(texts, tokens.tolist(), strict=True)]
    assert off(logits, np.stack([by_hand(r)[-1] for r in texts])) < 3e-5


@pytest.mark.rotating
def test_turns_and_chunks_find_what_one_reading_finds():
    m, rows = model("deep"), MAIN.first
    want = np.stack([by_hand([*a, *b])[-1] for a, b in zip(rows, MAIN.second, strict=True)])
    _, cache = kvjax.prefill(m, rows, method=method(), room=40, chunk=8)
    assert off(kvjax.prefill(m, MAIN.second, cache=cache)[0], want) < 3e-5


def test_the_surprise_of_answers_is_what_it_is_by_hand():
    m, samples, off = model("deep"), questions(), []
    for one in samples:
        said = by_hand([*one.context, *one.question, *one.answer[:-1]])[-len(one.answer) :]
        off += (-log_softmax(said, -1)[np.arange(len(said)), list(one.answer)]).tolist()
    word = dataclasses.replace(method().make, fitted=None)
    got = jax.jit(surprise, static_argnums=(0, 1))(
        word, m.config, m.params, arrays_of(STATES), said_in(m, samples)
    )
    assert abs(got / np.mean(off) - 1) < 1e-4


@pytest.mark.rotating
def test_a_fit_starts_from_the_layers_own_weights_and_moves_all_arrays():
    m = model("deep")
    first = method().make.start(m.params, m.config, 2, 0)
    start = Fitted({n: np.asarray(x) for n, x in first.items()}, "HiddenStateCache", m.signature)
    end = kvjax.fit(m, method(fitted=None), questions(), epochs=1, rate=0.01, rank=2)
    made = kvjax.prepare(m, method(fitted=start)).params["layers"]
    for upper in (1, 2):
        own, new = m.params["layers"][upper], made[upper + 1]
        for name in ("cache_q", "cache_o", "gate"):
            np.testing.assert_array_equal(new[name], own[name.removeprefix("cache_")])
        for name in "kv":
            np.testing.assert_array_equal(new[f"cache_{name}"], own[name][:, :4])
    still = {n for n in start.arrays if np.array_equal(start.arrays[n], end.arrays[n])}
    # The first slope of the inner matrices is nothing, where the outer ones are.
    assert still == {n for n in start.arrays if n.endswith("_down")}


def test_what_cannot_be_rewritten_or_chained_is_said():
    run = lambda m, given: kvjax.prefill(m, MAIN.first, method=given, room=1)  # noqa: E731
    with pytest.raises(InputError, match=r"neurocache does not fit .* layer 0 is .* with the window"):
        run(model("windowed"), method())
    with pytest.raises(ValueError, match=r"layer=3 and factor=8 leave no upper layer of 3"):
        method(layer=3).make.config(model("deep").config)
    with pytest.raises(InputError, match=r"\(one, width, channels\) of its projection are \(1, 32, 4\)"):
        run(model("deep"), method(factor=4))
    inner = dataclasses.replace(model("deep").config, d_ff=40)
    with pytest.raises(ValueError, match="fitted to feed-forwards of 48 channels, and this model's have 40"):
        method().make.config(inner)
    with pytest.raises(InputError, match="never fitted to a model: run `kvjax fit neurocache"):
        run(model("deep"), method(fitted=None))
    gate = Fitted({"out": np.ones((3, 32, 2)), "out_bias": np.ones((3, 2))}, "HiddenGate", "")
    both = kvjax.chain(method(), kvjax.method("kvzap", fitted=gate))
    with pytest.raises(InputError, match="its arrays are for the 3 layers of this model, and neurocache"):
        run(model("deep"), both)


@pytest.fixture(scope="module")
def tiny():
    return kvjax.load("recall-tiny")


def samples_of(m, rows, seed, tasks=None):
    return read_texts(m, text=None, tasks=tasks, rows=rows, length=256, seed=seed, questions=True)


def right(m, given):
    """Compute the share of the tokens of answers that are right behind contexts of the task "get"."""
    samples = samples_of(m, 24, 99, ["get"])
    cache = kvjax.prefill(m, [s.context for s in samples], method=given, room=16)[1]
    logits, cache = kvjax.prefill(m, [s.question for s in samples], cache=cache, room=16)
    same = []
    for i in range(len(samples[0].answer)):
        token = np.asarray(logits).argmax(-1).astype(np.int32)
        same.append(token == [s.answer[i] for s in samples])
        logits, cache = kvjax.step(m, cache, token)
    return np.mean(same)


@pytest.mark.slow
def test_a_fit_makes_answers_likelier_and_more_of_their_tokens_right(tiny):
    seen, batch = samples_of(tiny, 256, 32), said_in(tiny, samples_of(tiny, 16, 8))
    short, long = dict(rate=0.0, epochs=1), dict(epochs=8)
    given = kvjax.method("neurocache", window=64)
    fits = [kvjax.fit(tiny, given, seen, batch=8, **x) for x in (short, long)]
    loss = jax.jit(surprise, static_argnums=(0, 1))
    start, end = (loss(given.make, tiny.config, tiny.params, arrays_of(x), batch) for x in fits)
    assert end < 0.6 * start
    before, after = (right(tiny, kvjax.method("neurocache", window=64, fitted=x)) for x in fits)
    assert after > before + 0.05

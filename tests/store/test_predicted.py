"""Codes over the layer below: what comes back in steps and turns, what a fit gains, and what is refused."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.compress.below import decoded
from kvjax.fitting.loops.keys_values import read_keys_values
from kvjax.grammar.fitted import Fitted, with_fitted
from kvjax.steps import Run
from kvjax.steps.shared.fitted_arrays import groups_with_arrays
from kvjax.store.predicted import Predicted
from tests.float64.codes import directions, over_below
from tests.float64.reference import Prompt
from tests.methods.battery import decoder, model, off
from tests.methods.table_stores import MAPS

ROW = [5, 9, 3, 7, 1, 8, 2, 6, 4, 11, 15, 12, 13]
AQUA = kvjax.method("aqua-kv", tokens=4, residual=2, fitted=MAPS)
TEXTS = [np.random.default_rng(i).integers(1, 40, 60).tolist() for i in range(8)]


def bodies(cache, m, method):
    """Decode the keys and values that come back of every layer's body."""

    @jax.jit
    def read(params, bodies):
        out, below = [], None
        for gm, body in zip(
            groups_with_arrays(Run(m.config, method).groups(params), params), bodies, strict=True
        ):
            below = decoded(gm, body, below)
            out.append(below)
        return out

    found = read(with_fitted(m.params, method), [group.bodies[0] for group in cache.groups])
    return [[np.asarray(x) for x in pair] for pair in found]


@pytest.mark.rotating
def test_steps_and_turns_encode_as_one_prompt_does():
    """A prompt, steps that fill granules, and a second turn leave the codes of the tokens read at once."""
    m, whole = model("4/2"), kvjax.prefill(model("4/2"), [ROW], method=AQUA, room=8)[1]
    _, cache = kvjax.prefill(m, [ROW[:4]], method=AQUA, room=20)
    for token in ROW[4:9]:
        _, cache = kvjax.step(m, cache, [token])
    logits, cache = kvjax.prefill(m, [ROW[9:]], cache=cache)
    for one, other in zip(bodies(cache, m, AQUA), bodies(whole, m, AQUA), strict=True):
        # The first 4 tokens were read by no codes, before or after.
        for got, want in zip(one, other, strict=True):
            np.testing.assert_allclose(got[..., :4, :], want[..., :4, :], atol=1e-3)
    # As many granules as residual and granule leave of 13 tokens.
    assert [int((g.bodies[0].pos >= 0).sum()) for g in cache.groups] == [2 * 8, 2 * 8]
    assert np.isfinite(np.asarray(logits)).all()


@pytest.mark.rotating
@pytest.mark.parametrize("room", [9, pytest.param(10, marks=pytest.mark.rotating), 11])
def test_bodies_of_other_sizes_lie_over_each_other(room):
    """The first layer's codec takes tokens one by one, and it encodes as many together as the others do."""
    m, sides = model("4/2"), []
    for each in (room, 8):  # 8: sizes are equal
        logits, cache = kvjax.prefill(m, [ROW[:6]], room=each, method=AQUA)
        sides.append([logits])
        for token in ROW[6:]:
            logits, cache = kvjax.step(m, cache, np.array([token], np.int32))
            sides[-1].append(logits)
    np.testing.assert_allclose(*sides, atol=1e-5)


def test_a_prompt_of_which_nothing_is_encoded_answers_as_without_a_method():
    method = kvjax.method("aqua-kv", tokens=4, residual=16, fitted=MAPS)
    found, plain = (kvjax.prefill(model("4/2"), [ROW], room=4, method=x) for x in (method, None))
    step = lambda pair: kvjax.step(model("4/2"), pair[1], np.array([3], np.int32))[0]  # noqa: E731
    np.testing.assert_allclose(step(found), step(plain), atol=1e-5)


def test_without_codes_between_them_layers_predict_no_difference():
    """At 4 bits everywhere the answer is near the uncompressed one, whatever is predicted."""
    m = model("4/2")
    near = kvjax.method("aqua-kv", bits=4, tokens=4, residual=2, fitted=kvjax.fit(m, "aqua-kv", TEXTS))
    got, want = (kvjax.prefill(m, [ROW], method=method, room=4)[1] for method in (near, None))
    for token in (3, 4, 5, 6):
        (a, got), (b, want) = kvjax.step(m, got, [token]), kvjax.step(m, want, [token])
        assert off(a, b) < 0.2


def test_a_fit_leaves_less_of_the_texts_numbers_than_they_are():
    m = model("4/2")
    maps = {n: x.astype(float) for n, x in kvjax.fit(m, "aqua-kv:bits=4", TEXTS).arrays.items()}
    read = read_keys_values(m, [TEXTS], raw=True)
    flat = lambda x: np.moveaxis(x, 0, 1).reshape(x.shape[1], -1)  # noqa: E731
    below = directions(4)(read.k[0].astype(float)), directions(4)(read.v[0].astype(float))
    rest = flat(read.k[1]) - flat(below[0]) @ maps["key weights"][1] - maps["key bias"][1]
    assert np.square(rest).sum() < np.square(flat(read.k[1]) - flat(read.k[1]).mean(0)).sum()
    # Least squares: nothing that is left goes with what is known, but for the ridge.
    known = flat(below[0]) - flat(below[0]).mean(0)
    assert np.abs(known.T @ rest).max() < 2e-2 * np.abs(known.T @ flat(read.k[1])).max()
    assert not maps["key weights"][0].any() and over_below(maps, 4, 2) is not None


def test_what_cannot_be_decoded_over_the_layer_below_is_refused():
    m = model("4/2")
    for other in ("snapkv(budget=0.5, window=4)", "quest(budget=0.5)", "h2o(budget=0.5)"):
        with pytest.raises(ValueError, match="encodes a token relative to the layer below"):
            kvjax.method(f"{other} + aqua-kv")
    with pytest.raises(InputError, match="layers keep other things"):
        three = Fitted({n: np.repeat(x[:1], 3, 0) for n, x in MAPS.arrays.items()}, "Predicted", "")
        kvjax.prefill(model("windowed"), [ROW], method=kvjax.method("aqua-kv", fitted=three))
    fitted = Fitted({n: x[:1] for n, x in MAPS.arrays.items()}, "Predicted", "")
    with pytest.raises(InputError, match=r"\(layers, channels in, channels out\) of its predictor are"):
        kvjax.prefill(m, [ROW], method=kvjax.method("aqua-kv", fitted=fitted))
    for short in (MAPS.arrays["value bias"][:1], MAPS.arrays["value bias"][:, 1:]):
        fitted = Fitted(MAPS.arrays | {"value bias": short}, "Predicted", "")
        with pytest.raises(InputError, match=r"\(layers, channels out\) of its predictor are"):
            kvjax.prefill(m, [ROW], method=kvjax.method("aqua-kv", fitted=fitted))
    with pytest.raises(ValueError, match="what is predicted is a 'key' or a 'value'"):
        Predicted("keys")


def test_what_a_step_encodes_is_what_a_prompt_would_have(rng):
    """A row of 27 tokens encodes its positions 16 to 23 after a step, one of 32 nothing."""
    m, method = model("4/2"), kvjax.method("aqua-kv", tokens=8, residual=4, fitted=MAPS)
    prompts = [rng.integers(0, 40, n).tolist() for n in (32, 27)]
    _, cache = kvjax.prefill(m, prompts, method=method, room=8)
    _, cache = kvjax.step(m, cache, [1, 2])
    maps = {name: x.astype(float) for name, x in MAPS.arrays.items()}
    # With 3 tokens that stay as computed, a prompt of 27 tokens encodes the first 24.
    want = over_below(maps, 8, 3)(Prompt(decoder("4/2"), prompts[1]))
    pos = np.asarray(cache.groups[0].bodies[0].pos)[0, 1, 0]
    (slots,) = np.nonzero(pos >= 0)
    assert sorted(pos[slots].tolist()) == [*range(24)]
    for i, (k, v) in enumerate(bodies(cache, m, method)):
        np.testing.assert_allclose(np.asarray(k)[0, 1][:, slots], want.raw_k[i][:, pos[slots]], atol=1e-5)
        np.testing.assert_allclose(np.asarray(v)[0, 1][:, slots], want.v[i][:, pos[slots]], atol=1e-5)

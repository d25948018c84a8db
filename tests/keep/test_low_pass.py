"""The low frequencies of slots, against scipy's transforms in float64, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.grammar import Budget, Keep
from kvjax.grammar.kinds import AttentionSpec, Observed, View
from kvjax.grammar.phase import ByRank
from kvjax.grammar.when import Every
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.merges.low_pass import STRIP, LowPass, cosines
from kvjax.keep.patterns import Recent, Sink
from kvjax.keep.scores.score import Position
from kvjax.ops.base.rope import Rope
from tests.float64.frequency import low_pass


@pytest.mark.rotating
@pytest.mark.parametrize(("tokens", "stay"), [((40, 31), (9, 12)), ((2 * STRIP + 5, 300), (STRIP + 7, 240))])
def test_slots_between_the_ends_become_the_low_frequencies_of_all_of_them(rng, tokens, stay):
    sinks, newest, most = 3, 5, max(tokens)
    x = {n: rng.normal(size=(2, 2, most, 4)).astype(np.float32) for n in "kv"}
    pos, kept = np.full((2, 2, most), -1, np.int32), np.zeros((2, 2, most), bool)
    for b, (length, fewer) in enumerate(zip(tokens, stay, strict=True)):
        pos[b, :, :length] = np.arange(length)
        kept[b, :, :length] = (pos[b, :, :length] < sinks + fewer) | (pos[b, :, :length] >= length - newest)
    # What empty slots hold does not matter.
    x = {n: np.where(pos[..., None] < 0, np.nan, y) for n, y in x.items()}
    length = jnp.asarray(tokens, jnp.int32)
    seen = Observed({}, None, length, length, 0, AttentionSpec(1.0, None, Rope()))
    view = View(jnp.asarray(x["k"]), jnp.asarray(x["v"]), jnp.asarray(pos), None, {})
    leaving = jnp.asarray(np.where((pos >= 0) & ~kept, np.arange(most), most))
    got = LowPass(sinks, newest)(view, jnp.asarray(kept), leaving, seen)
    for b, (end, fewer) in enumerate(zip(tokens, stay, strict=True)):
        for name in "kv":
            want = x[name][b].astype(np.float64)
            for head in want:
                head[sinks : sinks + fewer] = low_pass(head[sinks : end - newest], fewer)
            np.testing.assert_allclose(getattr(got, name)[b], want, atol=2e-5)


def test_a_list_that_nothing_leaves_is_unchanged_to_the_last_bit(rng):
    x = jnp.asarray(rng.normal(size=(1, 1, 12, 4)), jnp.float32)
    pos, twelve = jnp.arange(12, dtype=jnp.int32)[None, None], jnp.full(1, 12, jnp.int32)
    seen = Observed({}, None, twelve, twelve, 0, AttentionSpec(1.0, None, Rope()))
    nothing = jnp.full((1, 1, 12), 12, jnp.int32)
    got = LowPass(2, 2)(View(x, -x, pos, None, {}), pos >= 0, nothing, seen)
    np.testing.assert_array_equal(got.k, x)
    np.testing.assert_array_equal(got.v, -x)


@pytest.mark.rotating
def test_cosines_of_many_slots_are_those_of_float64():
    """Products of 2 i + 1 and f, up to 2^32 here, are neither rounded nor cut off."""
    many, frequencies = 70_000, np.array([1, 1023, 30_000, 65_000])
    got = np.asarray(cosines(jnp.asarray(frequencies), jnp.ones(many, bool)))
    turn = (2 * np.arange(many) + 1) * frequencies[:, None] / (2 * many)
    np.testing.assert_allclose(got, np.sqrt(2 / many) * np.cos(np.pi * turn), atol=2e-8)


def test_sentences_in_which_keys_are_stored_rotated_are_refused():
    def method(**more):
        return kvjax.chain(Keep(-1.0 * Position(), Budget(0.5), Uniform(), (Sink(2), Recent(2)), **more))

    assert method(when=Every(4), phase=ByRank(), merge=LowPass(2, 2)).keep is not None
    with pytest.raises(ValueError, match=r"merges keys before rotation, and ByPosition\(\) stores them rota"):
        method(when=Every(4), merge=LowPass(2, 2))
    assert method(when=Every(1), phase=ByRank(), merge=LowPass(2, 2)).keep is not None
    for bad in (-1, 1.5, True):
        with pytest.raises(ValueError, match="newest must be a whole number of tokens >= 0"):
            LowPass(2, bad)
    with pytest.raises(ValueError, match="every must be"):
        kvjax.method("freqkv", budget=0.5, every=1)

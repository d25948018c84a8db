"""Bits of each layer: what a fit finds, and what is refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.fitting.statistics.layer_bits import PAIRS, OutputErrors, chosen
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.kinds import AttentionSpec, Inputs
from kvjax.ops.base.rope import Rope
from kvjax.store.affine import Affine
from kvjax.store.layer_bits import LayerBits
from tests.float64.codes import affine
from tests.float64.reference import softmax
from tests.methods.battery import MAIN, model

TEXTS = [list(range(1, 40)), list(range(40, 10, -1))]


def output(q, k, v):
    logits = q @ k.T / np.sqrt(q.shape[-1])
    return softmax(np.where(np.tri(len(q), dtype=bool), logits, -np.inf)) @ v


def test_errors_are_those_of_the_outputs_of_each_head_and_query(rng):
    q, k, v = (rng.normal(size=(1, heads, 7, 8)) for heads in (4, 2, 2))
    pos = np.where(np.arange(7) < 5, np.arange(7), -1)[None]
    pairs = tuple((Affine(a), Affine(b)) for a, b in PAIRS)
    q32, k32, v32 = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    inputs = Inputs(q32, q32, k32, q32[:, 0], jnp.asarray(pos), jnp.array([5]), k=k32, v=v32)
    count, errors = jax.jit(OutputErrors(pairs, AttentionSpec(8**-0.5, None, Rope())))(inputs)
    assert count == 4 * 5
    for (a, b), error in zip(PAIRS, errors, strict=True):
        want = 0.0
        for head in range(4):
            own = q[0, head, :5], k[0, head // 2, :5], v[0, head // 2, :5]
            whole, coded = output(*own), output(own[0], affine(a, 8)(own[1]), affine(b, 8)(own[2]))
            want += (np.linalg.norm(coded - whole, axis=-1) / np.linalg.norm(whole, axis=-1)).sum()
        np.testing.assert_allclose(error, want, rtol=0.02)


@pytest.mark.parametrize("mean", [2, 3.5, 4, 7.9])
def test_no_other_choice_within_the_bits_has_a_smaller_error(rng, mean):
    errors = rng.uniform(size=(3, len(PAIRS)))
    every = [
        p for p in itertools.product(range(len(PAIRS)), repeat=3) if sum(sum(PAIRS[i]) for i in p) <= 6 * mean
    ]
    best = min(every, key=lambda p: sum(errors[i, at] for i, at in enumerate(p)))
    assert chosen(errors, mean) == list(best)


@pytest.mark.rotating
def test_a_fit_spends_at_most_the_bits_that_it_is_given_and_the_method_stores_them():
    fitted = kvjax.fit(model("4/2"), "kvtuner", TEXTS, mean=5)
    keys, values = (fitted.arrays[f"{of} bits"] for of in ("key", "value"))
    assert (keys + values).sum() <= 2 * 2 * 5 and set(keys) | set(values) <= {2, 4, 8}
    cache = kvjax.prefill(model("4/2"), MAIN.first, method=kvjax.method("kvtuner", fitted=fitted))[1]
    assert [g.tail.k.codec.bits for g in cache.groups] == keys.tolist()
    assert [g.tail.v.codec.bits for g in cache.groups] == values.tolist()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="of a 'key' or a 'value'"):
        LayerBits(Affine(4), "keys")
    with pytest.raises(InputError, match="mean is 1.5 bits per number, expected at least 2"):
        kvjax.fit(model("4/2"), "kvtuner", TEXTS, mean=1.5)
    for bits, what in (([8, 3], r"key bits are \[8, 3\], expected 1, 2, 4 or 8"), ([8], "of its bits are")):
        fitted = Fitted({f"{of} bits": np.array(bits) for of in ("key", "value")}, "LayerBits", "")
        with pytest.raises(InputError, match=what):
            kvjax.prefill(model("4/2"), MAIN.first, method=kvjax.method("kvtuner", fitted=fitted))

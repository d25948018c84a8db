"""Keys and values beyond float16's numbers: their codes are as good as those of smaller ones."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.grammar.fitted import fitted_words
from kvjax.models.model import Model
from kvjax.state.codes import dense, encode
from kvjax.store.affine import Affine, Float8
from kvjax.store.levels import ByToken, NearestLevel
from kvjax.store.low_rank import LowRank
from kvjax.store.rotate import Rotate
from kvjax.store.sphere import LloydMax, Signs, SignSketch
from tests.methods.battery import MAIN, model
from tests.methods.table import BY_LABEL, ROWS
from tests.sweep import sweep

AFFINE = [
    Affine(8), Affine(4), Affine(2, group=32), Affine(4, group=32, together=32),
    Affine(2, axis="channel", group=32),
]  # fmt: skip


@jax.jit(static_argnames="codec")
def back(x, codec):
    return dense(encode(x, codec))


@pytest.mark.parametrize("outlier", [-1e5, 1e5, -3e7, 4e8])
def test_affine_codes_are_within_half_a_step_of_outliers(rng, outlier):
    x = rng.normal(size=(64, 64))
    x[3, 5], x[40, 9] = outlier, -outlier / 2
    for codec in AFFINE:
        got = np.asarray(back(x.astype(np.float32), codec), np.float64)
        size = codec.group or 64
        shape = (64 // size, size, 64) if codec.axis == "channel" else (64, 64 // size, size)
        axis = 1 if codec.axis == "channel" else 2
        rows = x.reshape(shape)
        step = np.ptp(rows, axis, keepdims=True) / (2**codec.bits - 1)
        # Numbers of 16 bits are rounded: by 2^-11 up to 65504, and by 2^-6 beyond it.
        ends = np.abs(rows).max(axis, keepdims=True) * 2.0**-11
        assert (np.abs(got.reshape(shape) - rows) <= step * (1 + 3 / 64) / 2 + ends).all(), codec


@pytest.mark.parametrize("scale", [1e5, 3e7])
def test_codes_of_large_rows_are_those_of_small_ones(rng, scale):
    x = jnp.asarray(rng.normal(size=(1, 1, 64, 64)), jnp.float32)
    levels = jnp.linspace(-1, 1, 16)
    codecs = [
        LloydMax(4),
        Signs(),
        SignSketch(),
        Float8("e5m2"),
        LowRank(2, 64),
        Rotate() >> LloydMax(2),
    ]
    by_levels = jax.jit(lambda x: dense(encode(x, ByToken() >> NearestLevel(4, levels))))
    for codec, read in [("levels", by_levels), *((c, partial(back, codec=c)) for c in codecs)]:
        if isinstance(codec, LowRank) and scale > 1e6:
            continue
        small, large = (np.asarray(read(by * x), np.float64) / by for by in (1, scale))
        errors = [np.square(got - np.asarray(x, np.float64)).mean() for got in (small, large)]
        assert errors[1] <= 1.02 * errors[0] + 1e-4, codec


@pytest.mark.parametrize("codec", [*AFFINE, LloydMax(4), SignSketch()], ids=repr)
def test_codes_of_bfloat16_rows_are_those_of_the_same_numbers_in_float32(rng, codec):
    """Of rows that no float16 holds."""
    x = jnp.asarray(rng.normal(size=(64, 64)) * 10.0 ** rng.integers(0, 9, (64, 1)), jnp.bfloat16)
    assert float(jnp.abs(x).max()) > 1e8
    wide, narrow = (np.asarray(back(y, codec), np.float64) for y in (x.astype(jnp.float32), x))
    assert np.isfinite(narrow).all()
    np.testing.assert_allclose(narrow, wide, rtol=2**-7, atol=1e-6)


def scaled(m, by):
    """Scale the keys and values of the same model by `by`."""

    def one(p):
        return p | {"q": p["q"] / by, "k": p["k"] * by, "v": p["v"] * by, "o": p["o"] / by}

    return Model(m.config, m.params | {"layers": tuple(map(one, m.params["layers"]))})


METHODS = [
    row.label
    for row in ROWS
    if row.method().store is not None and not any(word.fitted for word in fitted_words(row.method()))
]


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(METHODS, "kivi", "qjl"))
def test_answers_on_large_keys_are_as_good_as_on_small_ones(name):
    row = BY_LABEL[name]
    plain, errors = model(row.model), []
    want = None
    for m in (plain, scaled(plain, 3e5)):
        logits = []
        _, cache = kvjax.prefill(m, MAIN.first, method=row.method(), room=len(MAIN.steps))
        for token in MAIN.steps:
            found, cache = kvjax.step(m, cache, token)
            logits.append(np.asarray(found))
        if want is None:
            _, whole = kvjax.prefill(m, MAIN.first, room=len(MAIN.steps))
            want = []
            for token in MAIN.steps:
                found, whole = kvjax.step(m, whole, token)
                want.append(np.asarray(found))
        errors.append(np.abs(np.stack(logits) - np.stack(want)).mean())
    small, large = errors
    assert np.isfinite(large) and large <= 1.3 * small + 1e-4

"""A store inside another one: what leaves numbers out has the other encode what stays; channels in runs."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.state.codes import dense, encode
from kvjax.store.affine import Affine
from kvjax.store.channels import QueryDrivenChannels
from kvjax.store.pruned import Pruned
from kvjax.store.split import Split

X = np.random.default_rng(4).normal(size=(2, 3, 16, 8)).astype(np.float32)
INNER = [Affine(4), Affine(2, axis="channel", group=4)]


@jax.jit(static_argnames="codec")
def back(x, codec):
    return dense(encode(x, codec))


def by(codec, x):
    return np.asarray(back(x, codec))


@pytest.mark.parametrize("codec", INNER)
def test_the_channels_that_are_asked_for_are_encoded_as_rows_of_their_own(codec):
    want = np.zeros_like(X)
    for at in np.ndindex(2, 3, 2):
        tokens = slice(8 * at[2], 8 * at[2] + 8)
        rows = X[at[0], at[1], tokens]
        stay = np.sort(np.argsort(-(rows**2).sum(0), kind="stable")[:4])
        want[at[0], at[1], tokens, stay] = by(codec, rows[:, stay]).T
    np.testing.assert_allclose(by(QueryDrivenChannels(0.5, 8) >> codec, X), want, atol=1e-6)


@pytest.mark.parametrize("codec", INNER)
def test_the_largest_numbers_are_encoded_as_rows_of_their_own(codec):
    stay = np.sort(np.argsort(-np.abs(X), axis=-1, kind="stable")[..., :4], -1)
    values = by(codec, np.take_along_axis(X, stay, -1))
    want = np.zeros_like(X)
    np.put_along_axis(want, stay, values, -1)
    np.testing.assert_allclose(by(Pruned(0.5) >> codec, X), want, atol=1e-6)


def test_runs_of_channels_have_codecs_of_their_own():
    codec = Split(((Affine(8), 2), (Affine(2, axis="channel", group=4), 5), (Affine(4), None)))
    runs = zip(codec.parts, (X[..., :2], X[..., 2:7], X[..., 7:]), strict=True)
    want = np.concatenate([by(inner, x) for (inner, _), x in runs], -1)
    np.testing.assert_array_equal(by(codec, X), want)
    assert codec.granule == 4


def test_parts_that_do_not_make_a_row_are_refused_with_the_width():
    for parts in (((Affine(8), 9),), ((Affine(8), 4), (Affine(4), 3)), ((Affine(8), 8), (Affine(4), None))):
        with pytest.raises(ValueError, match="rows of 8 were given: give parts that are 8 together"):
            by(Split(parts), X)
    with pytest.raises(ValueError, match="pairs of a codec and a number of channels >= 1"):
        Split(((Affine(8), None), (Affine(4), 2)))


def test_two_stores_are_one_whichever_is_named_first():
    think, kivi = kvjax.method("think", group=64), kvjax.method("kivi", residual=64)
    a, b = kvjax.chain(think, kivi).store, kvjax.chain(kivi, think).store
    assert a == b and a.keys == think.store.keys.around(kivi.store.keys) and a.values == kivi.store.values
    assert a.residual == 64 and a.granule == 64
    with pytest.raises(ValueError, match="encodes 32 of them together: choose them for a multiple"):
        kvjax.chain(kvjax.method("think", group=48), kivi)
    with pytest.raises(ValueError, match="at most one store"):
        kvjax.chain(think, kvjax.method("kvquant"))

"""Sums of a dictionary's atoms: what a pursuit finds, what a fit gains, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.fitting.loops.keys_values import read_keys_values
from kvjax.fitting.statistics.atoms import dictionary
from kvjax.grammar.fitted import Fitted
from kvjax.store.atoms import Atoms, Pursuit
from tests.float64.codes import pursued
from tests.methods.battery import MAIN, model

TEXTS = [list(range(1, 40)), list(range(40, 10, -1))]


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_a_pursuit_takes_the_atoms_of_each_layer_and_many_tokens_in_pieces(rng):
    atoms, x = unit(rng.normal(size=(2, 30, 8))), rng.normal(size=(2, 1, 2, 300, 8))
    codec = Pursuit(3, jnp.asarray(atoms, jnp.float32))
    got = codec.decode(codec.encode(jnp.asarray(x, jnp.float32)), 8, jnp.float32)
    want = np.stack([pursued(a, 3)(rows) for a, rows in zip(atoms, x, strict=True)])
    # In float32, a weight between two numbers of float8 may become the other one.
    assert (np.abs(got - want).max(-1) < 1e-5).mean() > 0.99


def test_rows_of_zeros_and_large_numbers_stay_finite():
    codec = Pursuit(2, jnp.eye(4)[None])
    got = codec.decode(codec.encode(jnp.zeros((1, 1, 1, 2, 4)).at[..., 1, 0].set(1e6)), 4, jnp.float32)
    assert np.isfinite(got).all() and not got[..., 0, :].any()
    np.testing.assert_array_equal(got[0, 0, 0, 1], [896.0, 0.0, 0.0, 0.0])


def test_fitted_atoms_come_closer_than_drawn_rows_and_find_those_that_rows_were_made_of(rng):
    fitted = kvjax.fit(model("4/2"), "csr:atoms=2", TEXTS, size=32).arrays
    for of, x in zip(("key", "value"), read_keys_values(model("4/2"), [TEXTS]), strict=True):
        for atoms, rows in zip(
            fitted[f"{of} atoms"].astype(float), x.reshape(2, -1, 16).astype(float), strict=True
        ):
            np.testing.assert_allclose(np.linalg.norm(atoms, axis=-1), 1, rtol=1e-5)
            lost = lambda d: np.square(pursued(d, 2)(rows) - rows).sum()  # noqa: E731, B023
            assert lost(atoms) < 0.9 * lost(unit(rows[rng.permutation(len(rows))[:32]]))
    made = np.eye(8)[rng.integers(0, 8, 500)] * rng.uniform(1, 2, (500, 1))
    assert (np.abs(dictionary(made, 8, 1) @ np.eye(8)).max(0) > 0.99).all()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="at least 1 atom"):
        Atoms(0, "key")
    with pytest.raises(ValueError, match="of a 'key' or a 'value'"):
        Atoms(1, "keys")
    with pytest.raises(ValueError, match="for rows of 4 channels, these have 8"):
        Pursuit(1, jnp.eye(4)[None]).encode(jnp.zeros((1, 1, 1, 2, 8)))
    with pytest.raises(InputError, match="size is 1000, expected at most"):
        kvjax.fit(model("4/2"), "csr", TEXTS, size=1000)
    fitted = Fitted({f"{of} atoms": np.ones((2, 5, 8)) for of in ("key", "value")}, "Atoms", "")
    with pytest.raises(InputError, match="5 atoms of 8 channels"):
        kvjax.prefill(model("4/2"), MAIN.first, method=kvjax.method("csr", fitted=fitted))

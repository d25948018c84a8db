"""Codes of fixed ranges: what a fit finds, and what is beyond it."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.fitting.loops.keys_values import read_keys_values
from kvjax.grammar import Method, Store
from kvjax.grammar.fitted import Fitted
from kvjax.store.fixed import BoundStaticAffine, StaticAffine
from kvjax.store.rotate import Rotate
from tests.float64.codes import of_range
from tests.methods.battery import MAIN, model

TEXTS = [list(range(1, 40)), list(range(40, 10, -1))]


def test_smoothquant_takes_the_largest_number_of_a_layer():
    fitted = kvjax.fit(model("4/2"), "smoothquant", TEXTS).arrays
    for of, x in zip(("key", "value"), read_keys_values(model("4/2"), [TEXTS]), strict=True):
        most = np.abs(x).max((1, 2, 3))
        np.testing.assert_allclose(fitted[f"{of} step"], np.repeat(most[:, None] / 127, 2, 1), rtol=1e-6)
        np.testing.assert_allclose(fitted[f"{of} low"], -128 * fitted[f"{of} step"], rtol=1e-6)


def test_q_int4_finds_the_step_of_least_error_of_rotated_numbers():
    fitted = kvjax.fit(model("4/2"), "q-int4:block=8", TEXTS).arrays
    turn = np.kron(np.eye(2), Rotate().matrix(8))
    for of, x in zip(("key", "value"), read_keys_values(model("4/2"), [TEXTS]), strict=True):
        for layer, rows in enumerate(x.astype(float) @ turn.T):
            lost = lambda step: np.square(of_range(-8 * step, step, 4)(rows) - rows).sum()  # noqa: E731, B023
            step = float(fitted[f"{of} step"][layer, 0])
            tried = np.abs(rows).max() / 7 * np.linspace(0.05, 1, 40)
            assert lost(step) <= 1.001 * min(map(lost, tried))


def test_prefixquant_finds_each_head_s_step_from_the_tokens_behind_the_prefix():
    fitted = kvjax.fit(model("4/2"), "prefixquant:sinks=3", TEXTS).arrays
    behind = np.concatenate([np.arange(len(row)) >= 3 for row in TEXTS])
    for of, x in zip(("key", "value"), read_keys_values(model("4/2"), [TEXTS]), strict=True):
        rows = (x.astype(float) @ Rotate().matrix(16).T)[:, :, behind]
        for at in np.ndindex(2, 2):
            lost = lambda step: np.square(of_range(-8 * step, step, 4)(rows[at]) - rows[at]).sum()  # noqa: E731, B023
            tried = [np.abs(rows[at]).max() / 7.5 * (1 - i / 20) for i in range(10)]
            np.testing.assert_allclose(fitted[f"{of} step"][at], min(tried, key=lost), rtol=1e-6)
        np.testing.assert_allclose(fitted[f"{of} low"], -8 * fitted[f"{of} step"], rtol=1e-6)
    with pytest.raises(InputError, match="at most 40 tokens, which stay unencoded"):
        kvjax.fit(model("4/2"), "prefixquant:sinks=40", TEXTS)


def test_numbers_beyond_a_range_become_its_ends_and_come_back_as_they_are(rng):
    x = jnp.asarray(10 * rng.normal(size=(2, 3, 2, 4, 16)), jnp.float32)
    codec = BoundStaticAffine(3, jnp.full((2, 2), -2.0), jnp.full((2, 2), 0.5))
    got = codec.decode(codec.encode(x), 16, jnp.float32)
    np.testing.assert_allclose(got, of_range(-2.0, 0.5, 3)(np.asarray(x, float)), atol=1e-6)
    np.testing.assert_array_equal(codec.decode(codec.encode(got), 16, jnp.float32), got)
    flat = BoundStaticAffine(4, jnp.zeros((1, 2)), jnp.zeros((1, 2)))
    assert np.isfinite(flat.decode(flat.encode(x[:1]), 16, jnp.float32)).all()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="1 to 8 bits"):
        StaticAffine(9, "key", "smoothquant")
    with pytest.raises(ValueError, match="of a 'key' or a 'value'"):
        StaticAffine(4, "keys", "smoothquant")
    with pytest.raises(ValueError, match="fitted for 3 heads"):
        BoundStaticAffine(4, jnp.zeros((1, 3)), jnp.zeros((1, 3))).encode(jnp.zeros((1, 1, 2, 4, 8)))
    with pytest.raises(ValueError, match="block=5 must divide the 16 channels"):
        Rotate(block=5).matrix(16)
    with pytest.raises(InputError, match="no rule is known for the range of nobody"):
        kvjax.fit(model("4/2"), Method(store=Store(StaticAffine(4, "key", "nobody"))), TEXTS)
    fitted = Fitted(
        {f"{of} {n}": np.ones((2, 2)) for of in ("key", "value") for n in ("low", "step")}, "StaticAffine", ""
    )
    with pytest.raises(InputError, match="of its ranges are"):
        kvjax.prefill(model("6/3"), MAIN.first, method=kvjax.method("smoothquant", fitted=fitted))

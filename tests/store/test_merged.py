"""Two layers as one, as arrays: the arc, the lengths, and which tokens stay apart, against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.grammar import Budget
from kvjax.state.codes import Codes, dense
from kvjax.store.affine import Affine
from kvjax.store.merged import LengthAndDirection, MergedLayers, angle, between
from tests.float64 import stacks

B, K, S, H = 2, 3, 9, 8


def rows(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape or (B, K, S, H)) * 3


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def merged(word, low, high, codec=None):
    """Merge by one program into the codes of both layers."""
    low, high = (np.asarray(x, np.float32) for x in (low, high))
    return jax.jit(lambda low, high: word.merge(low, high, codec))(low, high)


def restored(lower, upper):
    """Rows of both layers; the upper one's codes have only their lengths."""
    assert set(upper.data) == {"size"}
    both = jax.jit(lambda *x: tuple(map(dense, x)))
    return both(lower, Codes(lower.data | upper.data, upper.codec, upper.width, upper.dtype))


@pytest.mark.parametrize("t", [0.0, 0.6, 1.0])
def test_directions_lie_on_the_arc_and_layers_keep_their_lengths(t):
    low, high = rows(0), rows(1)
    codes = merged(MergedLayers(t=t), low, high)
    want, n1, n2 = stacks.slerp(low, high, t)
    np.testing.assert_allclose(codes[0].data["direction"], want, atol=1e-6)
    for got, own, length in zip(restored(*codes), (low, high), (n1, n2), strict=True):
        np.testing.assert_allclose(np.linalg.norm(got, axis=-1), np.linalg.norm(own, axis=-1), rtol=1e-6)
        np.testing.assert_allclose(got, want * length[..., None], atol=1e-5)


def test_layers_of_one_direction_come_back_as_they_were():
    low = rows(0)
    high = low * np.random.default_rng(2).uniform(0.1, 10, (B, K, S, 1))
    codes = merged(MergedLayers(), low, high)
    for got, want in zip(restored(*codes), (low, high), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-5)


def test_small_and_straight_angles_and_rows_of_zeros_have_finite_directions_and_gradients():
    u = unit(rows(0, 4, H))
    w = np.stack([u[0], unit(u[1] + 1e-5 * u[0]), -u[2], np.zeros(H)])
    got = between(jnp.asarray(u, jnp.float32), jnp.asarray(w, jnp.float32), 0.6)
    want = np.stack([u[0], unit(u[1] + 6e-6 * u[0]), -u[2], u[3]])
    np.testing.assert_allclose(got, want, atol=1e-6)
    near = angle(jnp.asarray(u[:2], jnp.float32), jnp.asarray(w[:2], jnp.float32))
    np.testing.assert_allclose(near, stacks.angle(u[:2], w[:2]), atol=3e-7)

    def loss(x, y):
        return sum(dense(c).sum() for c in MergedLayers().merge(x, y, None)[:1])

    for x in jax.jit(jax.grad(loss, (0, 1)))(jnp.asarray(u), jnp.asarray(w)):
        assert np.isfinite(x).all()


@pytest.mark.parametrize("gamma", [0.05, 0.5, 1.0])
def test_the_pairs_of_the_largest_angles_stay_apart(gamma):
    keys, values = (rows(0), rows(1)), (rows(2), rows(3))
    live = np.arange(S) < np.array([S, 5])[:, None, None]
    live = np.broadcast_to(live, (B, K, S))

    def given(x):
        # What empty slots hold may be anything.
        return jnp.asarray(np.where(live[..., None], x, 1e3), jnp.float32)

    got = MergedLayers(gamma=gamma).apart(
        tuple(map(given, keys)), tuple(map(given, values)), jnp.asarray(live)
    )
    for b, n in enumerate([S, 5]):
        of_row = [[x[b, :, :n] for x in pair] for pair in (keys, values)]
        want = stacks.apart(*of_row, gamma, most=S)
        assert want.any() and (gamma == 1 or not want.all())
        np.testing.assert_array_equal(np.asarray(got)[b, :, :n] > -np.inf, want)
    assert (np.asarray(got)[~live] == -np.inf).all()


def test_directions_may_be_codes_and_lengths_stay():
    low, high, codec = rows(0).astype(np.float32), rows(1).astype(np.float32), Affine(4, group=4)
    codes = merged(MergedLayers(), low, high, codec)

    @jax.jit
    def coded(low, high):
        return codec.decode(codec.encode(between(low, high, 0.6)), H, low.dtype)

    want = coded(unit(low), unit(high))
    assert "size" in codes[0].data and "direction" not in codes[0].data
    for got, own in zip(restored(*codes), (low, high), strict=True):
        np.testing.assert_allclose(got, want * np.linalg.norm(own, axis=-1)[..., None], atol=1e-4)


def test_sized_is_a_codec_of_its_own():
    x, codec = jnp.asarray(rows(0), jnp.bfloat16), LengthAndDirection()
    data = codec.encode(x)
    assert {n: y.dtype for n, y in data.items()} == {"direction": jnp.bfloat16, "size": jnp.bfloat16}
    whole = x.astype(jnp.float32)
    np.testing.assert_allclose(codec.decode(data, H, jnp.float32), whole, rtol=0.02, atol=0.02)


def test_what_is_no_share_or_no_budget_is_refused():
    with pytest.raises(ValueError, match=r"t of MergedLayers must lie in \[0, 1\], got 2"):
        MergedLayers(t=2)
    with pytest.raises(ValueError, match=r"write Budget\(0.05\)"):
        MergedLayers(most=0.05)  # type: ignore[arg-type]
    assert MergedLayers(most=Budget(4)).most.capacity(100) == 4

"""Rotary embedding against float64 numpy written from the papers' equations."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.base.long_rope import LongRope
from kvjax.ops.base.rope import Rope, angles, rotate
from tests.sweep import sweep

H = 16
POSITIONS = np.array([0, 1, 2, 7, 63, 500, 4095])


def complex_rotation(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """RoFormer eq. 12-16: the pair (i, i + h) as a complex number times e^{i m f}; x [S, H], angle [S, h]."""
    h = angle.shape[-1]
    z = (x[:, :h] + 1j * x[:, h : 2 * h]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag, x[:, 2 * h :]], -1)


def turned(rope: Rope, x: np.ndarray, positions: np.ndarray, length: int | None = None) -> np.ndarray:
    reach = None if length is None else jnp.full(positions.shape, length, jnp.int32)
    return np.asarray(_turned(rope, x.astype(np.float32), positions.astype(np.int32), reach), np.float64)


@functools.partial(jax.jit, static_argnums=0)
def _turned(rope, x, positions, reach):
    return rotate(x, *angles(rope, positions, x.shape[-1], reach))


def assert_rotates(rope, frequencies, rng, amplitude=1.0, length=None):
    x = rng.standard_normal((len(POSITIONS), H))
    expected = complex_rotation(x, POSITIONS[:, None] * frequencies) * amplitude
    np.testing.assert_allclose(
        turned(rope, x, POSITIONS, length), expected, atol=2e-3
    )  # 4095 radians in float32
    near = POSITIONS < 100
    np.testing.assert_allclose(turned(rope, x, POSITIONS, length)[near], expected[near], atol=3e-5)


def base(theta: float, dim: int = H) -> np.ndarray:
    return np.array([theta ** (-2 * i / dim) for i in range(dim // 2)])


# --- each kind from its equation ---------------------------------------------------------------------


def test_default_is_a_complex_rotation(rng):
    assert_rotates(Rope(theta=500.0), base(500.0), rng)


def test_proportional_turns_the_fastest_pairs_of_a_whole_head(rng):
    """Gemma 4: pairs (i, i + H/2) by the frequencies of H channels, of which only the first ones turn."""
    first = np.arange(H // 2) < 3
    assert_rotates(
        Rope(kind="proportional", theta=500.0, rotary_dim=6, factor=2.0), base(500.0) / 2 * first, rng
    )
    with pytest.raises(ValueError, match="leave start and copies out"):
        Rope(kind="proportional", start=2)


def test_linear_divides_positions(rng):
    """Position interpolation (arXiv:2306.15595, eq. 4): f(x, m / s)."""
    assert_rotates(Rope(kind="linear", factor=4.0), base(10000.0) / 4, rng)


@pytest.mark.parametrize("length", [100, 128, 129, 5000])
def test_dynamic_changes_the_base_beyond_the_original_length(length, rng):
    """Dynamic NTK: theta' = theta (s l / L - (s - 1))^(H / (H - 2)) for l > L."""
    factor, original = 2.0, 128
    stretch = max(1.0, factor * length / original - (factor - 1))
    theta = 1000.0 * stretch ** (H / (H - 2))
    rope = Rope(theta=1000.0, kind="dynamic", factor=factor, original_max=original)
    assert_rotates(rope, base(theta), rng, length=length)


LONG = LongRope(
    theta=1000.0, factor=4.0, original_max=128,
    short_factor=tuple(1 + 0.1 * i for i in range(H // 2)), long_factor=tuple(1.5 + i for i in range(H // 2)),
)  # fmt: skip


@pytest.mark.parametrize(("length", "factors"), [(128, LONG.short_factor), (129, LONG.long_factor)])
def test_longrope_divides_by_the_factors_of_the_length(length, factors, rng):
    """LongRoPE (arXiv:2402.13753), eq. 2, and Phi-3's sqrt(1 + ln s / ln L) on cos and sin."""
    amplitude = math.sqrt(1 + math.log(4) / math.log(128))
    assert_rotates(LONG, base(1000.0) / np.array(factors), rng, amplitude, length)


def test_longrope_rows_rotate_by_their_own_length():
    pos = jnp.asarray([[0, 1, 9], [0, 1, 9]], jnp.int32)
    both = np.stack(angles(LONG, pos, H, jnp.asarray([[128], [129]], jnp.int32)))
    for row, length in enumerate((128, 129)):
        alone = np.stack(angles(LONG, pos[0], H, jnp.full(3, length, jnp.int32)))
        np.testing.assert_allclose(both[:, row], alone, atol=1e-6)


def test_longrope_needs_as_many_short_as_long_factors():
    with pytest.raises(ValueError, match="as many short as long factors above 0, got 1 and 2"):
        LongRope(short_factor=(1.0,), long_factor=(1.0, 2.0))
    with pytest.raises(ValueError, match="has 1 factors, expected 2: one for each pair of the 4 channels"):
        LongRope(short_factor=(1.0,), long_factor=(1.0,)).frequencies(4)


def test_dynamic_rows_turn_by_their_own_length(rng):
    rope = Rope(theta=1000.0, kind="dynamic", factor=2.0, original_max=16)
    x = rng.standard_normal((2, 3, H))
    pos = jnp.asarray([[0, 1, 9], [0, 1, 9]], jnp.int32)
    cos, sin = angles(rope, pos, H, jnp.asarray([[10], [40]], jnp.int32))
    together = np.asarray(rotate(jnp.asarray(x, jnp.float32), cos, sin))
    for row, length in enumerate((10, 40)):
        np.testing.assert_allclose(
            together[row], turned(rope, x[row], np.array([0, 1, 9]), length), atol=1e-5
        )


def test_llama3_blends_by_wavelength(rng):
    factor, low, high, original = 8.0, 1.0, 4.0, 256
    expected = []
    for f in base(10000.0):
        wavelength = 2 * math.pi / f
        if wavelength < original / high:
            expected.append(f)
        elif wavelength > original / low:
            expected.append(f / factor)
        else:
            share = (original / wavelength - low) / (high - low)
            expected.append((1 - share) * f / factor + share * f)
    assert len(set(np.round(np.array(expected) / base(10000.0), 6))) > 2  # all three branches are met
    rope = Rope(
        kind="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high, original_max=original
    )
    assert_rotates(rope, np.array(expected), rng)


def test_yarn_keeps_fast_and_interpolates_slow_frequencies(rng):
    """YaRN section 3.2: r(i) = L / wavelength turns; kept where r > beta, divided by s where r < alpha."""
    factor, original, fast, slow = 16.0, 4096, 32.0, 1.0
    rope = Rope(kind="yarn", factor=factor, original_max=original, truncate=False)
    f, found = base(10000.0), rope.frequencies(H)
    turns = original * f / (2 * math.pi)
    np.testing.assert_allclose(found[turns > fast], f[turns > fast], rtol=1e-12)
    np.testing.assert_allclose(found[turns < slow], f[turns < slow] / factor, rtol=1e-12)
    between = (turns <= fast) & (turns >= slow)
    share = (found / f - 1 / factor) / (1 - 1 / factor)
    # Linear in the index from where r = beta to where r = alpha: the authors' code.
    index = [H * math.log(original / (2 * math.pi * r)) / (2 * math.log(10000.0)) for r in (fast, slow)]
    expected = (index[1] - np.arange(H // 2)) / (index[1] - index[0])
    assert between.sum() >= 2
    np.testing.assert_allclose(share[between], expected[between], rtol=1e-9)
    assert_rotates(rope, found, rng, amplitude=0.1 * math.log(factor) + 1)  # eq. 22


def test_yarn_truncation_widens_the_blend_to_whole_indices():
    sizes = {"kind": "yarn", "factor": 4.0, "original_max": 2048}
    share = Rope(**sizes).frequencies(64) / base(10000.0, 64)
    edges = [64 * math.log(2048 / (2 * math.pi * r)) / (2 * math.log(10000.0)) for r in (32, 1)]
    first, last = math.floor(edges[0]), math.ceil(edges[1])
    np.testing.assert_allclose(share[: first + 1], 1)
    np.testing.assert_allclose(share[last:], 1 / 4)
    assert np.all(np.diff(share[first : last + 1]) < 0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 0.5, "mscale_all_dim": 2.0}, (0.05 * math.log(4) + 1) / (0.2 * math.log(4) + 1)),
        ({"mscale": 0.5}, 0.1 * math.log(4) + 1),
        ({"factor": 0.5}, 1.0),
    ],
)
def test_yarn_amplitude(options, expected):
    assert Rope(**{"kind": "yarn", "factor": 4.0, **options}).amplitude == pytest.approx(expected, rel=1e-12)


# --- what holds for every kind -----------------------------------------------------------------------

KINDS = [
    Rope(),
    Rope(kind="linear", factor=3.0),
    Rope(kind="dynamic", factor=2.0, original_max=32),
    Rope(kind="llama3", factor=8.0, original_max=64),
    Rope(kind="yarn", factor=4.0, original_max=64),
    Rope(rotary_dim=6),
]


@pytest.mark.parametrize("rope", KINDS, ids=lambda r: r.kind + str(r.rotary_dim or ""))
def test_scores_depend_on_distance_alone(rope, rng):
    q, k = rng.standard_normal((2, 1, H)).repeat(4, 1)
    pairs = np.array([[40, 33], [7, 0], [40, 20], [9, 2]]).T
    near, same, other, again = (turned(rope, q, pairs[0], 100) * turned(rope, k, pairs[1], 100)).sum(-1)
    assert near == pytest.approx(same, abs=1e-4) and near == pytest.approx(again, abs=1e-4)
    assert near != pytest.approx(other, abs=1e-2)


@pytest.mark.parametrize("rope", KINDS, ids=lambda r: r.kind + str(r.rotary_dim or ""))
def test_turning_back_gives_the_same_vector(rope, rng):
    x = rng.standard_normal((4, H))
    pos = np.array([0, 3, 17, 200])
    back = turned(rope, turned(rope, x, pos, 201), -pos, 201)
    dim = rope.rotary_dim or H
    np.testing.assert_allclose(back[:, :dim], x[:, :dim] * rope.amplitude**2, atol=1e-4)
    np.testing.assert_allclose(back[:, dim:], x[:, dim:], atol=1e-6)


def test_channels_beyond_rotary_dim_pass_unchanged(rng):
    x = rng.standard_normal((3, H))
    out = turned(Rope(theta=100.0, rotary_dim=6), x, np.array([1, 5, 9]))
    np.testing.assert_array_equal(out[:, 6:], x.astype(np.float32)[:, 6:])
    np.testing.assert_allclose(
        out, complex_rotation(x, np.array([[1], [5], [9]]) * base(100.0, 6)), atol=1e-5
    )


def test_low_precision_inputs_keep_their_dtype_and_turn_in_float32(rng):
    x = jnp.asarray(rng.standard_normal((5, H)), jnp.bfloat16)
    pos = jnp.asarray([0, 10, 100, 1000, 10000], jnp.int32)
    cos, sin = angles(Rope(), pos, H)
    out = rotate(x, cos, sin)
    assert out.dtype == jnp.bfloat16
    exact = rotate(x.astype(jnp.float32), cos, sin)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(exact.astype(jnp.bfloat16)))


@pytest.mark.rotating
@pytest.mark.parametrize("rope", sweep(KINDS, KINDS[2]), ids=lambda r: r.kind + str(r.rotary_dim or ""))
def test_positions_of_any_shape_and_jit_give_the_same(rope, rng):
    pos = jnp.asarray(rng.integers(0, 100, (2, 3, 4)), jnp.int32)
    length = jnp.full((2, 1, 1), 100, jnp.int32)
    plain = angles(rope, pos, H, length)
    jitted = jax.jit(lambda p, n: angles(rope, p, H, n))(pos, length)
    flat = angles(rope, pos.reshape(-1), H, jnp.full((24,), 100, jnp.int32))
    for a, b, c in zip(plain, jitted, flat, strict=True):
        assert a.shape == (2, 3, 4, (rope.rotary_dim or H) // 2)
        np.testing.assert_allclose(a, b, atol=1e-5)
        np.testing.assert_allclose(a.reshape(c.shape), c, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "longrope"}, "must be one of default, linear"),
        ({"rotary_dim": 5}, "even"),
        ({"rotary_dim": 0}, "even"),
    ],
)
def test_impossible_rotations_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Rope(**options)

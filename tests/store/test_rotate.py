"""Codes in another basis: the rotations, and attention over what is stored against plain decoding."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.compress.group import group_method
from kvjax.grammar import Method, Store
from kvjax.ops.attention.union import Keys, attend
from kvjax.state import codes
from kvjax.state.code_forms import is_steady, meet, span_of
from kvjax.state.codes import Codec, Codes, dense
from kvjax.store.affine import Affine
from kvjax.store.extremes import Extremes
from kvjax.store.outliers import Outliers
from kvjax.store.residual import Residual
from kvjax.store.rotate import Rotate, hadamard, orthogonal
from kvjax.store.sphere import LloydMax, SignSketch
from tests.methods.battery import MAIN, ROOM, model, off
from tests.store.test_affine import affine_by_hand, tokens_of

encode = jax.jit(codes.encode, static_argnames="codec")
decode = jax.jit(Codes.decode)
KIVI = Affine(4, axis="channel", group=16), Affine(4, group=16, together=16)


@pytest.mark.parametrize("width", [1, 2, 7, 16, 24, 64])
@pytest.mark.parametrize("make", [orthogonal, hadamard])
def test_rotations_are_orthogonal_and_follow_from_their_seed(make, width):
    r = make(width, 3)
    np.testing.assert_allclose(r @ r.T, np.eye(width), atol=1e-13)
    np.testing.assert_array_equal(r, make.__wrapped__(width, 3))
    assert width == 1 or np.abs(r - make(width, 4)).max() > 0.1


def test_a_hadamard_rotation_gives_all_channels_the_same_share_of_one():
    np.testing.assert_allclose(np.abs(hadamard(64, 0)), 1 / 8, rtol=1e-14)
    # 24 = 8 * 3: a Hadamard matrix of 8 times a rotation of 3.
    r, q = hadamard(24, 0), orthogonal(3, 0)
    for i, j in np.ndindex(8, 8):
        block = r[3 * i : 3 * i + 3, 3 * j : 3 * j + 3]
        np.testing.assert_allclose(np.abs(block), np.abs(q) / np.sqrt(8), rtol=1e-13)


def test_a_rotation_is_uniform_over_all_rotations():
    """The first column is a random direction: its mean is 0, and its coordinates have variance 1 / H."""
    columns = np.stack([orthogonal.__wrapped__(6, seed)[:, 0] for seed in range(500)])
    assert np.abs(columns.mean(0)).max() < 4 / np.sqrt(6 * 500)
    assert np.abs((columns**2).mean(0) * 6 - 1).max() < 0.25


@pytest.mark.parametrize("axis, group", [("token", 8), ("channel", 8)])
def test_rotated_rows_are_encoded_and_come_back_turned_back(rng, axis, group):
    # A Hadamard rotation of 16 channels adds and divides by 4, which rounds nothing of these whole numbers.
    x = 4.0 * rng.integers(-50, 50, (2, 3, 16, 16))
    coded = encode(jnp.asarray(x, jnp.float32), Rotate(seed=5) >> Affine(4, axis=axis, group=group))
    r = hadamard(16, 5)
    codes, scale, zero = affine_by_hand(x @ r.T, 4, axis, group)
    turned = codes * scale.astype(np.float64)[..., None] + zero.astype(np.float64)[..., None]
    np.testing.assert_allclose(decode(coded), tokens_of(turned, axis) @ r, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize(
    "codec, message",
    [
        (
            Rotate(),
            r"Rotate is no codec: .* kvjax\.words\.Codec, .* as in Rotate\(\) >> Affine\(4\)",
        ),
        (Rotate() >> Rotate(), "ChainedWrappers is no codec"),
        (Affine, r"the codec is the class Affine, not one of its words: write Affine\(bits=...\)"),
        (8, "int is no codec"),
    ],
    ids=str,
)
def test_a_store_wants_codecs(codec, message):
    with pytest.raises(ValueError, match=message):
        Store(None, codec)


# Codecs of keys and values, by what is in the way of one dot product per slot.
SPANS: dict[str, tuple[Any, Any]] = {
    "keys": (Rotate() >> Affine(4), Affine(4)),
    "values": (None, Rotate("orthogonal", 1) >> Affine(8)),
    "both, in groups": (Rotate() >> KIVI[0], Rotate("orthogonal") >> KIVI[1]),
    "twice": (Rotate(seed=1) >> Rotate("orthogonal") >> Affine(4), Rotate() >> (Rotate() >> Affine(4))),
}


@pytest.mark.parametrize("name", SPANS)
def test_attention_over_what_is_stored_is_attention_over_what_is_decoded(rng, name):
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, n, t, 32)), jnp.float32) for n, t in ((4, 1), (2, 16), (2, 16))
    )
    k, v = (x if c is None else encode(x, c) for x, c in zip((k, v), SPANS[name], strict=True))
    met = meet(q, k, v)
    assert met.turned
    pos = jnp.broadcast_to(jnp.arange(16), (2, 2, 16))

    @jax.jit
    def over(q, k, v):
        return attend(q, Keys(dense(k), dense(v), pos, None), jnp.full((2, 1), 15), scale=0.3)[:2]

    (out, lse), (want, want_lse) = over(*met[:3]), over(q, k, v)
    np.testing.assert_allclose(met.back(out), want, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, atol=2e-6)
    # And what is decoded is what is stored, times the matrix.
    for x, bare in ((k, met.k), (v, met.v)):
        if isinstance(x, Codes):
            matrix = span_of(x.codec, 32).matrix
            np.testing.assert_allclose(decode(x), np.asarray(decode(bare), np.float64) @ matrix, atol=3e-6)


def test_plain_rows_and_latents_stay_in_their_basis(rng):
    q, k = jnp.zeros((1, 2, 1, 32)), jnp.asarray(rng.normal(size=(1, 1, 16, 32)), jnp.float32)
    met = meet(q, k, encode(k, Affine(4)))
    assert not met.turned and met.q is q and met.k is k
    # The values are some channels of these keys, which are all mixed in what is stored.
    latents = encode(k, Rotate() >> Affine(4))
    met = meet(q, latents, None)
    assert not met.turned and met.k is latents
    # A sum of two codecs that turn nothing is met as it is, not as rows of twice the width.
    sums = encode(k, Residual(Affine(4), Residual(Affine(2), Affine(2))))
    assert not meet(q, sums, sums).turned
    met = meet(q, encode(k, Rotate() >> sums.codec), k)
    assert met.turned and met.k.codec == sums.codec and met.k.width == 32


@pytest.mark.parametrize("codec, least, most", [(Affine(4), 0.0, 0.25), (KIVI[0], 0.8, 1.25)], ids=str)
def test_a_rotation_pays_where_one_large_channel_sets_the_step_of_all(rng, codec, least, most):
    """Per token it does, and behind a rotation all share it; with a step per channel nothing is to be won."""
    x = rng.normal(size=(1, 2, 64, 64)).astype(np.float32)
    x[..., 7] *= 30
    plain, turned = (
        float(np.square(decode(encode(jnp.asarray(x), c)) - x).mean()) for c in (codec, Rotate() >> codec)
    )
    assert least < turned / plain < most


@dataclasses.dataclass(frozen=True)
class Decoded(Codec):
    """A codec whose rows are always decoded: it says neither a kernel form nor a span."""

    codec: Any

    @property
    def granule(self):
        return self.codec.granule

    def encode(self, x):
        return self.codec.encode(x)

    def decode(self, data, width, dtype):
        return self.codec.decode(data, width, dtype)


ROWS8, GROUPS = Rotate() >> Affine(8), [Rotate("orthogonal") >> c for c in KIVI]
STEPS = {
    "tokens": (None, ROWS8, ROWS8, 0),
    "groups behind a tail": (None, *GROUPS, 16),
    "pages": (kvjax.method("adakv", budget=0.5, window=4, kernel=3, page=4), ROWS8, ROWS8, 0),
    "evicting": (kvjax.method("sink-recent", budget=0.5), ROWS8, ROWS8, 0),
    "pages that are picked": (kvjax.method("quest", budget=0.5, page=8, skip_layers=0), ROWS8, ROWS8, 0),
    "slots that are picked": (kvjax.method("sparq", budget=0.5, channels=5, newest=4), ROWS8, ROWS8, 0),
}
# Groups through their kernel are in tests/kernels/test_decoder.py, every time.
PLAIN = ("tokens",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in PLAIN else (pytest.mark.rotating,)) for n in STEPS]
)
@pytest.mark.rotating
def test_steps_over_what_is_stored_are_steps_over_what_is_decoded(name):
    first, keys, values, residual = STEPS[name]
    logits = []
    for wrap in (lambda c: c, Decoded):
        store = Method(store=Store(wrap(keys), wrap(values), residual))
        method = store if first is None else kvjax.chain(first, store)
        m = model("4/2")
        _, held = kvjax.prefill(m, MAIN.first, method=method, room=ROOM)
        logits.append(kvjax.step(m, held, MAIN.steps[0])[0])
    assert 0 < off(*logits) < 2e-3


# Of codecs, whether what was decoded can be encoded again and again.
STEADY = {
    Affine(2, group=8): True, Rotate() >> Affine(4): True, Outliers(0.1) >> Affine(4): True,
    Residual(Affine(2, group=8), Affine(2, group=8)): True, LloydMax(2): False, SignSketch(): False,
    Rotate("orthogonal") >> LloydMax(4): False, Outliers(0.1) >> LloydMax(2): False,
    Residual(Affine(4), SignSketch()): False, Extremes(0.1) >> Affine(4): True, Affine(4, clip=0.95): False,
}  # fmt: skip


@pytest.mark.parametrize("codec", STEADY, ids=str)
def test_a_codec_says_whether_what_was_decoded_can_be_encoded_again_and_again(rng, codec):
    x = jnp.asarray(rng.normal(size=(1, 2, 16, 32)), jnp.float32)
    y, errors = x, []
    for _ in range(6):
        y = decode(encode(y, codec))
        errors.append(float(np.square(y - x).mean()))
    assert is_steady(codec) == STEADY[codec] == (errors[-1] < 1.1 * errors[0])
    # A recurrent layer's state is encoded at every token, a window in every turn, and a context once.
    for window, kind, stays in ((None, "state", False), (8, "slots", False), (None, "fixed", True)):
        codecs = group_method(Method(store=Store(codec, None)), range(1), window, kind=kind).codecs
        assert codecs == ((codec, None) if STEADY[codec] or stays else (None, None))

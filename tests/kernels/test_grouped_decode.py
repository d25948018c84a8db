"""Decoding over codes with scales of groups, against numpy over the numbers that these stand for."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.methods import method
from kvjax.ops.base.bit_packing import pack_tokens
from kvjax.ops.decode.grouped_decode import Grouped, gpu_grouped_decode, grouped_decode, tpu_grouped_decode
from tests.kernels.close import check, with_races
from tests.kernels.cuda import FORM, ON_GPU
from tests.sweep import sweep

B, K, G, LAYERS = 1, 3, 2, 2
NO_NUMBER = 0x7E007E00  # two halves


def halves(rng, shape):
    """(words, scales, zeros) at random."""
    scale = (rng.random(shape) + 0.2).astype(np.float16)
    zero = (-1.5 * rng.random(shape)).astype(np.float16)
    words = np.stack([scale, zero], -1).view("<u4")[..., 0]
    return words, scale.astype(np.float64), zero.astype(np.float64)


def coded(rng, bits, group, width, slots):
    """(codes of all layers, the numbers [B, K, S, W] of the last one) of keys and of values."""
    groups = slots // group
    codes = [rng.integers(0, 2**bits, (LAYERS, B, K, groups, group, width)) for _ in range(2)]
    packed = jax.jit(pack_tokens, static_argnums=1)
    words = [packed(jnp.asarray(x, jnp.uint32), bits) for x in codes]
    of_keys, scale, zero = halves(rng, (LAYERS, B, K, groups, width))
    keys = codes[0] * scale[..., None, :] + zero[..., None, :]
    of_values, *numbers = halves(rng, (LAYERS, B, K, groups, width // group, group))
    # A number of one token and one group of channels, for each of these.
    scale, zero = (np.repeat(np.swapaxes(x, -1, -2), group, -1) for x in numbers)
    values = codes[1] * scale + zero
    flat = [x.reshape(LAYERS, B, K, slots, width)[-1] for x in (keys, values)]
    stored = [
        Grouped(w.reshape(LAYERS, B, K, -1, width), jnp.asarray(n.reshape(LAYERS, B, K, groups, width)))
        for w, n in zip(words, (of_keys, of_values), strict=True)
    ]
    return stored, flat


def by_hand(q, keys, values, lengths, scale, softcap=None):
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b, n, t in np.ndindex(*q.shape[:3]):
        live = int(lengths[b, n // G])
        if live:
            z = keys[b, n // G, :live] @ np.asarray(q, np.float64)[b, n, t] * scale
            z = z if softcap is None else softcap * np.tanh(z / softcap)
            e = np.exp(z - z.max())
            out[b, n, t], lse[b, n, t] = e @ values[b, n // G, :live] / e.sum(), z.max() + np.log(e.sum())
    return out, lse


def spoilt(stored, lengths, group):
    """Spoil what no kernel may read with no numbers: other layers, and groups behind the lengths."""
    unread = np.arange(stored[0].scale_zero.shape[3]) * group >= lengths[..., None]
    unread = np.stack([np.ones_like(unread), unread])[..., None]
    return [Grouped(x.words, jnp.asarray(np.where(unread, NO_NUMBER, x.scale_zero))) for x in stored]


def draw(bits, group, width=128, t=1, tiles=2, seed=0):
    rng = np.random.default_rng(seed)
    slots = 8 * group * tiles
    stored, plain = coded(rng, bits, group, width, slots)
    lengths = np.array([[slots, 0, slots // 2 + group + 3]])
    q = jnp.asarray(rng.normal(size=(B, K * G, t, width)), jnp.float32)
    return q, spoilt(stored, lengths, group), plain, lengths


CASES = [(2, 32, 128), (4, 32, 128), (1, 64, 128), (4, 16, 128), (4, 128, 128), (2, 32, 256)]


@pytest.mark.rotating
@pytest.mark.parametrize(("bits", "group", "width"), sweep(CASES, CASES[0]))
def test_it_is_attention_over_the_numbers_that_the_codes_stand_for(bits, group, width):
    """A list that is full, an empty one, and one that ends within a group."""
    q, stored, plain, lengths = draw(bits, group, width, t=2)
    want = by_hand(q, *plain, lengths, 0.05, 2.0)
    options = dict(bits=bits, group=group, scale=0.05, softcap=2.0)
    args = (q, *stored, jnp.asarray(lengths), jnp.int32(1))
    # Blocks of one tile: two steps a list.
    tpu = jax.jit(partial(tpu_grouped_decode, **options, block=8 * group, interpret=True))
    check(tpu(*args), want, 2e-6)
    # Four programs a list at most, some of several steps.
    gpu = jax.jit(partial(gpu_grouped_decode, **options, programs=4 * K, interpret=not ON_GPU))
    check(gpu(*args), want, 2e-6)
    check(jax.jit(partial(grouped_decode, **options, implementation="reference"))(*args), want, 2e-6)


@pytest.mark.parametrize("how", sweep(["tpu interpret", FORM]))
def test_several_queries_and_a_softcap_in_one_block(how):
    q, stored, plain, lengths = draw(4, 16, t=3, seed=1)
    options = dict(bits=4, group=16, scale=0.05, softcap=2.0)
    call = jax.jit(partial(grouped_decode, **options, implementation=how))
    got = call(q, *stored, jnp.asarray(lengths), 1)
    check(got, by_hand(q, *plain, lengths, 0.05, 2.0), 2e-6)


@pytest.mark.rotating
@pytest.mark.parametrize("how", sweep(["tpu interpret", FORM], "tpu interpret"))
def test_bfloat16_queries(how):
    q, stored, plain, lengths = draw(2, 32, tiles=1, seed=2)
    q = q.astype(jnp.bfloat16)
    call = jax.jit(partial(grouped_decode, bits=2, group=32, scale=0.05, implementation=how))
    got = call(q, *stored, jnp.asarray(lengths), 1)
    assert got[0].dtype == jnp.bfloat16
    check(got, by_hand(q, *plain, lengths, 0.05), 1e-2)


@pytest.mark.rotating
@pytest.mark.parametrize("dma", sweep(["on_wait", "eager"], "on_wait"))
def test_codes_have_arrived_before_they_are_read(dma):
    q, stored, plain, lengths = draw(4, 16, seed=3)
    args = (q, *stored, jnp.asarray(lengths), jnp.int32(1))
    options = dict(bits=4, group=16, scale=0.05, block=128)
    got, races = with_races(lambda mode: tpu_grouped_decode(*args, **options, interpret=mode), dma)
    check(got, by_hand(q, *plain, lengths, 0.05), 2e-6)
    assert not races


def test_kivi_stores_what_this_reads():
    """A body as the method's codecs encode it."""
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.normal(size=(2, LAYERS, B, K, 128, 128)), jnp.float32)
    store = method("kivi", bits=4, group=16).store
    codecs = (store.keys, store.values)

    @jax.jit
    def stored(x):
        data = [codec.encode(y) for codec, y in zip(codecs, x, strict=True)]
        return data, [codec.decode(d, 128, jnp.float32)[1] for codec, d in zip(codecs, data, strict=True)]

    data, plain = stored(x)
    q = jnp.asarray(rng.normal(size=(B, K * G, 1, 128)), jnp.float32)
    lengths = np.array([[128, 77, 16]])
    want = by_hand(q, *(np.asarray(y, np.float64) for y in plain), lengths, 0.1)
    args = (q, *(Grouped(**d) for d in data), jnp.asarray(lengths), 1)
    call = partial(grouped_decode, bits=4, group=16, scale=0.1, implementation="reference")
    check(jax.jit(call)(*args), want, 2e-6)


def test_what_cannot_run_says_why():
    def call(bits, group, width=128, slots=None, dtype=jnp.float32):
        groups = (slots or 8 * group) // group
        one = Grouped(
            jax.ShapeDtypeStruct((1, 1, 1, groups * group * bits // 32, width), jnp.uint32),
            jax.ShapeDtypeStruct((1, 1, 1, groups, width), jnp.uint32),
        )
        q = jax.ShapeDtypeStruct((1, 2, 1, width), dtype)
        how = dict(bits=bits, group=group, scale=1.0, implementation="tpu")
        jax.eval_shape(lambda *x: grouped_decode(*x, **how), q, one, one, jnp.ones((1, 1), jnp.int32))

    for wrong, why in [
        (dict(bits=2, group=32, width=64), "rows are 64 wide, expected a multiple of 128"),
        (dict(bits=2, group=16), "groups of 16 tokens in 2 bits, expected 16, 32, 64 or 128 [*] 2"),
        (dict(bits=2, group=256), "groups of 256 channels, expected a divisor of 128"),
        (dict(bits=4, group=16, slots=192), "12 groups of 16 tokens, expected a multiple of 8"),
        (dict(bits=4, group=16, dtype=jnp.float16), "queries of float16"),
    ]:
        with pytest.raises(NotImplementedError, match=why):
            call(**wrong)
    q, stored, _, lengths = draw(4, 16)
    with pytest.raises(ValueError, match="do not fit 2 bits in groups of 16"):
        grouped_decode(q, *stored, jnp.asarray(lengths), 1, bits=2, group=16, scale=1.0)

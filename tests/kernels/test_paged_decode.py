"""Paged decoding: the plain form against float64 numpy, the TPU kernel against the plain form.

Everything that must not be read is no number: pages of nobody, slots behind a list's length, unused entries
of the table (which name no page at all).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.grammar.phase import older
from kvjax.ops.base.rope import Rope
from kvjax.ops.decode.page_pool import BITS, PER_CHANNEL, make_pool
from kvjax.ops.decode.paged_decode import paged_decode, tpu_paged_decode
from kvjax.pallas_kernels import streaming
from tests.kernels.close import check, with_races
from tests.sweep import sweep

B, K, LAYERS, ABSURD = 2, 2, 2, 10**6
CODES = {"int4": (-8, 7), "uint2": (0, 3)}
AFFINE = ("key_scale", "key_zero", "value_scale", "value_zero")
KIVI = ("channel_scale", "channel_zero", "value_scale", "value_zero")
LENGTHS = {
    "full": lambda s: s,
    "odd": lambda s: s - 3,
    "past a step": lambda s: s // 2 + 1,
    "empty": lambda s: 0,
}


def draw(
    seed, *, group=2, t=1, width=128, page=16, pages=8, dtype=np.float32, rows=(), lengths=tuple(LENGTHS),
    groups=1, packed=False,
):  # fmt: skip
    """(q, pool, table, lengths, q_pos) whose unread parts are no numbers, and the lists in float64."""
    rng = np.random.default_rng(seed)
    slots = page * pages
    length = np.array([LENGTHS[n](slots) for n in lengths], np.int32).reshape(B, K)
    used = -(-length // page)
    order, at = rng.permutation(used.sum() + 3), 0
    table = np.full((B, K, pages), ABSURD, np.int32)
    kv = np.full((LAYERS, used.sum() + 3, 2, page, width), np.nan)
    numbers = {
        name: np.full(
            (LAYERS, used.sum() + 3, *((groups, width) if name in PER_CHANNEL else (page,))), np.nan
        )
        for name in rows
    }
    for b, k in np.ndindex(B, K):
        table[b, k, : used[b, k]] = order[at : at + used[b, k]]
        for m, p in enumerate(order[at : at + used[b, k]]):
            live = min(page, length[b, k] - m * page)
            kv[1, p, :, :live] = rng.standard_normal((2, live, width))
            for name, number in numbers.items():
                count = groups if name in PER_CHANNEL else live
                size = (groups, width) if name in PER_CHANNEL else live
                x = (rng.random(size) + 0.5) / (30 if name.endswith("scale") else 1)
                if name == "pos":
                    x = np.where(rng.random(count) < 0.1, -1, rng.integers(0, slots, count))
                number[1, p, :count] = x
        at += used[b, k]
    q = rng.standard_normal((B, group * K, t, width))
    pos = np.sort(rng.integers(slots // 2, slots, (B, t)), -1).astype(np.int32)
    if "value_scale" in rows:
        low, high = CODES.get(jnp.dtype(dtype).name, (-127, 127))
        kv = np.where(np.isnan(kv), high, np.clip(np.round(kv * high / 4 + (low + high) / 2), low, high))
    numbers = {name: jnp.asarray(x, jnp.float32) for name, x in numbers.items()}
    pool = make_pool(*(jnp.asarray(kv[:, :, i], dtype) for i in (0, 1)), packed=packed, **numbers)
    kind = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    return jnp.asarray(q, kind), pool, jnp.asarray(table), jnp.asarray(length), jnp.asarray(pos)


def turned(keys, rope, phase):
    """Keys [S, H], each turned by its phase, one pair of channels after the other."""
    keys = keys.copy()
    half = rope.turning(keys.shape[1]) // 2
    for i, f in enumerate(rope.frequencies(keys.shape[1])):
        at = rope.start + i
        pair = (keys[:, at] + 1j * keys[:, at + half]) * np.exp(1j * f * phase) * rope.amplitude
        keys[:, at], keys[:, at + half] = pair.real, pair.imag
    return keys


def by_hand(
    q, pool, table, lengths, q_pos, *, scale, window=None, softcap=None, rope=None, phase=None
):  # fmt: skip
    """(out, lse, mass), list by list and query by query."""
    q, q_pos = np.asarray(q, np.float64), np.asarray(q_pos)
    kv = [np.asarray(x.astype(jnp.float32), np.float64)[1] for x in (pool.keys, pool.values)]
    rows = {name: np.asarray(pool.number(name), np.float64)[1] for name in pool.names}
    b, n, t, h = q.shape
    group, slots = n // K, table.shape[2] * pool.page
    out, lse, mass = np.zeros(q.shape), np.full((b, n, t), -np.inf), np.zeros((b, K, slots))
    for i, head, at in np.ndindex(b, n, t):
        k, length = head // group, int(lengths[i, head // group])
        if length == 0:
            continue
        ids = np.asarray(table)[i, k, : -(-length // pool.page)]
        keys, values = (x[ids] for x in kv)
        if "channel_scale" in rows:
            of_tokens = [np.repeat(rows[x][ids], pool.page // pool.groups, 1) for x in KIVI[:2]]
            keys = keys * of_tokens[0] + of_tokens[1]
        keys, values = (x.reshape(-1, h)[:length] for x in (keys, values))
        side = {name: x[ids].reshape(-1)[:length] for name, x in rows.items() if name not in PER_CHANNEL}
        column = {name: x[:, None] for name, x in side.items()}
        keys = keys * column.get("key_scale", 1.0) + column.get("key_zero", 0.0)
        values = values * column.get("value_scale", 1.0) + column.get("value_zero", 0.0)
        if rope is not None:
            own = side.get("pos", np.arange(length)) if phase is None else np.asarray(phase)[i, k, :length]
            keys = turned(keys, rope, own)
        z = keys @ q[i, head, at] * scale
        z = z if softcap is None else softcap * np.tanh(z / softcap)
        z = z + side.get("bias", 0.0)
        if "pos" in side:
            seen = (side["pos"] >= 0) & (side["pos"] <= q_pos[i, at])
            seen &= True if window is None else side["pos"] > q_pos[i, at] - window
            z = np.where(seen, z, -np.inf)
        if np.isneginf(z).all():
            continue
        p = np.exp(z - z.max())
        lse[i, head, at] = z.max() + np.log(p.sum())
        p /= p.sum()
        out[i, head, at] = p @ values
        mass[i, k, :length] += p
    return out, lse, mass


CASES = {
    "plain": dict(),
    # All payloads with everything that goes with them, and pages that fill no step.
    "float32 in all": dict(t=2, rows=("pos", "bias"), pages=9, window=100, softcap=5.0),
    "bfloat16 in all": dict(
        width=64,
        packed=True,
        dtype=jnp.bfloat16,
        rows=("pos", "bias"),
        page=128,
        pages=3,
        rope=Rope(),
        window=250,
        softcap=5.0,
        t=2,
        phase=True,
    ),
    "int8 in all": dict(
        group=3,
        rows=("pos", "bias", *AFFINE),
        page=32,
        pages=7,
        dtype=jnp.int8,
        window=150,
        softcap=5.0,
        t=2,
        rope=Rope(rotary_dim=32, start=16),
    ),
    "e4m3 in all": dict(
        rows=("pos", "key_scale", "value_scale"), page=32, pages=5, dtype=jnp.float8_e4m3fn, window=120
    ),
    "int4 in all": dict(
        rows=("pos", "bias", *KIVI),
        page=128,
        pages=3,
        dtype=jnp.int4,
        groups=4,
        rope=Rope(rotary_dim=64),
        t=2,
        window=300,
        softcap=5.0,
    ),
    "2 bits in all": dict(width=64, packed=True, rows=("pos", *KIVI), page=32, pages=5, dtype=jnp.uint2, t=2),
    "several queries": dict(t=3, rows=("pos",), page=128, pages=4),
    "one head each": dict(group=1),
    "many heads each": dict(group=9, width=256),
    "window and soft-cap": dict(t=2, rows=("pos", "bias"), page=128, pages=4, window=200, softcap=5.0),
    "int8": dict(rows=("key_scale", "value_scale"), page=128, pages=4, dtype=jnp.int8),
    "int4": dict(rows=AFFINE, page=128, pages=4, dtype=jnp.int4),
    "2 bits": dict(rows=AFFINE, page=128, pages=4, dtype=jnp.uint2),
    "kivi": dict(rows=KIVI, page=128, pages=4, dtype=jnp.uint2),
    "kivi in pages of 256": dict(rows=KIVI, page=256, pages=2, dtype=jnp.int4),
    "e4m3": dict(rows=("key_scale", "value_scale"), page=128, pages=4, dtype=jnp.float8_e4m3fn),
    "int8 with positions": dict(rows=("pos", "key_scale", "value_scale"), page=128, pages=4, dtype=jnp.int8),
    "e5m2": dict(rows=("key_scale", "value_scale"), page=128, pages=4, dtype=jnp.float8_e5m2),
    "small pages": dict(page=8, pages=6),
    "small pages with positions and biases": dict(rows=("pos", "bias"), page=16, window=60),
    "int8 in small pages": dict(rows=("key_scale", "value_scale"), page=32, pages=4, dtype=jnp.int8),
    "int8 in pages of 16": dict(rows=("pos", *AFFINE), page=16, pages=9, dtype=jnp.int8),
    "e5m2 in pages of 16": dict(rows=("key_scale", "value_scale"), page=16, pages=9, dtype=jnp.float8_e5m2),
    "int4 in pages of 16": dict(rows=AFFINE, page=16, pages=9, dtype=jnp.int4),
    "2 bits in pages of 16": dict(rows=AFFINE, page=16, pages=9, dtype=jnp.uint2),
    "kivi in pages of 32": dict(rows=KIVI, page=32, pages=5, dtype=jnp.uint2, groups=1),
    "kivi packed in pages of 16": dict(width=64, packed=True, rows=KIVI, page=16, pages=9, dtype=jnp.int4),
    "turned in pages of 16": dict(rows=("pos",), page=16, pages=11, rope=Rope()),
    "turned kivi in pages of 64": dict(
        rows=("pos", *KIVI), page=64, pages=3, dtype=jnp.int4, groups=2, rope=Rope(rotary_dim=64)
    ),
    "kivi in small pages": dict(rows=KIVI, page=64, pages=3, dtype=jnp.int4, groups=2),
    "bfloat16": dict(dtype=jnp.bfloat16),
    "kivi in groups": dict(rows=KIVI, page=128, pages=4, dtype=jnp.uint2, groups=4),
    "kivi in groups of pages of 256": dict(rows=KIVI, page=256, pages=2, dtype=jnp.int4, groups=8, group=5),
    "64 packed": dict(width=64, packed=True),
    "64 packed, bfloat16": dict(width=64, packed=True, dtype=jnp.bfloat16),
    "192 packed": dict(width=192, packed=True, page=8, pages=6),
    "192 packed with numbers": dict(
        width=192, packed=True, page=128, pages=3, rows=("pos", *AFFINE), dtype=jnp.int8
    ),
    "kivi, packed": dict(width=64, packed=True, rows=KIVI, page=128, pages=4, dtype=jnp.int4, groups=2),
    "turned by position": dict(rows=("pos",), page=128, pages=3, rope=Rope()),
    # Few positions: the plain form rounds angles to float32.
    "turned by order": dict(page=128, pages=2, rope=Rope(), width=256),
    "turned in part": dict(
        rows=("pos", "bias"), page=128, pages=3, rope=Rope(rotary_dim=32, start=16), t=2, window=99
    ),
    "64 turned": dict(width=64, packed=True, rows=("pos",), page=128, pages=3, rope=Rope(theta=500.0)),
    "turned with a temperature": dict(page=128, pages=2, rope=Rope(kind="yarn", factor=8.0)),
    "turned by rank": dict(rows=("pos",), page=128, pages=3, rope=Rope(), phase=True),
    "turned codes": dict(rows=("pos", *AFFINE), page=128, pages=3, dtype=jnp.int8, rope=Rope()),
    "turned codes in groups": dict(
        rows=("pos", *KIVI), page=128, pages=3, dtype=jnp.int4, groups=4, rope=Rope(rotary_dim=64)
    ),
    "turned bfloat16": dict(rows=("pos",), page=128, pages=3, rope=Rope(), dtype=jnp.bfloat16),
}
OPTIONS = ("window", "softcap", "rope", "phase")


def split(case):
    """Split a case into (inputs, options); ranks are those of positions, with no order behind the length."""
    options = {n: x for n, x in CASES[case].items() if n in OPTIONS}
    return {n: x for n, x in CASES[case].items() if n not in options}, dict(scale=0.09) | options


def drawn(seed, case):
    how, options = split(case)
    inputs = draw(seed, **how)
    if "phase" in options:
        _, pool, table, lengths, _ = inputs
        held = np.asarray(pool.number("pos"))[1][np.minimum(table, pool.words.shape[1] - 1)].reshape(B, K, -1)
        there = np.arange(held.shape[2]) < np.asarray(lengths)[..., None]
        held = jnp.asarray(np.where(there, held, -1), jnp.int32)
        options["phase"] = jnp.where(there, older(held, held)[0], ABSURD)
    return inputs, options


ALWAYS = [("2 bits in all", 3)]
STEPS = [(case, step) for case in CASES for step in (1, 2, 3)]


@pytest.mark.rotating
@pytest.mark.parametrize("case, step", sweep(STEPS, *ALWAYS))
def test_both_forms_are_the_equation(case, step):
    inputs, options = drawn(1, case)
    want, bar = by_hand(*inputs, **options), 1e-2 if "bfloat16" in case else 2e-6
    at = jnp.asarray(1, jnp.int32)
    plain = jax.jit(lambda *x: paged_decode(*x, at, mass=True, implementation="reference", **options))(
        *inputs
    )
    check(plain, want, bar)
    options = dict(window=None, softcap=None) | options
    call = jax.jit(lambda *x: tpu_paged_decode(*x, at, mass=True, step=step, interpret=True, **options))
    check(call(*inputs), want, bar)


def raced(inputs, options, mode):
    at, options = jnp.asarray(1, jnp.int32), dict(window=None, softcap=None) | options
    return jax.jit(lambda *x: tpu_paged_decode(*x, at, mass=True, step=2, interpret=mode, **options))(*inputs)


RACED = ("plain", "int8 with positions", "kivi in groups", "192 packed with numbers", "turned by rank")


@pytest.mark.rotating
@pytest.mark.parametrize(
    "case, dma",
    sweep(
        [(case, dma) for case in RACED for dma in ("on_wait", "eager")], ("int8 with positions", "on_wait")
    ),
)
def test_copies_have_arrived_before_they_are_read(case, dma):
    inputs, options = drawn(2, case)
    got, races = with_races(partial(raced, inputs, options), dma)
    check(got, by_hand(*inputs, **options), 2e-6)
    assert not races


@pytest.mark.rotating
def test_a_missing_wait_is_found(monkeypatch):
    """A copy that happens at once makes the answer right, and the detector must still see the race."""
    monkeypatch.setattr(streaming, "wait", lambda copy: None)
    assert with_races(partial(raced, *drawn(2, "plain")), "eager")[1]


def test_late_positions_turn_exactly_in_the_kernel():
    """Phases of a million, where angles in float32 are wrong by 0.03 and results by more than this bar."""
    how = dict(scale=0.09, rope=Rope(theta=1e6))
    inputs = draw(3, page=128, pages=2)
    phase = 10**6 + np.random.default_rng(0).permutation(B * K * 256).reshape(B, K, 256)
    kernel = dict(window=None, softcap=None, mass=True, interpret=True)
    at = jnp.asarray(1, jnp.int32)
    call = jax.jit(lambda *x: tpu_paged_decode(*x, at, phase=jnp.asarray(phase), **how, **kernel))
    # 2^-33 of a turn times a million is 7e-4 of a radian.
    check(call(*inputs), by_hand(*inputs, phase=phase, **how), 1e-3)


@pytest.mark.rotating
def test_what_cannot_run_says_why():
    q, pool, table, lengths, pos = draw(0)
    how = dict(scale=1.0)
    with pytest.raises(ValueError, match="dynamic rope's frequencies depend on a row's length"):
        paged_decode(q, pool, table, lengths, pos, 1, rope=Rope(kind="dynamic"), **how)
    with pytest.raises(ValueError, match=r"phase is \[2, 2, 5\], expected one for every slot of the table"):
        phase = jnp.zeros((2, 2, 5), jnp.int32)
        paged_decode(q, pool, table, lengths, pos, 1, rope=Rope(), phase=phase, **how)
    with pytest.raises(ValueError, match="phase is given without rope"):
        paged_decode(q, pool, table, lengths, pos, 1, phase=jnp.zeros((2, 2, 128), jnp.int32), **how)
    odd = make_pool(*[jnp.zeros((LAYERS, 3, 48, 128))] * 2)
    with pytest.raises(NotImplementedError, match="pages of 48 tokens with keys to rotate, expected a mul"):
        paged_decode(q, odd, table, lengths, pos, 1, rope=Rope(), implementation="tpu", **how)
    tiny = make_pool(*[jnp.zeros((LAYERS, 3, 8, 128), jnp.int8)] * 2)
    with pytest.raises(NotImplementedError, match="pages of 8 tokens in int8, expected a multiple of 16"):
        paged_decode(q, tiny, table, lengths, pos, 1, implementation="tpu", **how)
    with pytest.raises(ValueError, match="16 tokens in float32 in 3 groups: expected a multiple of 3"):
        scales = jnp.ones((LAYERS, pool.words.shape[1], 3, 128))
        make_pool(pool.keys, pool.values, channel_scale=scales, channel_zero=scales)
    with pytest.raises(NotImplementedError, match="there is no such form"):
        paged_decode(q, pool, table, lengths, pos, 1, implementation="cuda", **how)
    thin = make_pool(pool.keys[..., :64], pool.values[..., :64])
    with pytest.raises(NotImplementedError, match="pages are 64 wide, expected a multiple of 128"):
        paged_decode(q[..., :64], thin, table, lengths, pos, 1, implementation="tpu", **how)
    with pytest.raises(ValueError, match="do not fit"):
        paged_decode(q[:, :3], pool, table, lengths, pos, 1, **how)
    with pytest.raises(ValueError, match="numbers are among pos, .* got colour"):
        make_pool(pool.keys, pool.values, colour=pool.keys[..., 0])
    with pytest.raises(ValueError, match=r"pos must be \[2, 24, 16\] beside keys .* got \[2, 24, 15\]"):
        make_pool(pool.keys, pool.values, pos=pool.keys[..., :15, 0])
    with pytest.raises(ValueError, match="pages are of one of float32, .* got int32 and int32"):
        make_pool(*(x.astype(jnp.int32) for x in (pool.keys, pool.values)))
    with pytest.raises(ValueError, match="pages of 6 tokens in int8: expected a multiple of 4"):
        make_pool(*(x[:, :, :6].astype(jnp.int8) for x in (pool.keys, pool.values)))


POOLS = [(payload, packed) for payload in BITS for packed in (False, True)]


@pytest.mark.rotating
@pytest.mark.parametrize("payload, packed", sweep(POOLS, ("bfloat16", True), ("uint2", True)))
def test_a_pool_gives_back_what_was_put_into_it(payload, packed):
    rng = np.random.default_rng(0)
    low, high = CODES.get(payload, (-100, 100))
    k, v = (jnp.asarray(rng.integers(low, high + 1, (2, 3, 32, 8)), payload) for _ in range(2))
    numbers = dict(
        pos=rng.random((2, 3, 32)), channel_zero=rng.random((2, 3, 4, 8)), bias=rng.random((2, 3, 32))
    )
    pool = make_pool(k, v, packed=packed, **{n: jnp.asarray(x, jnp.float32) for n, x in numbers.items()})
    for got, want in ((pool.keys, k), (pool.values, v)):
        np.testing.assert_array_equal(*(np.asarray(x.astype(jnp.float32)) for x in (got, want)))
    for name, x in numbers.items():
        np.testing.assert_array_equal(np.asarray(pool.number(name)), x.astype(np.float32))

"""Decoding over a stacked cache: the plain form against float64 numpy, the TPU kernel against both.

Everything that must not be read is no number: rows behind a list's length, the other layer, and, in front of
a window, the blocks that no query of the sequence can see.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.base.rope import Rope
from kvjax.ops.decode.rotation import KeyRotation
from kvjax.ops.decode.stacked_decode import CodedSlots, stacked_append, stacked_decode, tpu_stacked_decode
from kvjax.pallas_kernels import streaming
from tests.kernels.close import check, with_races
from tests.sweep import sweep

B, K, LAYERS = 2, 2, 2
LENGTHS = {"each": [[64, 61], [33, 0]], "one": [40, 0]}


def draw(
    seed,
    *,
    group=2,
    t=1,
    width=128,
    values=None,
    row=None,
    slots=64,
    dtype=jnp.float32,
    lengths="each",
    packed=False,
):
    """(q, k, v, lengths, q_pos) whose rows behind the lengths are no numbers."""
    rng = np.random.default_rng(seed)
    values = values or width
    live = np.asarray(LENGTHS[lengths]) * slots // 64
    live = np.broadcast_to(live.reshape(B, -1), (B, K))
    row = row or (width + values if packed else width)

    def cache(real, wide):
        x = np.full((LAYERS, B, K, slots, wide), 1e3)
        x[..., :real] = rng.standard_normal(x[..., :real].shape)
        x[0] = np.nan
        x[1][np.arange(slots) >= live[..., None]] = np.nan
        return jnp.asarray(x, dtype)

    k = cache(width + values if packed else width, row)
    v = None if packed else cache(values, row if values == width else values)
    q = jnp.asarray(rng.standard_normal((B, group * K, t, width)), dtype)
    pos = np.sort(rng.integers(slots // 2, slots, (B, t)), -1).astype(np.int32)
    return q, k, v, jnp.asarray(np.asarray(LENGTHS[lengths]) * slots // 64), jnp.asarray(pos)


def sides(seed, slots=64):
    """Positions in no order, some slots empty, and biases: no numbers in the other layer."""
    rng = np.random.default_rng(seed)
    pos = rng.permuted(np.broadcast_to(np.arange(slots), (LAYERS, B, K, slots)), axis=-1)
    pos = np.where(rng.random(pos.shape) < 0.2, -1, pos)
    bias = rng.standard_normal(pos.shape)
    bias[0] = np.nan
    return dict(pos=jnp.asarray(pos, jnp.int32), bias=jnp.asarray(bias, jnp.float32))


def sizes(seed, slots):
    """Draw what multiplies keys and values, of one layer; no numbers behind the lists."""
    rng = np.random.default_rng(seed)
    live = np.arange(slots) < np.asarray(LENGTHS["each"])[..., None] * slots // 64
    found = (np.where(live, rng.uniform(-2, 2, live.shape), np.nan) for _ in range(2))
    return tuple(jnp.asarray(x, jnp.float32) for x in found)


def rotation(seed, slots, **rope):
    """Unrotated keys, with phases in no order."""
    phase = np.random.default_rng(seed).integers(0, 40, (B, K, slots))
    return KeyRotation(Rope(**rope), jnp.asarray(phase, jnp.int32))


def rotated_by_hand(keys, rotation, phase):
    """Rows [S, H] with their pairs of channels as complex numbers, in float64."""
    rope, keys = rotation.rope, keys.copy()
    half = rope.turning(keys.shape[1]) // 2
    for i, f in enumerate(rope.frequencies(keys.shape[1])):
        at = rope.start + i, rope.start + i + half
        pair = (keys[:, at[0]] + 1j * keys[:, at[1]]) * np.exp(1j * f * phase) * rope.amplitude
        keys[:, at[0]], keys[:, at[1]] = pair.real, pair.imag
    return keys


def by_hand(
    q, k, v, lengths, q_pos, *, scale, values=None, window=None, softcap=None, pos=None, bias=None,
    first=None, mass=False, sizes=(None, None), rotation=None,
):  # fmt: skip
    """(out, lse) and, where it is asked for, mass, query by query."""
    q, k = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k))
    b, n, t, h = q.shape
    values = values or h
    v = (
        k[..., h if first is None else first :]
        if v is None
        else np.asarray(v.astype(jnp.float32), np.float64)
    )
    lengths = np.broadcast_to(np.asarray(lengths).reshape(b, -1), (b, K))
    out, lse = np.zeros((b, n, t, values)), np.full((b, n, t), -np.inf)
    given = np.zeros(k.shape[1:4])
    for i, head, at in np.ndindex(b, n, t):
        mine, asked = (1, i, head // (n // K)), int(q_pos[i, at])
        length = int(lengths[mine[1:]])
        held = np.arange(length) if pos is None else np.asarray(pos)[mine][:length]
        seen = (held >= 0) & (held <= asked) & (held > asked - (window or np.inf))
        if not seen.any():
            continue
        ours = np.arange(length)[seen]
        of_keys, of_values = (
            1.0 if x is None else np.asarray(x, np.float64)[mine[1:]][ours, None] for x in sizes
        )
        keys = k[mine][ours, :h] * of_keys
        if rotation is not None:
            keys = rotated_by_hand(keys, rotation, np.asarray(rotation.phase)[mine[1:]][ours])
        z = keys @ q[i, head, at] * scale
        z = z if softcap is None else softcap * np.tanh(z / softcap)
        z = z if bias is None else z + np.asarray(bias, np.float64)[mine][:length][seen]
        p = np.exp(z - z.max())
        lse[i, head, at] = z.max() + np.log(p.sum())
        out[i, head, at] = p / p.sum() @ (v[mine][ours, :values] * of_values)
        given[mine[1:]][:length][seen] += p / p.sum()
    return (out, lse, given) if mass else (out, lse)


CASES = {
    # Blocks that slots do not fill, positions in no order, and masses of all queries.
    "all on rows": dict(t=2, group=3, slots=328, window=250, softcap=5.0, mass=True, **sides(7, 328)),
    "all on the lanes": dict(width=80, slots=384, t=2, window=290, softcap=5.0, mass=True, **sides(9, 384)),
    "plain": dict(),
    "several queries": dict(t=3),
    "one head each": dict(group=1),
    "sixteen heads each": dict(group=16),
    "one length for all heads": dict(lengths="one"),
    "slots that fill no block": dict(slots=40),
    "heads of 64, keys and values in one row": dict(width=64, packed=True),
    "heads of 80 in rows of 128": dict(width=80, row=128),
    "heads of 96 and values in one row": dict(width=96, packed=True, row=256),
    "keys of 192, values of 128": dict(width=192, values=128, row=256),
    "heads of 256": dict(width=256),
    "window and soft-cap": dict(t=2, window=20, softcap=5.0),
    "a window of one": dict(window=1),
    "positions and biases": dict(t=2, window=130, softcap=5.0, slots=384, **sides(7, 384)),
    "positions alone": dict(slots=320, pos=sides(8, 320)["pos"]),
    "mass": dict(t=2, slots=384, mass=True),
    "mass behind a window and with positions": dict(slots=320, window=90, mass=True, **sides(9, 320)),
    "mass behind a window": dict(slots=384, window=70, mass=True, group=1),
    "latents": dict(width=192, row=256, packed=True, values=128, first=0),
    "bfloat16": dict(dtype=jnp.bfloat16),
    "heads of 64 on the lanes": dict(width=64, slots=256),
    "heads of 80 on the lanes": dict(width=80, slots=384, t=2, window=150, softcap=5.0),
    "keys of 192 on the lanes, values of 128 in rows": dict(width=192, values=128, slots=256),
    "latents on the lanes": dict(width=96, row=96, packed=True, values=64, first=0, slots=256),
    "mass and positions on the lanes": dict(width=64, slots=384, mass=True, **sides(7, 384)),
    "bfloat16 on the lanes": dict(width=64, slots=256, dtype=jnp.bfloat16),
    "sizes": dict(slots=384, group=3, t=2, softcap=5.0, sizes=sizes(2, 384)),
    "turned": dict(slots=320, mass=True, rotation=rotation(3, 320), pos=sides(8, 320)["pos"]),
    "turned, bfloat16": dict(slots=320, rotation=rotation(3, 320), dtype=jnp.bfloat16),
    "turned with a temperature": dict(slots=384, rotation=rotation(4, 384, kind="yarn", factor=8.0)),
    "nothing turns": dict(slots=384, rotation=rotation(4, 384, kind="none")),
    "turned on the lanes": dict(width=64, slots=384, rotation=rotation(5, 384), t=3),
    "some channels turned, sizes": dict(
        slots=328,
        t=2,
        rotation=rotation(6, 328, rotary_dim=32, start=64),
        sizes=sizes(3, 328),
        **sides(7, 328),
    ),
    "some channels turned on the lanes": dict(
        width=80, slots=256, rotation=rotation(7, 256, rotary_dim=48, start=16), sizes=sizes(4, 256)
    ),
    "latents whose rotated part turns": dict(
        width=192, row=256, packed=True, values=128, first=0, slots=256, rotation=rotation(8, 256, start=128)
    ),
}


def split(case):
    """Split a case into (what to draw, what to call with); the number of values is both's."""
    called = ("window", "softcap", "pos", "bias", "first", "mass", "sizes", "rotation")
    options = {n: x for n, x in CASES[case].items() if n in (*called, "values")}
    return {n: x for n, x in CASES[case].items() if n not in called}, dict(scale=0.09) | options


def kernel(inputs, options, block, interpret, cores=1):
    q, k, v, lengths, pos = inputs
    lists = jnp.broadcast_to(lengths.reshape(B, -1), (B, K))
    start = options.get("first", q.shape[-1] if v is None else 0)
    options = {n: x for n, x in options.items() if n != "first"}
    options |= dict(values=(start, options.get("values", q.shape[-1])))
    options = dict(window=None, softcap=None) | options
    call = partial(tpu_stacked_decode, block=block, cores=cores, interpret=interpret, **options)
    return given(jax.jit(call)(q, k, v, lists, pos, jnp.asarray(1, jnp.int32)))


def given(results):
    """Return the results that there are."""
    return [x for x in results if x is not None]


EVERY = [(case, block) for case in CASES for block in (16, 64)]
ALWAYS = [
    ("all on rows", 64), ("all on the lanes", 64), ("bfloat16", 16), ("some channels turned, sizes", 64),
]  # fmt: skip


@pytest.mark.rotating
@pytest.mark.parametrize("case, block", sweep(EVERY, *ALWAYS))
def test_both_forms_are_the_equation(case, block):
    drawn, options = split(case)
    inputs = draw(1, **drawn)
    want, bar = by_hand(*inputs, **options), 1e-2 if "bfloat16" in case else 2e-6
    call = jax.jit(lambda *x: stacked_decode(*x, 1, implementation="reference", **options))
    check(given(call(*inputs)), want, bar)
    check(kernel(inputs, options, block, True), want, bar)


@pytest.mark.rotating
def test_blocks_in_front_of_a_window_are_never_read():
    q, k, v, _, _ = draw(2)
    lengths, pos = jnp.asarray([64, 50]), jnp.asarray([[63], [49]])
    first = np.array([48, 32])
    hidden = (np.arange(64) < first[:, None])[None, :, None, :, None]
    rng = np.random.default_rng(0)
    full = [jnp.asarray(rng.standard_normal(k.shape), jnp.float32) for _ in range(2)]
    spoilt = [jnp.where(hidden, jnp.nan, x) for x in full]
    options = dict(scale=0.09, window=16)
    check(
        kernel((q, *spoilt, lengths, pos), options, 16, True),
        by_hand(q, *full, lengths, pos, **options),
        2e-6,
    )


def test_two_cores_share_the_lists():
    drawn, options = split("plain")
    inputs = draw(2, **drawn)
    check(kernel(inputs, options, 16, True, cores=2), by_hand(*inputs, **options), 2e-6)


RACED = ("plain", "window and soft-cap", "positions and biases", "mass", "heads of 80 on the lanes")


@pytest.mark.rotating
@pytest.mark.parametrize(
    "case, dma",
    sweep(
        [(case, dma) for case in RACED for dma in ("on_wait", "eager")], ("positions and biases", "on_wait")
    ),
)
def test_copies_have_arrived_before_they_are_read(case, dma):
    drawn, options = split(case)
    inputs = draw(3, **drawn)
    got, races = with_races(lambda mode: kernel(inputs, options, 16, mode), dma)
    check(got, by_hand(*inputs, **options), 2e-6)
    assert not races


@pytest.mark.rotating
def test_a_missing_wait_is_found(monkeypatch):
    """A copy that happens at once makes the answer right, and the detector must still see the race."""
    monkeypatch.setattr(streaming, "wait", lambda copy: None)
    drawn, options = split("plain")
    assert with_races(lambda mode: kernel(draw(3, **drawn), options, 16, mode), "eager")[1]


@pytest.mark.rotating
@pytest.mark.parametrize("dtype", sweep([jnp.float32, jnp.bfloat16], jnp.bfloat16))
@pytest.mark.parametrize("width, slots", [(128, 64), (64, 128)], ids=["rows", "lanes"])
def test_a_row_is_appended_where_the_length_says_and_nowhere_else(dtype, width, slots):
    _, k, v, _, _ = draw(4, dtype=dtype, width=width, slots=slots)
    rng = np.random.default_rng(5)
    new = [jnp.asarray(rng.standard_normal((B, K, width)), dtype) for _ in range(2)]
    slot = np.array([[5, -1], [0, 63]])
    want = [np.asarray(x.astype(jnp.float32)).copy() for x in (k, v)]
    for x, y in zip(want, new, strict=True):
        for b, h in np.ndindex(B, K):
            if slot[b, h] >= 0:
                x[1, b, h, slot[b, h]] = y[b, h].astype(jnp.float32)
    for how in ("reference", "tpu interpret"):
        call = jax.jit(partial(stacked_append, implementation=how), donate_argnums=(0, 1))
        got = call(jnp.copy(k), jnp.copy(v), *new, jnp.asarray(slot), jnp.asarray(1))
        for x, y in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.asarray(x.astype(jnp.float32)), y)


@pytest.mark.rotating
def test_a_scan_over_layers_decodes_with_the_row_it_appended():
    """Appended and read in one scan, as a decoder does, against all layers by themselves."""
    rng = np.random.default_rng(6)
    cache = [jnp.asarray(rng.standard_normal((LAYERS, B, K, 16, 128)), jnp.float32) for _ in range(2)]
    rows = [jnp.asarray(rng.standard_normal((LAYERS, B, K, 128)), jnp.float32) for _ in range(2)]
    q = jnp.asarray(rng.standard_normal((B, 4, 1, 128)), jnp.float32)
    length = jnp.asarray([7, 15])

    def layer(caches, xs):
        at, k, v = xs
        caches = stacked_append(*caches, k, v, length, at, implementation="tpu interpret")
        out = stacked_decode(
            q, *caches, length + 1, length[:, None], at, scale=0.1, implementation="tpu interpret"
        )[:2]
        return caches, out

    _, got = jax.jit(lambda c: jax.lax.scan(layer, c, (jnp.arange(LAYERS), *rows)))(tuple(cache))
    want = [np.asarray(x, np.float64) for x in cache]
    for x, y in zip(want, rows, strict=True):
        for at, b in np.ndindex(LAYERS, B):
            x[at, b, :, int(length[b])] = y[at, b]
    for at in range(LAYERS):
        turned = [jnp.asarray(x[[at, at]], jnp.float32) for x in want]
        check([x[at] for x in got], by_hand(q, *turned, length + 1, length[:, None], scale=0.1), 2e-6)


def at_size(slots, pos=None, **how):
    """Trace the kernel's call over so many slots, of which no number exists."""
    q, _, _, lengths, q_pos = draw(0)
    many = jax.ShapeDtypeStruct((LAYERS, B, K, slots, 128), q.dtype)
    call = partial(stacked_decode, scale=1.0, implementation="tpu", **how)
    jax.eval_shape(lambda k, pos: call(q, k, k, lengths, q_pos, 1, pos=pos), many, pos)


def code(x):
    """x in codes of 8 bits, and the numbers that they stand for: no numbers where x has none."""
    x = np.asarray(x)
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    scale, zero = ((high - low) / 255).astype(np.float16), low.astype(np.float16)
    codes = np.clip(np.rint((x - zero) / scale.astype(np.float32)), 0, 255)
    codes = np.where(np.isnan(codes), 7, codes).astype(np.uint8)
    plain = codes * scale.astype(np.float32) + zero.astype(np.float32)
    words = np.concatenate([scale, zero], -1).view("<u4")[..., 0]
    return CodedSlots(jnp.asarray(codes), jnp.asarray(words)), jnp.asarray(plain, jnp.float32)


@pytest.mark.rotating
@pytest.mark.parametrize("which", sweep(["both", "keys", "values", "latents"], "both"))
def test_codes_are_the_numbers_that_they_stand_for(which):
    """Scales and zeros behind the lengths are no numbers."""
    packed = which == "latents"
    q, k, v, lengths, pos = draw(11, t=2, slots=320, packed=packed)
    options = dict(scale=0.09, window=200, mass=True, pos=sides(12, 320)["pos"])
    coded_k, plain_k = (k, k) if which == "values" else code(k)
    coded_v, plain_v = (v, v) if which in ("keys", "latents") else code(v)
    want = by_hand(q, plain_k, plain_v, lengths, pos, **options)
    inputs = (q, coded_k, coded_v, lengths, pos)
    check(kernel(inputs, options, 128, True), want, 2e-6)
    call = jax.jit(lambda *x: stacked_decode(*x, 1, implementation="reference", **options))
    check(given(call(*inputs)), want, 2e-6)


@pytest.mark.parametrize("dma", sweep(["on_wait", "eager"]))
def test_codes_have_arrived_before_they_are_read(dma):
    q, k, v, lengths, pos = draw(13, slots=384)
    (coded_k, plain_k), (coded_v, plain_v) = code(k), code(v)
    options = dict(scale=0.09)
    inputs = (q, coded_k, coded_v, lengths, pos)
    got, races = with_races(lambda mode: kernel(inputs, options, 128, mode), dma)
    check(got, by_hand(q, plain_k, plain_v, lengths, pos, **options), 2e-6)
    assert not races


def test_what_cannot_run_says_why():
    q, k, v, lengths, pos = draw(0)
    how = dict(scale=1.0)
    with pytest.raises(NotImplementedError, match="there is no such form"):
        stacked_decode(q, k, v, lengths, pos, 1, implementation="cuda", **how)
    for wrong, why in [
        ((q[..., :64], k[..., :64], v[..., :64]), "64 slots of 64 channels, expected a multiple of 128"),
        ((q[..., :60], k[..., :60], v[..., :60]), "rows of float32 are 60 wide, expected a multiple of 128"),
        ((q, k[..., :60, :], v[..., :60, :]), "60 slots of 128 channels, expected a multiple of 8"),
        ((q, k.astype(jnp.float16), v), "a cache of float16"),
    ]:
        with pytest.raises(NotImplementedError, match=why):
            stacked_decode(*wrong, lengths, pos, 1, implementation="tpu", **how)
    with pytest.raises(NotImplementedError, match="96 slots in all, expected at least 128"):
        at_size(24, mass=True)
    with pytest.raises(NotImplementedError, match="pos of 2 heads twice .* x 1048576 slots, expected"):
        at_size(2**20, pos=jax.ShapeDtypeStruct((LAYERS, B, K, 2**20), jnp.int32))
    with pytest.raises(NotImplementedError, match="mass of 8 queries x 524288 slots, expected at most"):
        at_size(2**19, mass=True)
    for wrong in [(q[:, :3], k, v), (q, k, v[..., :64]), (q, k, None)]:
        with pytest.raises(ValueError, match="do not fit"):
            stacked_decode(*wrong, lengths, pos, 1, **how)

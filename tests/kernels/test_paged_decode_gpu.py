"""The GPU kernel of paged decoding: in the interpreter against the equation, and lowered for CUDA on a CPU.

Everything that must not be read is no number, as in `test_paged_decode.py`.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import triton

from kvjax.ops.decode.page_pool import BITS, PagePool, make_pool, page_rows
from kvjax.ops.decode.paged_decode import paged_decode
from kvjax.ops.decode.paged_decode_gpu import gpu_paged_decode
from kvjax.pallas_kernels.paged_decode import kernel_gpu
from kvjax.pallas_kernels.partial_gpu import Cut
from tests.kernels.close import check
from tests.kernels.cuda import FORM, ON_GPU, lowered_for_cuda
from tests.kernels.test_paged_decode import AFFINE, CASES, KIVI, by_hand, draw, split
from tests.sweep import sweep

SCALES = ("key_scale", "value_scale")
MORE = {
    "64 wide": dict(width=64),
    "80 wide": dict(width=80, rows=("pos",)),
    "96 wide in int8": dict(width=96, rows=SCALES, page=32, pages=4, dtype=jnp.int8),
    "192 wide": dict(width=192, dtype=jnp.bfloat16),
    "pages of 24": dict(page=24, pages=5),
    "int4 in small pages": dict(width=64, page=16, pages=9, rows=SCALES, dtype=jnp.int4),
}
# Few programs take several steps each, many take one and merge more parts.
REFUSED = ("rope", "packed", "groups")
TAKEN = {name: case for name, case in CASES.items() if not set(REFUSED) & set(case)}
EITHER = [(case, 1000 if i % 2 else 5) for i, case in enumerate(TAKEN | MORE)]


ALWAYS = ("e4m3 in all", "kivi", "int8 with positions")
EVERY = [*EITHER, ("plain", 1000), ("several queries", 5)]


@pytest.mark.rotating
@pytest.mark.parametrize("case,programs", sweep(EVERY, *(one for one in EVERY if one[0] in ALWAYS)))
def test_the_kernel_is_the_equation(case, programs):
    drawn, options = split(case) if case in CASES else (MORE[case], dict(scale=0.09))
    inputs = draw(1, **drawn)
    at = jnp.asarray(1, jnp.int32)
    how = dict(window=None, softcap=None) | options
    call = jax.jit(
        lambda *x: gpu_paged_decode(*x, at, mass=True, programs=programs, interpret=not ON_GPU, **how)
    )
    bar = 1e-2 if drawn.get("dtype") == jnp.bfloat16 else 2e-6
    check(call(*inputs), by_hand(*inputs, **options), bar)


@pytest.mark.rotating
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_codes_meet_queries_of_bfloat16(dtype):
    """As a decoder asks: codes on the matrix units, which take no float32."""
    q, *rest = draw(2, rows=AFFINE, page=128, pages=2, dtype=jnp.dtype(dtype))
    q = q.astype(jnp.bfloat16)
    at = jnp.asarray(1, jnp.int32)
    call = partial(paged_decode, scale=0.09, mass=True, implementation=FORM)
    check(jax.jit(call)(q, *rest, at), by_hand(q, *rest, scale=0.09), 1e-2)


@pytest.mark.rotating
@pytest.mark.parametrize("payload", sweep(BITS, "int8", "uint2", "float8_e4m3fn"))
def test_every_pattern_of_bits_is_unpacked(payload):
    """As `page_pool` packs it: 8 rows of words, with every byte and every nibble among them."""
    if payload in ("float32", "bfloat16"):
        x = jax.random.normal(jax.random.key(0), (1, 1, 32, 128)).astype(payload)
    elif payload.startswith("float8"):
        bits = np.arange(256, dtype=np.uint8)
        finite = np.isfinite(bits.view(payload).astype(np.float32))
        bits = np.resize(bits[finite], 128 * 32)
        x = jax.lax.bitcast_convert_type(jnp.asarray(bits).reshape(1, 1, 32, 128), payload)
    else:
        low, high = {"int8": (-128, 127), "int4": (-8, 7), "uint2": (0, 3)}[payload]
        x = jnp.asarray(np.random.default_rng(0).integers(low, high + 1, (1, 1, 32, 128)), payload)
    pool = make_pool(x, x)
    for kind in (jnp.float32, jnp.bfloat16):
        one = jax.jit(partial(kernel_gpu.unpack, payload=payload, kind=kind))
        planes = [one(pool.words[0, 0, : pool.rows], n) for n in range(kernel_gpu.PER_WORD[payload])]
        tokens = jnp.stack(planes, 1).reshape(-1, 128)
        if payload == "uint2":
            half = jnp.stack(planes, 1).reshape(-1, 2, 8, 128)
            tokens = jnp.swapaxes(half, 0, 1).reshape(-1, 128)
        want = x[0, 0].astype(jnp.float32).astype(kind)
        np.testing.assert_array_equal(*(np.asarray(y.astype(jnp.float32)) for y in (tokens, want)))


def shapes(payload, width, *, names=(), t=1, dtype=jnp.bfloat16, tokens=8192, page=128):
    """Operands of a Llama-8B layer, as shapes."""
    pages = 8 * tokens // page
    words = jax.ShapeDtypeStruct((2, pages, page_rows(payload, page, width, names), width), jnp.int32)
    ints = [jax.ShapeDtypeStruct(s, jnp.int32) for s in [(1, 8, tokens // page), (1, 8), (1, t)]]
    return jax.ShapeDtypeStruct((1, 32, t, width), dtype), PagePool(words, page, payload, names), *ints


def has_kernel(text):
    """Whether the program calls Triton's compiler once, for a kernel with this name and this grid."""
    calls = re.findall(r"custom_call @__gpu\$xla\.gpu\.triton", text)
    return len(calls) == 1 and 'name = "paged_decode"' in text and "grid_x = 8 : i32" in text


@pytest.mark.parametrize(
    "payload, width",
    sweep([(p, w) for p in BITS for w in (64, 128, 256)], ("int8", 64), ("float8_e5m2", 256)),
)
def test_it_is_lowered_for_cuda(payload, width):
    names = () if payload in ("float32", "bfloat16") else SCALES
    call = partial(paged_decode, scale=0.1, implementation="gpu")
    assert has_kernel(lowered_for_cuda(call, *shapes(payload, width, names=names)))


GOES_WITH = [
    dict(mass=True, t=3, names=("pos", "bias"), window=100, softcap=5.0),
    dict(names=KIVI, payload="uint2"),
    dict(names=AFFINE, payload="int4", dtype=jnp.float32),
    dict(width=80),
]


@pytest.mark.parametrize("how", sweep(GOES_WITH, *GOES_WITH[:3]))
def test_what_goes_with_it_is_lowered_too(how):
    options = {n: x for n, x in how.items() if n in ("mass", "window", "softcap")}
    drawn = dict(payload="bfloat16", width=128) | {n: x for n, x in how.items() if n not in options}
    call = partial(paged_decode, scale=0.1, implementation="gpu", **options)
    assert has_kernel(lowered_for_cuda(call, *shapes(**drawn)))


def test_the_plain_form_is_no_kernel():
    call = partial(paged_decode, scale=0.1, implementation="reference")
    assert not has_kernel(lowered_for_cuda(call, *shapes("bfloat16", 128)))


def test_it_is_chosen_on_a_gpu_and_refuses_by_name():
    q, pool, table, lengths, pos = draw(0)
    call = partial(paged_decode, scale=1.0)
    assert has_kernel(lowered_for_cuda(call, *shapes("bfloat16", 128)))
    assert not has_kernel(lowered_for_cuda(call, *shapes("bfloat16", 128, dtype=jnp.float16)))
    force = partial(call, implementation="gpu")
    with pytest.raises(NotImplementedError, match="queries of float16, expected float32 or bfloat16"):
        force(q.astype(jnp.float16), pool, table, lengths, pos)
    with pytest.raises(NotImplementedError, match="130 queries for each KV head, expected at most 64"):
        force(jnp.tile(q, (1, 1, 65, 1)), pool, table, lengths, jnp.tile(pos, (1, 65)))
    wide = make_pool(*(jnp.zeros((1, 2, 8, 640)) for _ in "kv"))
    with pytest.raises(NotImplementedError, match="pages are 640 wide, expected at most 512"):
        force(q, wide, table, lengths, pos)


def test_a_table_that_ends_within_a_split_is_refused():
    sizes = kernel_gpu.Sizes(Cut(16, 2, 3, 4, 2, 1), 16, 16, "float32", (), 1.0)
    q, words = jnp.zeros((1, 16, 16)), jnp.zeros((1, 4, 32, 16), jnp.int32)
    one = jnp.zeros((1,), jnp.int32)
    with pytest.raises(ValueError, match="tables of 5 pages are shorter than 96 rows of words: pad them"):
        kernel_gpu.paged_decode(
            q, words, jnp.zeros((1, 5), jnp.int32), one, jnp.zeros((1, 16), jnp.int32), one, sizes=sizes
        )


@pytest.mark.rotating
def test_programs_change_only_the_rounding():
    inputs = (*draw(3, page=16, pages=9), jnp.asarray(1, jnp.int32))
    how = dict(scale=0.09, window=None, softcap=None, mass=False, interpret=not ON_GPU)
    found = [
        jax.jit(partial(gpu_paged_decode, programs=n, block=block, **how))(*inputs)[:2]
        for n, block in ((1, 16), (60, 32))
    ]
    check(*found, 2e-6)


def test_the_release_of_jax_is_asked(monkeypatch):
    """Triton's lowering is to go: then the plain form runs, and a forced kernel says why it cannot."""
    from kvjax.ops.base import triton as module

    assert triton is not None
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    inputs = draw(0)
    with pytest.raises(NotImplementedError, match="no Triton lowering any more"):
        paged_decode(*inputs, scale=1.0, implementation="gpu")

"""The kernels of sparse prompts: in interpreters against float64 numpy, and lowered for CUDA on a CPU.

Keys and values after a row's end are no number: kernels must not use them.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.attention.block_sparse import Picks
from kvjax.ops.attention.sparse_prompt import Options, sparse_prompt, tpu_sparse_prompt
from kvjax.ops.attention.union import Keys
from tests.kernels.close import check, with_races
from tests.kernels.cuda import FORM, lowered_for_cuda
from tests.sweep import sweep

# lists: how many lists of picks a row has, as many as KV heads or as query heads.
CASES = {
    "segments of several blocks": dict(segment=32, block=16, group=2, lengths=(160, 75)),
    "picks of every query head": dict(segment=16, block=16, group=2, each=True, lengths=(160, 33)),
    "a block of many segments": dict(segment=16, block=32, lengths=(160, 1)),
    "blocks of 128": dict(segment=128, block=128, tokens=768, lengths=(768, 500)),
    "many tiles": dict(segment=64, block=64, tokens=1280, group=2, share=0.8, lengths=(1279,)),
    "a soft-cap": dict(segment=32, block=32, softcap=1.5, lengths=(160, 64)),
    "unequal widths": dict(segment=32, block=16, width=80, values=48, lengths=(160, 75)),
    "bfloat16": dict(segment=32, block=16, group=4, dtype=jnp.bfloat16, lengths=(160, 75)),
    "columns": dict(segment=32, block=16, group=2, columns=(0, 5, 77, 40, -1), lengths=(160, 75)),
    "a window of blocks": dict(segment=32, block=16, picked="window", lengths=(160, 75)),
    "empty lists": dict(segment=32, block=16, picked="last", lengths=(160, 75)),
    "full lists": dict(segment=32, block=16, picked="all", group=2, lengths=(160, 75)),
}
ALWAYS = ("segments of several blocks", "picks of every query head", "columns", "many tiles")
cases = pytest.mark.parametrize("name", sweep(tuple(CASES), *ALWAYS))


def draw(
    lengths, segment, block, tokens=160, heads=2, group=1, width=64, values=64, dtype=jnp.float32,
    each=False, picked="some", share=0.4, columns=None, softcap=None,
):  # fmt: skip
    """(q, keys, q_pos, picks, softcap) with blocks drawn per list: their numbers differ, some have none."""
    rng, b = np.random.default_rng(3), len(lengths)
    lists, i, j = heads * (group if each else 1), tokens // segment, tokens // block
    at = np.arange(tokens)
    pos = np.where(at < np.array(lengths)[:, None], at, -1).astype(np.int32)
    q = rng.normal(size=(b, heads * group, tokens, width))
    k, v = (rng.normal(size=(b, heads, tokens, n)) for n in (width, values))
    for x in (k, v):
        x[np.broadcast_to(pos[:, None] < 0, x.shape[:3])] = np.nan
    chosen = rng.random((b, lists, i, j)) < share * np.linspace(0.2, 1.8, lists)[:, None, None]
    chosen[:, 0, 1] = False
    if picked == "window":
        first, start = np.arange(i)[:, None] * segment, np.arange(j)[None] * block
        chosen[:] = (start < first + segment) & (start + block > first - 40)
    if picked == "all":
        chosen[:] = True
    if picked == "last":
        chosen[:, :-1] = False
    more = (
        None if columns is None else jnp.asarray(np.broadcast_to(columns, (b, lists, len(columns))), "int32")
    )
    k, v = (jnp.asarray(x, dtype) for x in (k, v))
    keys = Keys(k, v, jnp.asarray(pos)[:, None])
    return jnp.asarray(q, dtype), keys, jnp.asarray(pos), Picks(jnp.asarray(chosen), more), softcap


def by_hand(q, keys, pos, picks, softcap, scale):
    """Masked attention in float64: one matrix of visible keys for every query head."""
    q, k, v = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, keys.k, keys.v))
    pos, blocks = np.asarray(pos), np.asarray(picks.blocks)
    b, n, t, _ = q.shape
    out, lse = np.zeros((b, n, t, v.shape[-1])), np.full((b, n, t), -np.inf)
    for row, head in np.ndindex(b, n):
        chosen = blocks[row, head * blocks.shape[1] // n]
        seen = np.repeat(np.repeat(chosen, t // chosen.shape[0], 0), t // chosen.shape[1], 1)
        if picks.columns is not None:
            single = np.asarray(picks.columns)[row, head * blocks.shape[1] // n]
            seen[:, single[single >= 0]] = True
        seen &= (pos[row] >= 0) & (pos[row][None] <= pos[row][:, None])
        own = head * k.shape[1] // n
        for i in np.flatnonzero(seen.any(1)):
            z = scale * k[row, own, seen[i]] @ q[row, head, i]
            z = z if softcap is None else softcap * np.tanh(z / softcap)
            p = np.exp(z - z.max())
            lse[row, head, i] = z.max() + np.log(p.sum())
            out[row, head, i] = p @ v[row, own, seen[i]] / p.sum()
    return out, lse


def bar(case):
    return 1e-2 if case.get("dtype") == jnp.bfloat16 else 3e-6


@pytest.mark.rotating
@pytest.mark.parametrize("form", sweep(["tpu interpret", FORM], FORM))
@cases
def test_the_kernel_is_masked_attention(name, form):
    q, keys, pos, picks, softcap = drawn = draw(**CASES[name])
    if picks.columns is not None:
        # Columns are attended to in plain jnp, which multiplies keys of padding by zero.
        keys = Keys(jnp.nan_to_num(keys.k), jnp.nan_to_num(keys.v), keys.pos)
    call = jax.jit(partial(sparse_prompt, scale=0.3, softcap=softcap, implementation=form))
    check(call(q, keys, pos, picks), by_hand(*drawn, 0.3), bar(CASES[name]))


@pytest.mark.parametrize("name", sweep(tuple(CASES), "columns"))
def test_the_plain_form_is_masked_attention(name):
    q, keys, pos, picks, softcap = drawn = draw(**CASES[name])
    keys = Keys(jnp.nan_to_num(keys.k), jnp.nan_to_num(keys.v), keys.pos)
    call = jax.jit(partial(sparse_prompt, scale=0.3, softcap=softcap, implementation="reference"))
    check(call(q, keys, pos, picks), by_hand(*drawn, 0.3), bar(CASES[name]))


@pytest.mark.rotating
@pytest.mark.parametrize("dma", ["on_wait", pytest.param("eager", marks=pytest.mark.rotating)])
def test_copies_arrive_before_they_are_read(dma):
    case = dict(segment=32, block=16, tokens=96, lengths=(96, 40), heads=1)
    q, keys, pos, picks, _ = drawn = draw(**case)
    lengths = (pos >= 0).sum(-1, dtype=jnp.int32)

    def call(mode):
        return tpu_sparse_prompt(q, keys.k, keys.v, lengths, picks.blocks, Options(0.3, None), interpret=mode)

    found, races = with_races(call, dma)
    assert not races
    check(found, by_hand(*drawn, 0.3), 3e-6)


@pytest.mark.parametrize(
    ("case", "form", "said"),
    [
        (dict(segment=32, block=8), "gpu interpret", "blocks of 8 keys, expected multiples of 16"),
        (dict(segment=80, block=80), "tpu interpret", "blocks of 80 keys, expected a divisor or a multiple"),
        (dict(segment=32, block=16, width=512), "gpu interpret", "rows 512 and 64 wide"),
        (dict(segment=32, block=16, dtype=jnp.float16), "tpu interpret", "expected float32 or bfloat16"),
    ],
)
def test_operands_that_a_kernel_cannot_take_are_refused_with_the_reason(case, form, said):
    q, keys, pos, picks, _ = draw(lengths=(160,), **case)
    with pytest.raises(NotImplementedError, match=said):
        sparse_prompt(q, keys, pos, picks, scale=1.0, implementation=form)


@pytest.mark.parametrize(
    ("tokens", "segment", "heads", "said"),
    [(2**20, 64, 32, "exceed the scalar memory"), (2**15, 2**14, 1, "exceed a TPU's vector memory")],
)
def test_segments_beyond_a_tpus_memories_are_refused(tokens, segment, heads, said):
    rows = jax.ShapeDtypeStruct((1, heads, tokens, 128), jnp.bfloat16)
    blocks = jax.ShapeDtypeStruct((1, heads, tokens // segment, tokens // 128), jnp.bool_)
    pos = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

    def call(q, pos, blocks):
        keys = Keys(q, q, pos[:, None])
        return sparse_prompt(q, keys, pos, Picks(blocks), scale=1.0, implementation="tpu interpret")

    with pytest.raises(NotImplementedError, match=said):
        jax.eval_shape(call, rows, pos, blocks)


def test_it_is_lowered_for_cuda():
    q, keys, pos, picks, _ = draw(**CASES["bfloat16"])
    text = lowered_for_cuda(partial(sparse_prompt, scale=0.3), q, keys, pos, picks)
    assert len(re.findall(r"custom_call @__gpu\$xla\.gpu\.triton", text)) == 1

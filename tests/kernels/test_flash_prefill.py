"""Prefill attention: the plain form against float64 numpy, the TPU kernels against both.

What empty slots and queries of nobody hold is no number, everywhere.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kvjax.ops.attention import flash_prefill as op
from kvjax.ops.attention.flash_prefill import FlashBlocks, flash_prefill, tpu_flash_prefill
from kvjax.pallas_kernels.flash_prefill import plan
from tests.ops.oracles import rms
from tests.sweep import sweep

SMALL = FlashBlocks(128, 128, 128, 128)


def draw(seed, *, b=1, heads=1, group=1, t=150, s=300, width=64, values=None, dtype=np.float32, past=None,
         lengths=None, segments=False, per_head=False, shuffled=False):  # fmt: skip
    """(q, k, v, q_pos, k_pos, q_segments, k_segments).

    A prompt over itself (s = t), or its last t tokens over s slots that hold `past` tokens and themselves,
    with holes. lengths: tokens of each row that are real.
    """
    rng = np.random.default_rng(seed)
    s = t if past is None else s
    past, lists = past or 0, heads if per_head else 1
    q_pos = np.full((b, t), -1, np.int32)
    k_pos = np.full((b, lists, s), -1, np.int32)
    for i in range(b):
        real = t if lengths is None else lengths[i]
        q_pos[i, :real] = past + np.arange(real)
        held = past + real if real else 0
        for n in range(lists):
            at = np.sort(rng.permutation(s)[:held]) if past else np.arange(held)
            k_pos[i, n, rng.permutation(at) if shuffled else at] = np.arange(held)
    q, k, v = (
        rng.standard_normal(x)
        for x in ((b, heads * group, t, width), (b, heads, s, width), (b, heads, s, values or width))
    )
    q[np.broadcast_to(q_pos[:, None] < 0, q.shape[:3])] = np.nan
    for x in (k, v):
        x[np.broadcast_to(k_pos < 0, x.shape[:3])] = np.nan
    kind = lambda x: jnp.asarray(x, dtype)  # noqa: E731
    q_seg = k_seg = None
    if segments:
        cuts = np.array([60, 61, 200])
        q_seg, k_seg = (np.searchsorted(cuts, x, side="right").astype(np.int32) for x in (q_pos, k_pos[:, 0]))
    pos = jnp.asarray(k_pos if per_head else k_pos[:, 0])
    opt = lambda x: None if x is None else jnp.asarray(x)  # noqa: E731
    return kind(q), kind(k), kind(v), jnp.asarray(q_pos), pos, opt(q_seg), opt(k_seg)


def by_hand(q, k, v, q_pos, k_pos, q_seg, k_seg, *, scale, window=None, softcap=None):
    """(out, lse), query by query, over the slots it sees alone."""
    q, k, v = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v))
    q_pos, k_pos = np.asarray(q_pos), np.asarray(k_pos)
    b, n, t, _ = q.shape
    heads = k.shape[1]
    k_pos = np.broadcast_to(k_pos if k_pos.ndim == 3 else k_pos[:, None], (b, heads, k.shape[2]))
    out, lse = np.zeros((b, n, t, v.shape[3])), np.full((b, n, t), -np.inf)
    for i, head, at in np.ndindex(b, n, t):
        j, pos = head // (n // heads), q_pos[i, at]
        seen = (k_pos[i, j] >= 0) & (k_pos[i, j] <= pos)
        seen &= True if window is None else k_pos[i, j] > pos - window
        seen &= True if q_seg is None else np.asarray(k_seg)[i] == np.asarray(q_seg)[i, at]
        if not seen.any():
            continue
        z = k[i, j, seen] @ q[i, head, at] * scale
        z = z if softcap is None else softcap * np.tanh(z / softcap)
        p = np.exp(z - z.max())
        lse[i, head, at] = z.max() + np.log(p.sum())
        out[i, head, at] = p @ v[i, j, seen] / p.sum()
    return out, lse


def check(got, want, bar):
    for x, y in zip(got, want, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_array_equal(np.isneginf(x), np.isneginf(y))
        finite = np.isfinite(y)
        assert np.isfinite(x[finite]).all() and rms(x[finite], y[finite]) < bar


CASES = {
    "all there is": dict(
        b=2,
        heads=2,
        group=2,
        t=140,
        s=300,
        past=100,
        shuffled=True,
        segments=True,
        window=50,
        softcap=1.5,
        width=80,
        values=64,
        lengths=(140, 5),
        scale=0.7,
    ),
    "a prompt over itself": dict(t=300),
    "rows of many lengths": dict(b=3, t=200, lengths=(200, 77, 0)),
    "a chunk over a cache": dict(heads=2, t=150, s=300, past=100),
    "slots in any order": dict(b=2, t=130, s=300, past=60, shuffled=True, lengths=(130, 5)),
    "heads with slots of their own": dict(heads=2, t=128, s=270, past=90, per_head=True),
    "window": dict(t=384, window=100),
    "window over a cache": dict(t=140, s=400, past=220, window=33, heads=2),
    "segments": dict(t=300, segments=True),
    "segments over a cache, window": dict(b=2, t=140, s=300, past=100, segments=True, window=50),
    "soft-cap": dict(t=200, softcap=1.5, scale=1.0),
    "one token": dict(t=1, s=200, past=150, group=4, heads=2),
    "a short cache": dict(t=40, s=70, past=20),
    "values of another width": dict(t=150, width=192, values=128),
    "bfloat16": dict(t=200, dtype=jnp.bfloat16, group=2),
    "bfloat16 with holes": dict(t=150, s=300, past=100, dtype=jnp.bfloat16, window=70, segments=True),
}
CASES |= {f"width {h}": dict(t=140, width=h, group=2) for h in (64, 80, 96, 128, 192, 256)}
CASES |= {f"group {g}": dict(t=140, group=g, s=200, past=30) for g in (4, 16)}


def split(case):
    options = {n: x for n, x in CASES[case].items() if n in ("window", "softcap", "scale")}
    drawn = {n: x for n, x in CASES[case].items() if n not in options}
    bar = 1e-2 if drawn.get("dtype") == jnp.bfloat16 else 2e-6
    return drawn, dict(scale=0.3, window=None, softcap=None) | options, bar


def plain(inputs, options):
    names = ("q_segments", "k_segments")
    more = dict(zip(names, inputs[5:], strict=True))
    return flash_prefill(*inputs[:5], **more, implementation="reference", **options)


def kernels(inputs, options, **how):
    pos = inputs[4] if inputs[4].ndim == 3 else inputs[4][:, None]
    how = dict(blocks=SMALL, interpret=True) | how
    return tpu_flash_prefill(*inputs[:4], pos, *inputs[5:], **how, **options)


@pytest.mark.parametrize("case", sweep(CASES, "bfloat16 with holes"))
def test_both_forms_are_the_equation_and_have_its_gradients(case):
    drawn, options, bar = split(case)
    inputs = draw(0, **drawn)
    want = by_hand(*inputs, **options)
    check(jax.jit(lambda *x: plain(x, options))(*inputs), want, bar)
    rng = np.random.default_rng(2)
    d_out, d_lse = (rng.standard_normal(x.shape) for x in want)

    def back(form, kind):
        def total(q, k, v):
            results = out, lse = form((q, k, v, *inputs[3:]), options)
            lse = jnp.where(jnp.isneginf(lse), jnp.zeros((), lse.dtype), lse)
            of_out = (out.astype(lse.dtype) * jnp.asarray(d_out, lse.dtype)).sum()
            return of_out + (lse * jnp.asarray(d_lse, lse.dtype)).sum(), results

        return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*(x.astype(kind) for x in inputs[:3]))

    got, results = back(kernels, inputs[0].dtype)
    check(results, want, bar)
    with jax.enable_x64(True):
        exact, _ = back(plain, jnp.float64)
    for x, y in zip(got, exact, strict=True):
        assert rms(x.astype(jnp.float32), y) < bar


MACHINE = [
    (case, size) for case in ("segments over a cache, window", "a prompt over itself") for size in (1, 2**21)
]


@pytest.mark.parametrize("case, part_bytes", sweep(MACHINE, MACHINE[0]))
@pytest.mark.rotating
def test_the_machine_reads_no_memory_that_nobody_wrote(case, part_bytes, monkeypatch):
    """The interpreter of the TPU fills memory with numbers that are none, and copies as the machine does.

    The smallest parts hold a block of slots each, and gradients add up over them.
    """
    monkeypatch.setattr(op, "PART_BYTES", part_bytes)
    assert part_bytes > 1 or op.slots_in_vmem(128, 64, 64) == 128
    drawn, options, bar = split(case)
    inputs = draw(4, **drawn)
    mode = pltpu.InterpretParams(uninitialized_memory="nan")

    def total(q, k, v):
        out, lse = kernels((q, k, v, *inputs[3:]), options, interpret=mode)
        return out.sum(), (out, lse)

    try:
        (_, got), grads = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(*inputs[:3])
        check(got, by_hand(*inputs, **options), bar)
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    want = jax.jit(jax.grad(lambda *x: plain((*x, *inputs[3:]), options)[0].sum(), (0, 1, 2)))(*inputs[:3])
    for x, y in zip(grads, want, strict=True):
        assert rms(x, y) < bar


@pytest.mark.rotating
def test_chunks_of_a_prompt_are_the_whole():
    q, k, v, pos, k_pos, *_ = draw(5, t=300, heads=2)
    how = dict(scale=0.3, window=130, softcap=None)
    run = jax.jit(lambda *x: kernels((*x, None, None), how))
    whole = run(q, k, v, pos, k_pos)
    parts = [
        run(q[:, :, a:z], k[:, :, :z], v[:, :, :z], pos[:, a:z], k_pos[:, :z])
        for a, z in ((0, 171), (171, 300))
    ]
    for x, y in zip(zip(*parts, strict=True), whole, strict=True):
        np.testing.assert_allclose(np.concatenate(x, 2), y, atol=2e-6)


@pytest.mark.rotating
@pytest.mark.parametrize("window", sweep([None, 20, 300], 20))
@pytest.mark.parametrize("kind", ["a prompt", "any order", "segments"])
def test_kinds_of_blocks_are_what_a_mask_says(kind, window, rng):
    """No block that is seen is left out, none is called whole that is not; of ordered ones all is exact."""
    pos = np.where(np.arange(512) < 450, np.arange(512), -1)[None].astype(np.int32)
    q_rows, k_rows = [pos], [np.concatenate([pos, np.full((1, 128), -1, np.int32)], 1)]
    if kind == "any order":
        k_rows[0] = rng.permutation(k_rows[0], axis=1)
    if kind == "segments":
        q_rows.append(pos // 100)
        k_rows.append(k_rows[0] // 100)
    sizes = plan.Sizes(128, 128, 1.0, window)
    kinds = np.asarray(plan.block_kinds(*(jnp.asarray(np.stack(x, 1)) for x in (q_rows, k_rows)), sizes))[0]
    a, z = q_rows[0][0][:, None], k_rows[0][0][None]
    seen = (z >= 0) & (z <= a) & ((z > a - window) if window else True)
    if kind == "segments":
        seen &= q_rows[1][0][:, None] == k_rows[1][0][None]
    blocks = seen.reshape(4, 128, 5, 128).swapaxes(1, 2)
    some, every = blocks.any((2, 3)), blocks.all((2, 3))
    assert (kinds > 0)[some].all() and not (kinds == plan.WHOLE)[~every].any()
    if kind != "any order":
        np.testing.assert_array_equal(kinds > 0, some)
        np.testing.assert_array_equal(kinds == plan.WHOLE, every)
    found = plan.plan(jnp.asarray(kinds)[None])
    for n, row in enumerate(kinds > 0):
        at = np.flatnonzero(row)
        assert found.count[n] == (at[-1] - at[0] + 1 if len(at) else 0)
        assert not len(at) or found.first[n] == at[0]
    assert found.width == max(1, np.asarray(found.count).max())


def test_what_cannot_run_says_why():
    q, k, v, pos, k_pos, *_ = draw(0, t=128)
    run = lambda *x, **how: flash_prefill(*x, pos, k_pos, scale=1.0, **how)  # noqa: E731
    with pytest.raises(NotImplementedError, match="there is no such form"):
        run(q, k, v, implementation="cuda")
    with pytest.raises(
        NotImplementedError, match="float16, float32 and float32, expected float32 or bfloat16"
    ):
        run(q.astype(jnp.float16), k, v, implementation="tpu")
    with pytest.raises(NotImplementedError, match="blocks of .*, expected multiples of 128"):
        run(q, k, v, implementation="tpu", blocks=FlashBlocks(128, 100, 128, 128))
    with pytest.raises(ValueError, match="do not fit"):
        run(*(jnp.concatenate([x] * n, 1) for x, n in ((q, 3), (k, 2), (v, 2))))
    with pytest.raises(ValueError, match="segments of one side only"):
        run(q, k, v, q_segments=pos)
    long = jax.ShapeDtypeStruct((64, 8, 2**17, 128), jnp.bfloat16)
    lists = jax.ShapeDtypeStruct((64, 8, 2**17), jnp.int32)
    found = []
    jax.eval_shape(lambda x, pos: found.append(op.refusal(x, x, x, pos)), long, lists)
    assert "exceeds the scalar memory" in found[0]


@pytest.mark.rotating
def test_here_it_runs_as_the_plain_form_and_by_force_as_the_kernel():
    drawn, options, bar = split("a short cache")
    inputs = draw(6, **drawn)
    plainly, forced = (
        jax.jit(partial(flash_prefill, implementation=how, **options))(*inputs[:5])
        for how in (None, "tpu interpret")
    )
    check(forced, plainly, bar)

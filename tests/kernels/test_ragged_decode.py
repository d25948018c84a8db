"""Decoding over consecutive lists: the plain form against float64 numpy, the TPU kernel against it too.

Everything that must not be read is no number: rows between lists, which belong to nobody.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.base.rope import Rope
from kvjax.ops.decode.ragged_decode import CodedRows, ragged_decode, tpu_ragged_decode
from kvjax.ops.decode.rotation import KeyRotation
from kvjax.pallas_kernels import streaming
from tests.kernels.close import check, with_races
from tests.kernels.test_stacked_decode import rotated_by_hand
from tests.sweep import sweep

B, K = 2, 2
# Full, none, one slot, one past a step: in this order, in another one, and nothing at all.
LENGTHS = {"mixed": [[64, 0], [1, 33]], "empty ends": [[0, 40], [64, 0]], "empty": [[0, 0], [0, 0]]}


def draw(
    seed,
    *,
    group=2,
    t=1,
    width=128,
    values=128,
    aligned=16,
    lengths="mixed",
    dtype=jnp.float32,
    packed=False,
    unit=1,
    bias=False,
    turned=None,
):
    """(q, k, v, starts, lengths) and bias; lists lie in a drawn order, one multiple of `aligned` apart."""
    rng = np.random.default_rng(seed)
    length = np.asarray(LENGTHS[lengths]) * unit
    starts, at = np.zeros((B, K), np.int32), aligned
    for i in rng.permutation(B * K):
        starts.flat[i] = at
        at += -(-length.flat[i] // aligned) * aligned + aligned
    starts[length == 0] = at - aligned
    k, v = (np.full((at, w), np.nan) for w in (width, values))
    for i in np.ndindex(B, K):
        mine = slice(starts[i], starts[i] + length[i])
        k[mine], v[mine] = (rng.standard_normal((length[i], w)) for w in (width, values))
    q = rng.standard_normal((B, group * K, t, width))
    most = 64 * unit
    numbers = rng.standard_normal((B, K, most)) if bias else None
    if bias:
        numbers = np.where(np.arange(most) < length[..., None], numbers, np.nan)
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    options = dict(most=most, aligned=aligned, scale=0.09, values=values)
    options["bias"] = None if numbers is None else jnp.asarray(numbers, jnp.float32)
    options["rotation"] = None
    if turned is not None:
        options["rotation"] = KeyRotation(turned, jnp.asarray(rng.integers(0, 40, (B, K, most)), jnp.int32))
    return (q, k, None if packed else v, jnp.asarray(starts), jnp.asarray(length)), options


def by_hand(inputs, options, softcap=None):
    """(out, lse), query by query."""
    q, k, v = (None if x is None else np.asarray(x.astype(jnp.float32), np.float64) for x in inputs[:3])
    v = k if v is None else v
    starts, lengths = (np.asarray(x) for x in inputs[3:])
    width = options["values"]
    out, lse = np.zeros((*q.shape[:3], width)), np.full(q.shape[:3], -np.inf)
    for b, n, t in np.ndindex(q.shape[:3]):
        mine = b, n // (q.shape[1] // K)
        rows = slice(starts[mine], starts[mine] + lengths[mine])
        if lengths[mine] == 0:
            continue
        keys, rotation = k[rows], options["rotation"]
        if rotation is not None:
            keys = rotated_by_hand(keys, rotation, np.asarray(rotation.phase)[mine][: lengths[mine]])
        z = keys @ q[b, n, t] * options["scale"]
        z = z if softcap is None else softcap * np.tanh(z / softcap)
        if options["bias"] is not None:
            z = z + np.asarray(options["bias"], np.float64)[mine][: lengths[mine]]
        p = np.exp(z - z.max())
        lse[b, n, t] = z.max() + np.log(p.sum())
        out[b, n, t] = p / p.sum() @ v[rows, :width]
    return out, lse


CASES = {
    # Blocks end within tiles, biases have tails of their own, and values are narrower than keys.
    "all there is": dict(t=2, group=3, width=256, aligned=128, unit=4, bias=True),
    "plain": dict(),
    "empty lists first and last": dict(lengths="empty ends"),
    "several queries": dict(t=3),
    "one head each": dict(group=1),
    "sixteen heads each": dict(group=16),
    "lists of whole tiles only": dict(aligned=8),
    "keys of 256, values of 128": dict(width=256),
    "latents": dict(width=256, packed=True),
    "biases": dict(aligned=128, unit=4, bias=True),
    "bfloat16": dict(dtype=jnp.bfloat16),
    "turned": dict(aligned=128, unit=4, group=3, t=2, turned=Rope()),
    "some channels turned, biases": dict(
        aligned=128, unit=4, width=256, bias=True, turned=Rope(rotary_dim=64, start=32)
    ),
}


def bar(case):
    return 1e-2 if case == "bfloat16" else 2e-6


def kernel(inputs, options, block, interpret=True, **more):
    call = partial(tpu_ragged_decode, block=block, interpret=interpret, **options, **more)
    return jax.jit(call)(*inputs)


ALWAYS = [("all there is", 16), ("latents", 16), ("bfloat16", 16)]


@pytest.mark.rotating
@pytest.mark.parametrize(
    "case, block", sweep([(case, block) for case in CASES for block in (16, 64)], *ALWAYS)
)
def test_both_forms_are_the_equation(case, block):
    inputs, options = draw(1, **CASES[case])
    want = by_hand(inputs, options, 5.0)
    plain = jax.jit(partial(ragged_decode, implementation="reference", softcap=5.0, **options))
    check(plain(*inputs), want, bar(case))
    check(kernel(inputs, options, block * CASES[case].get("unit", 1), softcap=5.0), want, bar(case))


@pytest.mark.parametrize("case", sweep(["plain", "latents"], "plain"))
def test_the_kernel_chooses_its_own_steps(case):
    inputs, options = draw(5, **CASES[case])
    call = jax.jit(partial(ragged_decode, implementation="tpu interpret", **options))
    check(call(*inputs), by_hand(inputs, options), 2e-6)


def coded(rows, starts, lengths, most):
    """Rows in codes, and the numbers that they stand for; scales behind the lengths are no numbers."""
    rng, plain = np.random.default_rng(7), np.zeros(rows.shape)
    codes = rng.integers(0, 256, rows.shape).astype(np.uint8)
    scale, zero = rng.random((2, B, K, most)).astype(np.float16) / np.float16(100)
    zero = (zero - scale * 128).astype(np.float16)
    for i in np.ndindex(B, K):
        mine, live = slice(starts[i], starts[i] + lengths[i]), np.arange(lengths[i])
        plain[mine] = codes[mine] * scale[i][live, None].astype(float) + zero[i][live, None]
    scale = np.where(np.arange(most) < np.asarray(lengths)[..., None], scale, np.float16(np.nan))
    words = np.stack([scale, zero], -1).view("<u4")[..., 0]
    return CodedRows(jnp.asarray(codes), jnp.asarray(words)), jnp.asarray(plain, jnp.float32)


@pytest.mark.rotating
@pytest.mark.parametrize("which", sweep(["both", "values", "latents"], "both"))
def test_codes_are_the_numbers_that_they_stand_for(which):
    """And biases are added to what is left of them."""
    inputs, options = draw(8, aligned=128, unit=4, bias=True, packed=which == "latents")
    q, k, v, starts, lengths = inputs
    given = [np.asarray(x) for x in (starts, lengths)]
    (k, plain_k), (v, plain_v) = (
        (x, x) if x is None or (which == "values" and x is k) else coded(x, *given, options["most"])
        for x in (k, v)
    )
    want = by_hand((q, plain_k, plain_v, starts, lengths), options)
    for how in ("reference", "tpu interpret"):
        check(
            jax.jit(partial(ragged_decode, implementation=how, **options))(q, k, v, starts, lengths),
            want,
            2e-6,
        )


@pytest.mark.parametrize("how", sweep(["reference", "tpu interpret"]))
def test_lists_without_slots_give_zeros(how):
    inputs, options = draw(4, lengths="empty")
    out, lse = jax.jit(partial(ragged_decode, implementation=how, **options))(*inputs)
    assert (out == 0).all() and (lse == -jnp.inf).all()


@pytest.mark.rotating
def test_two_cores_share_the_lists():
    inputs, options = draw(2)
    check(kernel(inputs, options, 16, cores=2), by_hand(inputs, options), 2e-6)


RACED = ("plain", "empty lists first and last", "biases")


@pytest.mark.rotating
@pytest.mark.parametrize(
    "case, dma", sweep([(case, dma) for case in RACED for dma in ("on_wait", "eager")], (RACED[1], "on_wait"))
)
def test_copies_have_arrived_before_they_are_read(case, dma):
    inputs, options = draw(3, **CASES[case])
    block = 16 * CASES[case].get("unit", 1)
    got, races = with_races(lambda mode: kernel(inputs, options, block, mode), dma)
    check(got, by_hand(inputs, options), 2e-6)
    assert not races


@pytest.mark.rotating
def test_a_missing_wait_is_found(monkeypatch):
    """A copy that happens at once makes the answer right, and the detector must still see the race."""
    monkeypatch.setattr(streaming, "wait", lambda copy: None)
    inputs, options = draw(3)
    assert with_races(lambda mode: kernel(inputs, options, 16, mode), "eager")[1]


def test_what_cannot_run_says_why():
    inputs, options = draw(0)
    q, k, v, *lists = inputs
    forced = partial(ragged_decode, implementation="tpu")
    with pytest.raises(NotImplementedError, match="there is no such form"):
        ragged_decode(*inputs, implementation="cuda", **options)
    for wrong, why in [
        ((q[..., :64], k[:, :64], v), "rows are 64 wide, expected a multiple of 128"),
        ((q, k, v[:, :96]), "rows are 96 wide, expected a multiple of 128"),
        ((q, k.astype(jnp.float16), v), "rows of float16, expected float32, bfloat16 or codes in uint8"),
        ((q.astype(jnp.float16), k, v), "queries of float16, expected float32 or bfloat16"),
    ]:
        with pytest.raises(NotImplementedError, match=why):
            forced(*wrong, *lists, **options)
    with pytest.raises(NotImplementedError, match="multiples of 12 rows, expected multiples of 8"):
        forced(*inputs, **options | dict(aligned=12))
    with pytest.raises(
        NotImplementedError, match="1 biases or scales of 2 heads x 64 slots in multiples of 16, expected"
    ):
        forced(*inputs, **options | dict(bias=jnp.zeros((B, K, 64))))
    for wrong in [(q[:, :3], k, v), (q, k[:, :64], v)]:
        with pytest.raises(ValueError, match="do not fit"):
            ragged_decode(*wrong, *lists, **options)
    with pytest.raises(ValueError, match="0 values, .* do not fit"):
        ragged_decode(q, k, None, *lists, **options | dict(values=None))
    with pytest.raises(ValueError, match=r"scales of \[9\] slots do not fit"):
        ragged_decode(*inputs, **options | dict(bias=jnp.zeros((B, K, 9))))

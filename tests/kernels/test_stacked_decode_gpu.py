"""The GPU kernel of decoding over consecutive rows, in the interpreter against the equation.

Cases, and what is no number in them, are those of the three operations that it serves; that it compiles is
shown in `tests/aot/test_gpu.py`.
"""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from kvjax.ops.decode import partial_gpu
from kvjax.ops.decode.picked_decode import picked_decode
from kvjax.ops.decode.ragged_decode import ragged_decode
from kvjax.ops.decode.stacked_decode import stacked_decode
from tests.kernels import test_picked_decode as picked
from tests.kernels import test_ragged_decode as ragged
from tests.kernels import test_stacked_decode as stacked
from tests.kernels.close import check
from tests.kernels.cuda import FORM, lowered_for_cuda
from tests.sweep import sweep

# Latents wider than a power of two, rows that fill no block, and heads that fill no lanes: it masks them all.
MORE = {
    "heads of 64 in rows": dict(width=64, slots=40),
    "latents of 96": stacked.CASES["latents on the lanes"],
}


# Few programs take several steps each, many take one and leave more to merge.
MANY, FEW = 1000, 3


def in_parts(cases, *always):
    """Cases with many parts and with few, of which those in `always` run every time."""
    return pytest.mark.parametrize(
        "case, programs", sweep([(x, n) for x in cases for n in (MANY, FEW)], *always)
    )


@pytest.mark.rotating
@in_parts(
    stacked.CASES,
    ("all on rows", MANY), ("all on the lanes", FEW), ("bfloat16", FEW), ("some channels turned, sizes", FEW),
)  # fmt: skip
def test_dense_lists(case, programs, monkeypatch):
    monkeypatch.setattr(partial_gpu, "PROGRAMS", programs)
    drawn, options = stacked.split(case)
    inputs = stacked.draw(1, **drawn)
    call = jax.jit(lambda *x: stacked_decode(*x, 1, implementation=FORM, **options))
    check(
        stacked.given(call(*inputs)),
        stacked.by_hand(*inputs, **options),
        1e-2 if "bfloat16" in case else 2e-6,
    )


@in_parts(["both", "keys", "values", "latents"], ("both", MANY))
def test_dense_codes(case, programs, monkeypatch):
    monkeypatch.setattr(partial_gpu, "PROGRAMS", programs)
    q, k, v, lengths, pos = stacked.draw(11, t=2, slots=320, packed=case == "latents")
    options = dict(scale=0.09, window=200, mass=True, pos=stacked.sides(12, 320)["pos"])
    coded_k, plain_k = (k, k) if case == "values" else stacked.code(k)
    coded_v, plain_v = (v, v) if case in ("keys", "latents") else stacked.code(v)
    call = jax.jit(lambda *x: stacked_decode(*x, 1, implementation=FORM, **options))
    check(
        call(q, coded_k, coded_v, lengths, pos),
        stacked.by_hand(q, plain_k, plain_v, lengths, pos, **options),
        2e-6,
    )


@in_parts(ragged.CASES, ("all there is", MANY))
def test_lists_of_unequal_lengths(case, programs, monkeypatch):
    monkeypatch.setattr(partial_gpu, "PROGRAMS", programs)
    inputs, options = ragged.draw(1, **ragged.CASES[case])
    call = jax.jit(partial(ragged_decode, implementation=FORM, softcap=5.0, **options))
    check(call(*inputs), ragged.by_hand(inputs, options, 5.0), ragged.bar(case))


@in_parts(["both"], ("both", FEW))
def test_codes_of_unequal_lengths(case, programs, monkeypatch):
    monkeypatch.setattr(partial_gpu, "PROGRAMS", programs)
    (q, k, v, starts, lengths), options = ragged.draw(4, aligned=128, unit=4)
    (coded_k, plain_k), (coded_v, plain_v) = (
        ragged.coded(x, starts, lengths, options["most"]) for x in (k, v)
    )
    call = jax.jit(partial(ragged_decode, implementation=FORM, **options))
    want = ragged.by_hand((q, plain_k, plain_v, starts, lengths), options)
    check(call(q, coded_k, coded_v, starts, lengths), want, 2e-6)


@in_parts(picked.CASES, ("all there is", FEW))
def test_picked_pages(case, programs, monkeypatch):
    monkeypatch.setattr(partial_gpu, "PROGRAMS", programs)
    how, options = picked.CASES[case]
    inputs, options = picked.draw(0, **how), options | dict(scale=0.09)
    call = jax.jit(lambda *x: picked_decode(*x, 1, implementation=FORM, **options))
    check(
        call(*inputs), picked.by_hand(inputs, **options), 1e-2 if how.get("dtype") == jnp.bfloat16 else 2e-6
    )


@in_parts(["pages", "single slots"], ("single slots", FEW))
def test_picked_slots_with_biases_of_query_heads(case, programs, monkeypatch):
    monkeypatch.setattr(partial_gpu, "PROGRAMS", programs)
    page = 16 if case == "pages" else 1
    inputs = picked.draw(0, group=3, t=2, page=page)
    options = dict(page=page, scale=0.09, bias=picked.bias(2, 3 * picked.K, page))
    call = jax.jit(lambda *x: picked_decode(*x, 1, implementation=FORM, **options))
    check(call(*inputs), picked.by_hand(inputs, **options), 2e-6)


def test_it_is_chosen_on_a_gpu_and_refuses_by_name():
    bf16, ints = jnp.bfloat16, jnp.int32
    q, k = jax.ShapeDtypeStruct((1, 8, 1, 128), bf16), jax.ShapeDtypeStruct((3, 1, 2, 4100, 128), bf16)
    numbers = [jax.ShapeDtypeStruct(s, ints) for s in ((1, 2), (1, 1))]
    call = partial(stacked_decode, scale=0.1)
    assert 'name = "stacked_decode"' in lowered_for_cuda(call, q, k, k, *numbers)
    plain = partial(call, implementation="reference")
    assert "triton" not in lowered_for_cuda(plain, q, k, k, *numbers)
    q, k, v, lengths, pos = stacked.draw(0)
    force = partial(stacked_decode, scale=1.0, implementation="gpu")
    with pytest.raises(NotImplementedError, match="queries of float16, expected float32 or bfloat16"):
        force(q.astype(jnp.float16), k, v, lengths, pos)
    with pytest.raises(NotImplementedError, match="a cache of float16, expected float32, bfloat16 or codes"):
        force(q, k, v.astype(jnp.float16), lengths, pos)
    with pytest.raises(NotImplementedError, match="keys are 640 wide, expected at most 512"):
        force(*(jnp.zeros((*x.shape[:-1], 640)) for x in (q, k, v)), lengths, pos)


@pytest.mark.parametrize(
    ("capability", "taken"), [("7.5", False), ("8.0", True), ("12.1", True), ("gfx942", False), (None, False)]
)
def test_older_gpus_and_those_of_others_get_the_plain_form(capability, taken, monkeypatch):
    """Triton's compiler takes no T4: a step must not end with its error there."""
    device = SimpleNamespace(device_kind="Tesla T4", compute_capability=capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    q, k, *_ = stacked.draw(0)
    why = partial_gpu.gpu_refusal(q, k.shape[2], {})
    assert (why == "") == taken
    assert taken or why.startswith("a Tesla T4 of ") and "expected an NVIDIA GPU" in why

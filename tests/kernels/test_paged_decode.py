"""Paged decoding: the plain form against float64 numpy, the TPU kernel against the plain form.

Everything that must not be read is no number: pages of nobody, slots behind a list's length, unused entries
of the table (which name no page at all).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kvjax.ops.paged_decode import PagePool, paged_decode, tpu_paged_decode
from kvjax.pallas_kernels.paged_decode import kernel_tpu
from tests.ops.oracles import rms

B, K, LAYERS, ABSURD = 2, 2, 2, 10**6
LENGTHS = {
    "full": lambda s: s,
    "odd": lambda s: s - 3,
    "past a step": lambda s: s // 2 + 1,
    "empty": lambda s: 0,
}


def draw(
    seed, *, group=2, t=1, width=128, page=16, pages=8, dtype=np.float32, rows=(), lengths=tuple(LENGTHS)
):
    """(q, pool, table, lengths, q_pos) whose unread parts are no numbers, and the lists in float64."""
    rng = np.random.default_rng(seed)
    slots = page * pages
    length = np.array([LENGTHS[n](slots) for n in lengths], np.int32).reshape(B, K)
    used = -(-length // page)
    order, at = rng.permutation(used.sum() + 3), 0
    table = np.full((B, K, pages), ABSURD, np.int32)
    kv = np.full((LAYERS, used.sum() + 3, 2, page, width), np.nan)
    side = np.full((LAYERS, used.sum() + 3, len(rows), page), np.nan)
    for b, k in np.ndindex(B, K):
        table[b, k, : used[b, k]] = order[at : at + used[b, k]]
        for m, p in enumerate(order[at : at + used[b, k]]):
            live = min(page, length[b, k] - m * page)
            kv[1, p, :, :live] = rng.standard_normal((2, live, width))
            for i, name in enumerate(rows):
                x = (rng.random(live) + 0.5) / (30 if name.endswith("scale") else 1)
                if name == "pos":
                    x = np.where(rng.random(live) < 0.1, -1, rng.integers(0, slots, live))
                side[1, p, i, :live] = x
        at += used[b, k]
    q = rng.standard_normal((B, group * K, t, width))
    pos = np.sort(rng.integers(slots // 2, slots, (B, t)), -1).astype(np.int32)
    quantised = "key_scale" in rows
    if quantised:
        kv = np.where(np.isnan(kv), 77, np.clip(np.round(kv * 30), -127, 127))
    pool = PagePool(jnp.asarray(kv, dtype), jnp.asarray(side, jnp.float32) if rows else None, tuple(rows))
    kind = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    return jnp.asarray(q, kind), pool, jnp.asarray(table), jnp.asarray(length), jnp.asarray(pos)


def by_hand(q, pool, table, lengths, q_pos, *, scale, window=None, softcap=None):
    """(out, lse, mass), list by list and query by query."""
    q, q_pos = np.asarray(q, np.float64), np.asarray(q_pos)
    kv = np.asarray(pool.pages.astype(jnp.float32), np.float64)[1]
    rows = None if pool.rows is None else np.asarray(pool.rows, np.float64)[1]
    b, n, t, h = q.shape
    group, slots = n // K, table.shape[2] * kv.shape[2]
    out, lse, mass = np.zeros(q.shape), np.full((b, n, t), -np.inf), np.zeros((b, K, slots))
    for i, head, at in np.ndindex(b, n, t):
        k, length = head // group, int(lengths[i, head // group])
        if length == 0:
            continue
        ids = np.asarray(table)[i, k, : -(-length // kv.shape[2])]
        keys, values = (kv[ids][:, s].reshape(-1, h)[:length] for s in (0, 1))
        side = (
            {}
            if rows is None
            else {name: rows[ids][:, c].reshape(-1)[:length] for c, name in enumerate(pool.names)}
        )
        z = keys @ q[i, head, at] * scale * side.get("key_scale", 1.0)
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
        out[i, head, at] = (p * side.get("value_scale", 1.0)) @ values
        mass[i, k, :length] += p
    return out, lse, mass


def check(got, want, bar):
    for x, y in zip(got, want, strict=True):
        x = np.asarray(x, np.float64)
        np.testing.assert_array_equal(np.isneginf(x), np.isneginf(y))
        finite = np.isfinite(y)
        assert np.isfinite(x[finite]).all() and rms(x[finite], y[finite]) < bar


CASES = {
    "plain": dict(),
    "several queries": dict(t=3, rows=("pos",), page=128, pages=4),
    "one head each": dict(group=1),
    "many heads each": dict(group=9, width=256),
    "window and soft-cap": dict(t=2, rows=("pos", "bias"), page=128, pages=4, window=200, softcap=5.0),
    "int8": dict(rows=("key_scale", "value_scale"), page=128, pages=4, dtype=jnp.int8),
    "int8 with positions": dict(rows=("pos", "key_scale", "value_scale"), page=128, pages=4, dtype=jnp.int8),
    "e5m2": dict(rows=("key_scale", "value_scale"), page=128, pages=4, dtype=jnp.float8_e5m2),
    "small pages": dict(page=8, pages=6),
    "bfloat16": dict(dtype=jnp.bfloat16),
}


def split(case):
    options = {n: x for n, x in CASES[case].items() if n in ("window", "softcap")}
    return {n: x for n, x in CASES[case].items() if n not in options}, dict(scale=0.09) | options


@pytest.mark.parametrize("case", CASES)
def test_the_plain_form_is_the_equation(case):
    drawn, options = split(case)
    inputs = draw(0, **drawn)
    call = jax.jit(lambda *x: paged_decode(*x, 1, mass=True, implementation="reference", **options))
    check(call(*inputs), by_hand(*inputs, **options), 1e-2 if case == "bfloat16" else 2e-6)


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_the_plain_form(case, step):
    drawn, options = split(case)
    inputs = draw(1, **drawn)
    at = jnp.asarray(1, jnp.int32)
    want = jax.jit(lambda *x: paged_decode(*x, at, mass=True, implementation="reference", **options))(*inputs)
    options = dict(window=None, softcap=None) | options
    call = jax.jit(lambda *x: tpu_paged_decode(*x, at, mass=True, step=step, interpret=True, **options))
    bar = 1e-2 if case == "bfloat16" else 2e-6
    check(call(*inputs), [np.asarray(x, np.float64) for x in want], bar)


def with_races(inputs, options, dma):
    """(results, whether the interpreter saw a race) of the kernel with copies that take their time."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as machine

    at, options = jnp.asarray(1, jnp.int32), dict(window=None, softcap=None) | options
    mode = pltpu.InterpretParams(detect_races=True, dma_execution_mode=dma)
    call = jax.jit(lambda *x: tpu_paged_decode(*x, at, mass=True, step=2, interpret=mode, **options))
    try:
        return [np.asarray(x, np.float64) for x in call(*inputs)], machine.races.races_found
    except jax.errors.JaxRuntimeError as error:
        # Later releases stop at a race instead of noting it.
        if "RACE DETECTED" not in str(error):
            raise
        return [], True
    finally:
        pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("dma", ["on_wait", "eager"])
@pytest.mark.parametrize("case", ["plain", "int8 with positions"])
def test_copies_have_arrived_before_they_are_read(case, dma):
    drawn, options = split(case)
    inputs = draw(2, **drawn)
    got, races = with_races(inputs, options, dma)
    check(got, by_hand(*inputs, **options), 2e-6)
    assert not races


def test_a_missing_wait_is_found(monkeypatch):
    """A copy that happens at once makes the answer right, and the detector must still see the race."""
    monkeypatch.setattr(kernel_tpu, "_wait", lambda copy: None)
    drawn, options = split("plain")
    assert with_races(draw(2, **drawn), options, "eager")[1]


def test_what_cannot_run_says_why():
    q, pool, table, lengths, pos = draw(0)
    how = dict(scale=1.0)
    with pytest.raises(NotImplementedError, match="there is no such form"):
        paged_decode(q, pool, table, lengths, pos, 1, implementation="cuda", **how)
    thin = PagePool(pool.pages[..., :64])
    with pytest.raises(NotImplementedError, match="pages are 64 wide, expected a multiple of 128"):
        paged_decode(q[..., :64], thin, table, lengths, pos, 1, implementation="tpu", **how)
    with pytest.raises(ValueError, match="do not fit"):
        paged_decode(q[:, :3], pool, table, lengths, pos, 1, **how)
    with pytest.raises(ValueError, match="names must be some of"):
        PagePool(pool.pages, None, ("colour",))

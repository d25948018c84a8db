"""Decoding over pages of latents: the plain form against float64 numpy, the TPU kernel against both.

Everything that must not be read is no number: pages of nobody, slots behind a length, the other layer, and
unused entries of the table, which name no page at all. What fills rows up to their width is large.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.decode.mla_decode import latent_append, mla_decode, tpu_mla_decode
from kvjax.pallas_kernels import streaming
from tests.kernels.close import check, with_races
from tests.sweep import sweep

B, LAYERS, ABSURD = 3, 2, 10**6


def draw(seed, *, heads=16, rank=128, rope=64, page=16, pages=4, dtype=jnp.float32, live=(1.0, 0.55, 0.0)):
    """(q, q_rope, pages, table, lengths) whose unread parts are no numbers."""
    rng = np.random.default_rng(seed)
    slots, width = page * pages, -(-(rank + rope) // 128) * 128
    lengths = np.array([int(slots * x) for x in live], np.int32)
    used = -(-lengths // page)
    order = rng.permutation(used.sum() + 2)
    table, pool = (
        np.full((B, pages), ABSURD, np.int32),
        np.full((LAYERS, used.sum() + 2, page, width), np.nan),
    )
    for b in range(B):
        table[b, : used[b]] = order[used[:b].sum() : used[: b + 1].sum()]
        for m, p in enumerate(table[b, : used[b]]):
            real = min(page, lengths[b] - m * page)
            pool[1, p, :real] = rng.standard_normal((real, width))
            pool[1, p, :real, rank + rope :] = 1e3
    q, q_rope = (rng.standard_normal((B, heads, n)) for n in (rank, rope))
    x = (jnp.asarray(q, dtype), jnp.asarray(q_rope, dtype), jnp.asarray(pool, dtype))
    return *x, jnp.asarray(table), jnp.asarray(lengths)


def by_hand(q, q_rope, pages, table, lengths, *, scale):
    """(out, lse), sequence by sequence and head by head."""
    q, q_rope, pool = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, q_rope, pages))
    (b, n, r), p = q.shape, q_rope.shape[-1]
    out, lse = np.zeros(q.shape), np.full((b, n), -np.inf)
    for i, head in np.ndindex(b, n):
        length = int(lengths[i])
        if not length:
            continue
        ids = np.asarray(table)[i, : -(-length // pool.shape[2])]
        rows = pool[1][ids].reshape(-1, pool.shape[3])[:length]
        z = scale * (rows[:, :r] @ q[i, head] + rows[:, r : r + p] @ q_rope[i, head])
        w = np.exp(z - z.max())
        lse[i, head] = z.max() + np.log(w.sum())
        out[i, head] = w / w.sum() @ rows[:, :r]
    return out, lse


# Heads that fill no tile, a list that is full, one that ends within a step, and an empty one.
FIRST = "DeepSeek's ratio of widths"
CASES = {
    FIRST: dict(rank=256, rope=32, heads=5, page=8, pages=5),
    "plain": dict(),
    "DeepSeek's widths": dict(rank=512, rope=64, heads=8),
    "128 heads": dict(heads=128),
    "heads that fill no tile": dict(heads=5),
    "small pages": dict(page=8, pages=5),
    "one token": dict(live=(1 / 64, 0, 1)),
    "bfloat16": dict(dtype=jnp.bfloat16, rank=256),
}
LAYER = jnp.asarray(1, jnp.int32)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "case, step", sweep([(case, step) for case in CASES for step in (1, 3)], (FIRST, 3), ("bfloat16", 1))
)
def test_both_forms_are_the_equation(case, step):
    inputs = draw(1, **CASES[case])
    want, bar = by_hand(*inputs, scale=0.07), 1e-2 if case == "bfloat16" else 2e-6
    check(jax.jit(lambda *x: mla_decode(*x, 1, scale=0.07, implementation="reference"))(*inputs), want, bar)
    call = jax.jit(lambda *x: tpu_mla_decode(*x, LAYER, scale=0.07, step=step, interpret=True))
    check(call(*inputs), want, bar)


@pytest.mark.rotating
def test_cores_share_the_sequences():
    inputs = draw(1)
    call = jax.jit(lambda *x: tpu_mla_decode(*x, LAYER, scale=0.07, step=2, cores=3, interpret=True))
    check(call(*inputs), by_hand(*inputs, scale=0.07), 2e-6)


def raced(inputs, dma):
    def call(mode):
        return jax.jit(lambda *x: tpu_mla_decode(*x, LAYER, scale=0.07, step=2, interpret=mode))(*inputs)

    return with_races(call, dma)


@pytest.mark.parametrize(
    "case, dma",
    sweep(
        [(case, dma) for case in ("plain", "one token") for dma in ("on_wait", "eager")], ("plain", "on_wait")
    ),
)
def test_copies_have_arrived_before_they_are_read(case, dma):
    inputs = draw(2, **CASES[case])
    got, races = raced(inputs, dma)
    check(got, by_hand(*inputs, scale=0.07), 2e-6)
    assert not races


@pytest.mark.rotating
def test_a_missing_wait_is_found(monkeypatch):
    """A copy that happens at once makes the answer right, and the detector must still see the race."""
    monkeypatch.setattr(streaming, "wait", lambda copy: None)
    assert raced(draw(2), "eager")[1]


def every_head(q, q_rope, latent, k_rope, up_k, up_v, *, scale):
    """Causal attention of whole sequences, with the keys and values of every head made from the latents."""
    z = np.einsum("bthk,bshk->bhts", q, np.einsum("bsr,rhk->bshk", latent, up_k))
    z = scale * (z + np.einsum("bthp,bsp->bhts", q_rope, k_rope))
    w = np.exp(z - z.max(-1, keepdims=True)) * np.tri(q.shape[1])
    v = np.einsum("bsr,rhv->bshv", latent, up_v)
    return np.einsum("bhts,bshv->bthv", w / w.sum(-1, keepdims=True), v)


@pytest.mark.rotating
def test_appended_latents_decode_as_the_layer_without_pages():
    """Token by token into pages, against latent attention of the whole sequence."""
    rng = np.random.default_rng(3)
    t, heads, k, rank, rope = 20, 4, 24, 128, 16
    x = {
        n: jnp.asarray(rng.standard_normal(s), jnp.float32)
        for n, s in dict(
            q=(1, t, heads, k), q_rope=(1, t, heads, rope), latent=(1, t, rank), k_rope=(1, t, rope),
            up_k=(rank, heads, k), up_v=(rank, heads, k),
        ).items()
    }  # fmt: skip
    want = every_head(**{n: np.asarray(a, np.float64) for n, a in x.items()}, scale=0.05)
    absorbed = jnp.einsum("bthk,rhk->bthr", x["q"], x["up_k"])
    pages, table = jnp.full((1, 3, 16, 256), jnp.nan), jnp.asarray([[2, 0]])

    def token(pages, at):
        length = at[None]
        now = [x[n][:, at] for n in ("latent", "k_rope")]
        pages = latent_append(pages, table, length, *now, implementation="tpu interpret")
        out, _ = mla_decode(
            absorbed[:, at], x["q_rope"][:, at], pages, table, length + 1,
            scale=0.05, implementation="tpu interpret",
        )  # fmt: skip
        return pages, out[0]

    _, got = jax.jit(lambda p: jax.lax.scan(token, p, jnp.arange(t)))(pages)
    check([jnp.einsum("thr,rhv->thv", got, x["up_v"])], want, 2e-6)


def test_what_cannot_run_says_why():
    q, q_rope, pages, table, lengths = draw(0)
    how = dict(scale=1.0)
    with pytest.raises(NotImplementedError, match="there is no such form"):
        mla_decode(q, q_rope, pages, table, lengths, 1, implementation="cuda", **how)
    for wrong, why in [
        ((q[..., :64], q_rope, pages), "latents of 64, expected multiples of 128"),
        ((q, q_rope, pages[:, :, :12]), "pages of 12 tokens"),
        ((q, q_rope, pages.astype(jnp.float16)), "over pages of float16"),
    ]:
        with pytest.raises(NotImplementedError, match=why):
            mla_decode(*wrong, table, lengths, 1, implementation="tpu", **how)
    with pytest.raises(ValueError, match="rows are 128 wide, expected at least 192"):
        mla_decode(q, q_rope, pages[..., :128], table, lengths, 1, **how)

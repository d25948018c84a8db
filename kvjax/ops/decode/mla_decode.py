"""Attention of all query heads over pages of latents: absorbed decoding of multi-head latent attention."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.ops.base.dispatch import form
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.softmax import softmax
from kvjax.ops.decode.append import append
from kvjax.ops.decode.paged_append import places
from kvjax.pallas_kernels.block_sizes import cores_for, tuned
from kvjax.pallas_kernels.mla_decode import kernel_tpu as tpu
from kvjax.pallas_kernels.streaming import LANES, SUBLANES


def mla_decode(
    q: Float[Array, "B N R"],
    q_rope: Float[Array, "B N Q"],
    pages: Float[Array, "L P page W"],
    table: Int[Array, "B M"],
    lengths: Int[Array, " B"],
    layer: int | Int[Array, ""] = 0,
    *,
    scale: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N R"], Float[Array, "B N"]]:
    """softmax(scale (q' c_s + q_rope' k_s)) c over the first `lengths` latents c and rotated keys k.

    Returns (out, lse). DeepSeek-V2 (DeepSeek-AI, 2024, arXiv:2405.04434, section 2.1 and appendix C) with its
    maps absorbed: q is the query times W_UK, and the caller multiplies out by W_UV. All heads share the
    slots. A row of a page is the latent [R] followed by the rotated key [Q]; for the kernel W is R + Q
    rounded up to a multiple of 128, and R is a multiple of 128: 640 for 512 + 64. The padding must be finite.
    lse is -inf, and out 0, if nothing is visible. Softmax in promote(float32, q).

    implementation: "reference", "tpu" or "tpu interpret"; None takes the kernel if it  can run. Raises
    NotImplementedError if a forced one cannot, ValueError if shapes do not fit.

    >>> pages, table = jnp.ones((1, 2, 4, 8)), jnp.asarray([[1, 0]])
    >>> q, q_rope = jnp.zeros((1, 3, 4)), jnp.zeros((1, 3, 2))
    >>> out, lse = mla_decode(q, q_rope, pages, table, jnp.asarray([6]), scale=1.0)
    >>> out[0, 0].tolist(), round(float(jnp.exp(lse[0, 0])))
    ([1.0, 1.0, 1.0, 1.0], 6)
    """
    used = q.shape[-1] + q_rope.shape[-1]
    if used > pages.shape[-1]:
        raise ValueError(
            f"rows are {pages.shape[-1]} wide, expected at least {used}: the latent's {q.shape[-1]} and the "
            f"rotated key's {q_rope.shape[-1]} channels"
        )
    at, lengths = jnp.asarray(layer, jnp.int32), lengths.astype(jnp.int32)
    chosen = form("mla_decode", implementation, q, pages, tpu=refusal(q, pages))
    if chosen == "reference":
        return _reference(q, q_rope, pages, table, lengths, at, scale=scale)
    return tpu_mla_decode(q, q_rope, pages, table, lengths, at, scale=scale, interpret=chosen != "tpu")


def refusal(q: Array, pages: Array) -> str:
    """Why the TPU kernel cannot take these operands; empty if it can."""
    page, width = pages.shape[2:]
    if width % LANES or q.shape[-1] % LANES:
        return f"rows of {width} with latents of {q.shape[-1]}, expected multiples of {LANES}"
    if page % SUBLANES:
        return f"pages of {page} tokens, expected a multiple of {SUBLANES}"
    if not {q.dtype, pages.dtype} <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}:
        return f"queries of {q.dtype} over pages of {pages.dtype}, expected float32 or bfloat16"
    return ""


def _reference(
    q: Array, q_rope: Array, pages: Array, table: Array, lengths: Array, layer: Array, *, scale: float
) -> tuple[Array, Array]:
    dtype, r = wide(q), q.shape[-1]
    used = jnp.minimum(jnp.maximum(table, 0), pages.shape[1] - 1)
    rows = pages[layer][used].reshape(table.shape[0], -1, pages.shape[-1]).astype(dtype)
    live = jnp.arange(rows.shape[1])[None] < lengths[:, None]
    rows = jnp.where(live[..., None], rows, jnp.zeros((), dtype))
    asked = jnp.concatenate([q, q_rope], -1).astype(dtype)
    z = jnp.einsum("bnw,bsw->bns", asked, rows[..., : asked.shape[-1]]) * scale
    p, lse = softmax(z, live[:, None])
    return jnp.einsum("bns,bsr->bnr", p, rows[..., :r]).astype(q.dtype), lse


def tpu_mla_decode(
    q: Array, q_rope: Array, pages: Array, table: Array, lengths: Array, layer: Array, *,
    scale: float, step: int | None = None, cores: int | None = None, interpret: Any = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Run the kernel on the operands of `mla_decode`. step: pages per step."""
    (b, n, r), width = q.shape, pages.shape[-1]
    step = min(step or pages_per_step(pages), table.shape[1])
    asked = jnp.concatenate([q, q_rope], -1)
    asked = jnp.pad(asked, ((0, 0), (0, -n % SUBLANES), (0, width - asked.shape[-1])))
    tables = jnp.pad(table[:, None].astype(jnp.int32), ((0, 0), (0, 0), (0, -table.shape[1] % step)))
    cores = cores or cores_for(b)
    sizes = tpu.Sizes(step, b // cores, r, scale)
    out, lse = tpu.mla_decode(
        asked, pages, tables, lengths, layer[None], sizes=sizes, cores=cores, interpret=interpret
    )
    return out[:, :n], lse[:, :n, 0]


def pages_per_step(
    pages: Array | jax.ShapeDtypeStruct, step_bytes: int = 5 * 2**19, generation: str | None = None
) -> int:
    """Return the tuned count, or pages of about `step_bytes`: smaller steps cost more with many heads."""
    slots = tuned("mla_decode", pages.dtype.name, pages.shape[-1], generation)
    row = math.prod(pages.shape[3:]) * jnp.dtype(pages.dtype).itemsize
    return max(1, (slots or step_bytes // row) // pages.shape[2])


def latent_append(
    pages: Float[Array, "L P page W"],
    table: Int[Array, "B M"],
    lengths: Int[Array, " B"],
    latent: Float[Array, "B R"],
    k_rope: Float[Array, "B Q"],
    layer: int | Int[Array, ""] = 0,
    *,
    active: Bool[Array, " B"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "L P page W"]:
    """Append one latent and rotated key to the pages for every active sequence, at slot `lengths`.

    As `kvjax.ops.decode.paged_append.paged_append`, under the same conditions.

    >>> pages, table = jnp.zeros((1, 2, 4, 8)), jnp.asarray([[1, 0]])
    >>> pages = latent_append(pages, table, jnp.asarray([5]), jnp.ones((1, 4)), 2 * jnp.ones((1, 2)))
    >>> pages[0, 0, 1].tolist()
    [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 0.0, 0.0]
    """
    page, width = pages.shape[2:]
    block, slot = places((pages.shape[1], pages.shape[-2]), table, lengths, layer, active)
    row = jnp.concatenate([latent.astype(pages.dtype), k_rope.astype(pages.dtype)], -1)
    row = jnp.pad(row, ((0, 0), (0, width - row.shape[-1])))[:, None]
    done = append([pages.reshape(-1, 1, page, width)], [row], block, slot, implementation=implementation)
    return done[0].reshape(pages.shape)

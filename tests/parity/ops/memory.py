"""OPS of memories and regressions: from the name of an oracle file to a function of its input arrays.

Constants of the files: blocks of 16 tokens, chunks of 32, a ridge of 0.5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.ops.attention import local_linear
from kvjax.ops.recurrent import gau, mesa, transformer_vq

Arrays = Mapping[str, Any]
BLOCK, CHUNK, RIDGE = 16, 32, 0.5


def _transformer_vq(x: Arrays, **how: Any) -> Arrays:
    """Return shortcodes [B, H, T] and counts as floats; the file sums up all blocks before the last one."""
    out, state = transformer_vq.transformer_vq(x["q"], x["k"], x["v"], x["codebook"], block=BLOCK, **how)
    codes, _ = transformer_vq.quantise(x["k"], x["codebook"])
    open_block = jnp.broadcast_to((state.length > BLOCK)[:, None], (len(state.length), BLOCK))
    counts, means = transformer_vq.fold(
        state.counts, state.means, state.codes[:, :BLOCK], state.values[:, :BLOCK], open_block
    )
    codes, counts = (x.astype(out.dtype) for x in (jnp.swapaxes(codes, 1, 2), counts))
    return {"o": out, "shortcodes": codes, "final_counts": counts, "final_means": means}


def _mixed_chunk(x: Arrays, **how: Any) -> Arrays:
    """Add the last chunk to the sum even where it is open, as the file does."""
    names = ("quad_q", "quad_k", "lin_q", "lin_k", "v")
    out, state = gau.mixed_chunk_attention(*(x[n] for n in names), chunk=CHUNK, **how)
    rest = jnp.einsum("bck,bcv->bkv", state.lin_k, state.v) / jnp.asarray(CHUNK, out.dtype)
    return {"o": out, "final_state": state.total + rest}


def _by_query(op: Callable[..., Any], queries: list[Any], k: Any, v: Any, recurrent: bool) -> Arrays:
    """All queries at once, or each one alone over a cache of all keys."""
    if not recurrent:
        return {"o": op(*queries, k, v)}

    def one(t: Any) -> Any:
        q_pos = jnp.broadcast_to(t, (k.shape[0], 1)).astype(jnp.int32)
        return op(*(jax.lax.dynamic_slice_in_dim(x, t, 1, 1) for x in queries), k, v, q_pos=q_pos)[:, 0]

    return {"o": jnp.moveaxis(jax.lax.map(one, jnp.arange(k.shape[1])), 0, 1)}


def _local_linear(x: Arrays, recurrent: bool = False, **how: Any) -> Arrays:
    def op(*arrays: Any, **where: Any) -> Any:
        return local_linear.local_linear_attention(*arrays, ridge=RIDGE, **where, **how)

    return _by_query(op, [x["q"]], x["k"], x["v"], recurrent)


def _parallax(x: Arrays, recurrent: bool = False, **how: Any) -> Arrays:
    def op(*arrays: Any, **where: Any) -> Any:
        return local_linear.parallax(*arrays, **where, **how)

    return _by_query(op, [x["q"], x["r"]], x["k"], x["v"], recurrent)


def _mesa(x: Arrays, **how: Any) -> Arrays:
    out, state = mesa.mesa(*(x[n] for n in ("q", "k", "v", "g", "beta", "lamb")), **how)
    return {"o": out, "final_kk": state.kk, "final_kv": state.kv}


OPS: dict[str, Callable[..., Arrays]] = {
    "transformer_vq": _transformer_vq,
    "gau_mixed_chunk": _mixed_chunk,
    "local_linear_attn": _local_linear,
    "parallax": _parallax,
    "mesa_net": _mesa,
}

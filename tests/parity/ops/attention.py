"""From oracle files to the attentions that keep every token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.ops.attention.deltaformer import deltaformer
from kvjax.ops.attention.dmc import dmc
from kvjax.ops.attention.forgetting import forgetting_attention
from kvjax.ops.attention.latent import mla
from kvjax.ops.attention.path_attention import path_attention
from kvjax.ops.attention.sinks import sink_attention
from kvjax.ops.attention.tensor_product import tpa
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.rope import Rope

Arrays = Mapping[str, Any]
WINDOW = 17  # of attn_gqa_sink_window
EPS = 1e-6  # of the norm of mla's latent


def _call(op: Callable[..., Any], *names: str, **kept: str) -> Callable[..., Arrays]:
    """The op on the named inputs; `kept` names the arrays of its state that are outputs, and the outputs."""

    def run(x: Arrays, **how: Any) -> Arrays:
        out, state = op(*(x[name] for name in names), **how)
        return {"o": out} | {file: state.kept[name] for name, file in kept.items()}

    return run


def _dmc(x: Arrays, **how: Any) -> Arrays:
    out, slots, _ = dmc(x["q"], x["k"], x["v"], x["merge"] > 0.5, x["weight"], **how)
    return {"o": out, "slots": slots.astype(out.dtype)}


def _sink(x: Arrays, **how: Any) -> Arrays:
    return {"o": sink_attention(x["q"], x["k"], x["v"], x["sink"], window=WINDOW, **how)[0]}


def _mla(x: Arrays, **how: Any) -> Arrays:
    """The projections and the norm of the latent are the layer's."""
    dtype = wide(x["x"])
    x = {name: a.astype(dtype) for name, a in x.items()}
    q = jnp.einsum("btd,dhk->bthk", x["x"], x["Wq"])
    plain, turning = jnp.split(q, [x["Wuk"].shape[-1]], -1)
    latent = x["x"] @ x["Wkv"]
    latent = latent * jax.lax.rsqrt((latent**2).mean(-1, keepdims=True) + EPS) * x["kv_norm"][None, None]
    k_rope = x["x"] @ x["Wkr"]
    out, state = mla(plain, turning, latent, k_rope, x["Wuk"], x["Wuv"], rope=Rope(), **how)
    return {"o": out, "cache_latent": state.kept["latent"], "cache_rope": state.kept["rope"]}


def _tpa(x: Arrays, **how: Any) -> Arrays:
    names = ("a_q", "b_q", "a_k", "b_k", "a_v", "b_v")
    out, state = tpa(*(x[name] for name in names), rope=Rope(), **how)
    return {"o": out, "b_k_rotated": state.kept["b_k"]}


OPS: dict[str, Callable[..., Arrays]] = {
    "forgetting_attn": _call(forgetting_attention, "q", "k", "v", "g"),
    "path_attn": _call(path_attention, "q", "k", "v", "w", "beta", "g", k="final_keys"),
    "deltaformer": _call(deltaformer, "q", "k", "v", "beta", u="u"),
    "dmc": _dmc,
    "attn_gqa_sink_window": _sink,
    "mla": _mla,
    "tpa": _tpa,
}

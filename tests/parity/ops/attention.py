"""From oracle files to the attentions that keep every token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvjax.ops.attention.deltaformer import deltaformer
from kvjax.ops.attention.dmc import dmc
from kvjax.ops.attention.forgetting import forgetting_attention
from kvjax.ops.attention.path_attention import path_attention
from kvjax.ops.attention.sinks import sink_attention

Arrays = Mapping[str, Any]
WINDOW = 17  # of attn_gqa_sink_window


def _call(op: Callable[..., Any], *names: str, **kept: str) -> Callable[..., Arrays]:
    """Run the op on named inputs; `kept` names the arrays of its state that are outputs, and the outputs."""

    def run(x: Arrays, **how: Any) -> Arrays:
        out, state = op(*(x[name] for name in names), **how)
        return {"o": out} | {file: state.kept[name] for name, file in kept.items()}

    return run


def _dmc(x: Arrays, **how: Any) -> Arrays:
    out, slots, _ = dmc(x["q"], x["k"], x["v"], x["merge"] > 0.5, x["weight"], **how)
    return {"o": out, "slots": slots.astype(out.dtype)}


def _sink(x: Arrays, **how: Any) -> Arrays:
    return {"o": sink_attention(x["q"], x["k"], x["v"], x["sink"], window=WINDOW, **how)[0]}


OPS: dict[str, Callable[..., Arrays]] = {
    "forgetting_attn": _call(forgetting_attention, "q", "k", "v", "g"),
    "path_attn": _call(path_attention, "q", "k", "v", "w", "beta", "g", k="final_keys"),
    "deltaformer": _call(deltaformer, "q", "k", "v", "beta", u="u"),
    "dmc": _dmc,
    "attn_gqa_sink_window": _sink,
}

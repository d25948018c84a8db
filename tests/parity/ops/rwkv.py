"""From oracle files to the RWKVs, HGRN and Gated DeltaProduct."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvjax.ops.recurrent.delta_product import gated_delta_product
from kvjax.ops.recurrent.hgrn import hgrn
from kvjax.ops.recurrent.rwkv import rwkv6, rwkv7

Arrays = Mapping[str, Any]


def _call(op: Callable[..., Any], *names: str) -> Callable[..., Arrays]:
    """Run the op on the named inputs, from the file's initial state."""

    def run(x: Arrays, **how: Any) -> Arrays:
        out, state = op(*(x[name] for name in names), initial_state=x["initial_state"], **how)
        return {"o": out, "final_state": state}

    return run


OPS: dict[str, Callable[..., Arrays]] = {
    "rwkv6": _call(rwkv6, "r", "k", "v", "w_pre", "u"),
    "rwkv7": _call(rwkv7, "r", "k", "v", "w_pre", "kk", "a"),
    "hgrn": _call(hgrn, "x", "g"),
    "gated_delta_product": _call(gated_delta_product, "q", "k", "v", "g", "beta"),
}

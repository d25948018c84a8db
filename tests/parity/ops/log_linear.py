"""Log-linear attention on the arrays of oracle files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from kvjax.ops.recurrent import log_linear as ops

Arrays = Mapping[str, Any]


def _attention(x: Arrays, **how: Any) -> Arrays:
    """Return also the file's table of levels, -1 above the diagonal."""
    o, state = ops.log_linear_attention(*(x[n] for n in ("q", "k", "v", "g", "level_scales")), **how)
    t = jnp.arange(o.shape[1], dtype=jnp.int32)
    table = jnp.where(t[:, None] < t[None], -1, ops.level(t[:, None], t[None]))
    return {"o": o, "final_levels": state.levels, "level_table": table.astype(o.dtype)}


def _gated_delta(x: Arrays, **how: Any) -> Arrays:
    o, state = ops.log_linear_gated_delta(
        *(x[n] for n in ("q", "k", "v", "g", "beta", "level_scales")), **how
    )
    return {"o": o, "final_levels": state.levels}


OPS: dict[str, Callable[..., Arrays]] = {
    "log_linear_attn": _attention,
    "log_linear_gated_delta": _gated_delta,
}

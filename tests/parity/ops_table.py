"""OPS: from the name of an oracle file to a function of its input arrays that returns its outputs by name.

The functions take any seed, shape and float dtype; keywords are those of
`kvjax.ops.recurrent.linear_attention.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from kvjax.ops.recurrent import linear_attention as ops
from tests.parity.ops import attention, layers, log_linear, memory, rwkv, slots

Arrays = Mapping[str, Any]


def _call(op: Callable[..., Any], *names: str) -> Callable[..., Arrays]:
    """Run the op on the named inputs, from the file's initial state."""

    def run(x: Arrays, **how: Any) -> Arrays:
        out, state = op(*(x[name] for name in names), initial_state=x["initial_state"], **how)
        return {"o": out, "final_state": state}

    return run


def _normalised(x: Arrays, **how: Any) -> Arrays:
    """Read the normaliser z, [B, 1, H, K] in the file, as the last value channel of our state."""
    z = jnp.swapaxes(x["initial_z"], 1, 2)[:, :, 0, :, None]
    state = jnp.concatenate([x["initial_S"], z], -1)
    out, state = ops.normalised_linear_attention(x["q_pre"], x["k_pre"], x["v"], initial_state=state, **how)
    return {"o": out, "final_S": state[..., :-1], "final_z": state[..., -1][:, None]}


def _gate(x: Arrays, **how: Any) -> Arrays:
    plain = ops.kda_gate(x["x"], x["A_log"], x["dt_bias"])
    return {"g": plain, "g_lower_bound": ops.kda_gate(x["x"], x["A_log"], x["dt_bias"], lower_bound=-5.0)}


def _retention(x: Arrays, **how: Any) -> Arrays:
    """Return also the output from a zero state, as the file does."""
    zero, _ = ops.retention(x["q"], x["k"], x["v"], **how)
    return _call(ops.retention, "q", "k", "v")(x, **how) | {"o_zero_state": zero}


def _hgrn2(x: Arrays, **how: Any) -> Arrays:
    found = _call(ops.hgrn2, "q_pre", "f_pre", "v", "lower_bound")(x, **how)
    return found | {"g": ops.hgrn2_gate(x["f_pre"], x["lower_bound"])}


_delta = _call(ops.gated_delta_rule, "q", "k", "v", "g", "beta")
_gla = _call(ops.gla, "q", "k", "v", "g")

OPS: dict[str, Callable[..., Arrays]] = {
    "linear_attn": _call(ops.linear_attention, "q", "k", "v"),
    "linear_attn_elu_norm": _normalised,
    "retention": _retention,
    "simple_gla": _gla,
    "gla": _gla,
    "gla_strong_decay": _gla,
    "hgrn2": _hgrn2,
    "mamba2_ssd": _call(ops.ssd, "x", "dt_raw", "B", "C", "A_log", "D", "dt_bias"),
    "delta_rule": _call(ops.delta_rule, "q", "k", "v", "beta"),
    "gated_delta_rule": _delta,
    "gated_delta_rule_neg_eig": _delta,
    "kda": _delta,
    "kda_gva": _delta,
    "kda_strong_decay": _delta,
    "kda_gate": _gate,
    "gdn2": _call(ops.gdn2, "q", "k", "v", "g", "b", "w"),
    "comba": _call(ops.comba, "q", "k", "v", "p", "g", "beta"),
    **rwkv.OPS,
    **log_linear.OPS,
    **slots.OPS,
    **memory.OPS,
    **attention.OPS,
    **layers.OPS,
}

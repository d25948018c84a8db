"""OPS of slots, feature maps, Infini-attention and Lattice, by the names of their oracle files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvjax.ops.recurrent.features import based_attention
from kvjax.ops.recurrent.infini import infini_attention
from kvjax.ops.recurrent.lattice import lattice
from kvjax.ops.recurrent.slot_attention import GSAState, abc, gsa

Arrays = Mapping[str, Any]
INFINI_SEGMENT = 32  # the file's constant


def _gsa(x: Arrays, **how: Any) -> Arrays:
    inputs = (x[n] for n in ("q", "k", "v", "s", "g"))
    out, state = gsa(*inputs, initial_state=GSAState(x["initial_k"], x["initial_v"]), **how)
    return {"o": out, "final_k": state.k, "final_v": state.v}


def _abc(x: Arrays, **how: Any) -> Arrays:
    out, state = abc(*(x[n] for n in ("q", "k", "v", "s")), **how)
    return {"o": out, "final_k": state.k, "final_v": state.v}


def _based(x: Arrays, **how: Any) -> Arrays:
    return {"o": based_attention(x["q"], x["k"], x["v"], **how)[0]}


def _infini(x: Arrays, **how: Any) -> Arrays:
    """Include the last segment in the final memory, as the file does, whether it is full or not."""
    found = {}
    for name, delta in (("linear", False), ("delta", True)):
        inputs = (x[n] for n in ("q", "k", "v", "beta"))
        out, state = infini_attention(*inputs, segment_tokens=INFINI_SEGMENT, delta=delta, **how)
        memory = state.memory + state.opened
        found |= {f"o_{name}": out, f"final_M_{name}": memory[..., :-1], "final_z": memory[..., -1]}
    return found


def _lattice(x: Arrays, recurrent: bool = True, **how: Any) -> Arrays:
    """Lattice has one form, whichever is asked for."""
    inputs = (x[n] for n in ("q", "k", "v", "step"))
    out, state = lattice(*inputs, initial_state=x["initial_state"], **how)
    return {"o": out, "final_state": state}


OPS: dict[str, Callable[..., Arrays]] = {
    "gsa": _gsa,
    "abc": _abc,
    "based": _based,
    "infini_attention": _infini,
    "lattice_decoding": _lattice,
}

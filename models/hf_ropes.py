"""A rotation as settings of config.json."""

from __future__ import annotations

from typing import Any

from kvjax.ops.base.long_rope import LongRope
from kvjax.ops.base.rope import Rope


def scaling_fields(rope: Rope) -> dict[str, Any]:
    """Return the rope_scaling of a rotation."""
    out: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind != "default":
        out["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        out["original_max_position_embeddings"] = rope.original_max
    if isinstance(rope, LongRope):
        out |= {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
        out |= {"original_max_position_embeddings": rope.original_max}
        out |= {} if rope.attention_factor is None else {"attention_factor": rope.attention_factor}
    if rope.kind == "llama3":
        out |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        out |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        optional = {n: getattr(rope, n) for n in ("attention_factor", "mscale", "mscale_all_dim")}
        out |= {n: v for n, v in optional.items() if v}
    return out

"""Slots per step of the kernels that stream a cache, by TPU generation: `block_sizes.json`.

`kvjax aot --tune` writes the table from the compiler's figures. For missing entries the calling operation has
a rule.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import jax

TABLE = Path(__file__).with_name("block_sizes.json")
# Device names of jax, at run time and in a mesh for ahead-of-time compilation.
GENERATIONS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}


def tuned(operation: str, payload: str, width: int, generation: str | None = None) -> int | None:
    """Slots per step of `operation` over rows of `width` channels in `payload`; None if not in the table.

    generation: that of the target device, unless given.

    >>> tuned("stacked_decode", "bfloat16", 7, "v5e") is None
    True
    """
    return tuned_sizes().get((operation, generation or here(), payload, width))


@cache
def tuned_sizes() -> dict[tuple[str, str, str, int], int]:
    """Slots by (operation, generation, payload, width)."""
    rows = json.loads(TABLE.read_text())["rows"]
    return {(r["operation"], r["generation"], r["payload"], r["width"]): r["slots"] for r in rows}


def cores_for(lists: int) -> int:
    """Over how many TensorCores a kernel splits `lists` KV heads: two on a v5p, if they divide."""
    return 2 if here() == "v5p" and lists % 2 == 0 else 1


def here() -> str:
    """Return the generation of the mesh's devices, or the first device's; "" for no TPU of the table."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = device.device_kind if device else jax.devices()[0].device_kind
    return GENERATIONS.get(kind, "")

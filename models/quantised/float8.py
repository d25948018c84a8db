"""FP8 weights of DeepSeek, Qwen and Mistral: `weight` in float8 and its scale, per block, row or tensor.

A weight is its float8 times its scale, even if the scale is called `weight_scale_inv`. Layouts:
transformers' integrations/finegrained_fp8.py and fbgemm_fp8.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.models.quantised.matrices import AffineMatrix, Matrix, Plain
from kvjax.models.quantised.module import Module

FLOAT_8 = ("F8_E4M3", "F8_E5M2")
_SCALES = ("weight_scale_inv", "weight_scale")
PARTS = ("weight", *_SCALES)


def float8(module: Module, settings: Mapping[str, Any]) -> Matrix | None:
    """Decode the weight of a module; None if it is not quantised. InputError for inconsistent parts."""
    weight = module.parts.get("weight")
    if weight is None or (weight.dtype not in FLOAT_8 and not any(name in module.parts for name in _SCALES)):
        return None
    shape, size = module.matrix(weight, *FLOAT_8), settings.get("weight_block_size")
    return AffineMatrix(
        Plain(weight), module.spread(module.need(*_SCALES), shape, tuple(size) if size else None)
    )

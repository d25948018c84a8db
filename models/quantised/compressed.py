"""compressed-tensors: integers (packed or not), float8, and 4-bit floats, per tensor, row, group or block.

A weight is (q - zero) * scale. Integers of `weight_packed` are stored with 2 ** (bits - 1) added; so are zero
points if they are packed, along the rows. Layouts: compressed_tensors' compressors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvjax.base.errors import InputError
from kvjax.models.files import Stored
from kvjax.models.quantised.float8 import FLOAT_8
from kvjax.models.quantised.matrices import (
    AffineMatrix,
    Exponents,
    Float4,
    Matrix,
    Plain,
    Transposed,
    UnpackedMatrix,
)
from kvjax.models.quantised.module import Module

PARTS = (
    "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
    "weight_global_scale",
)  # fmt: skip
_INTEGERS = ("I8", "I32", "I64")


def compressed(module: Module, settings: Mapping[str, Any]) -> Matrix | None:
    """Read the weight of a module; None if it is not quantised. Raises InputError for inconsistent parts."""
    packed, weight = module.parts.get("weight_packed"), module.parts.get("weight")
    if packed is not None and packed.dtype == "U8":
        return _four_bit_floats(module, packed)
    if packed is not None:
        return _packed(module, packed, _weights(module, settings))
    plain = ("I8", *FLOAT_8)
    if weight is None or (weight.dtype not in plain and "weight_scale" not in module.parts):
        return None
    shape, args = module.matrix(weight, *plain), _weights(module, settings)
    scale, zero = module.need("weight_scale"), module.parts.get("weight_zero_point")
    block, order = _block(module, args), _order(module, shape[1])
    return AffineMatrix(
        Plain(weight),
        module.spread(scale, shape, block, groups=order),
        None if zero is None else module.spread(zero, shape, block, groups=order),
    )


def _packed(module: Module, words: Stored, args: Mapping[str, Any]) -> AffineMatrix:
    bits = args.get("num_bits", 4)
    if type(bits) is not int or not 1 <= bits <= 8:
        raise InputError(f"{module.name} has integers of {bits!r} bits, expected 1 to 8")
    n, held = module.matrix(words, "I32")
    k = held * 32 // bits
    if (given := module.parts.get("weight_shape")) is not None:
        n, k = (int(x) for x in module.check(given, ((2,),), "I64", "I32").read())
    module.check(words, ((n, -(-k * bits // 32)),))
    scale, zero = module.need("weight_scale"), module.parts.get("weight_zero_point")
    shape, half = (n, k), 2 ** (bits - 1)
    block, order = _block(module, args), _order(module, k)
    codes, scales = UnpackedMatrix(Plain(words), bits, k), module.spread(scale, shape, block, groups=order)
    if zero is None:
        return AffineMatrix(codes, scales, offset=half)
    if zero.dtype != "I32":
        return AffineMatrix(codes, scales, module.spread(zero, shape, block, groups=order), half)
    groups = scales.numbers.shape[1]
    module.check(zero, ((-(-n * bits // 32), groups),))
    numbers = Transposed(UnpackedMatrix(Transposed(Plain(zero)), bits, n))
    return AffineMatrix(codes, scales, scales._replace(numbers=numbers))


def _four_bit_floats(module: Module, packed: Stored) -> AffineMatrix:
    """Read a weight of 4-bit floats: NVFP4 if its tensor has a global scale, else MXFP4.

    NVFP4: float8 scales of 16 columns, divided by the tensor's scale. MXFP4: powers of two for 32 columns.
    """
    n, half = module.matrix(packed, "U8")
    shape, scale, whole = (n, 2 * half), module.need("weight_scale"), module.parts.get("weight_global_scale")
    codes = Float4(UnpackedMatrix(Plain(packed), 4, 2 * half, width=8))
    if whole is None:
        module.matrix(scale, "U8")
        return AffineMatrix(codes, module.spread(scale, shape, (1, 32), Exponents(Plain(scale))))
    module.matrix(scale, "F8_E4M3")
    module.check(whole, ((), (1,)))
    return AffineMatrix(codes, module.spread(scale, shape, (1, 16)), divisor=whole)


def _block(module: Module, args: Mapping[str, Any]) -> tuple[int, int] | None:
    """Read the block [rows, columns] that shares a scale, if it is neither the tensor nor a row."""
    if args.get("strategy") == "block":
        sizes = [int(n) for n in re.findall(r"\d+", str(args.get("block_structure")))]
        if len(sizes) != 2 or min(sizes) < 1:
            raise InputError(
                f"config.json gives block_structure = {args.get('block_structure')!r:.40} for {module.name}, "
                "expected two whole numbers above 0: correct it"
            )
        return sizes[0], sizes[1]
    size = args.get("group_size")
    return (1, size) if isinstance(size, int) and size > 0 else None


def _order(module: Module, columns: int) -> Stored | None:
    order = module.parts.get("weight_g_idx")
    return None if order is None else module.check(order, ((columns,),), *_INTEGERS)


def _weights(module: Module, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find a module's weight quantisation settings: of the config group that names it, or its class."""
    groups = [g for g in (settings.get("config_groups") or {}).values() if isinstance(g, Mapping)]
    for fits in (_by_name, _by_pattern, _by_class):
        for group in groups:
            if any(fits(str(target), module.name) for target in group.get("targets") or ()):
                return _mapping(group.get("weights"))
    if len(groups) == 1:
        return _mapping(groups[0].get("weights"))
    raise InputError(
        f"{module.name} is quantised, and none of the {len(groups)} config_groups of quantization_config in "
        "config.json names it: fetch config.json again"
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _by_name(target: str, name: str) -> bool:
    return target == name


def _by_pattern(target: str, name: str) -> bool:
    return target.startswith("re:") and re.match(target[3:], name) is not None


def _by_class(target: str, name: str) -> bool:
    return target == ("Embedding" if name.endswith("embed_tokens") else "Linear")

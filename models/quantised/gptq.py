"""GPTQ and AWQ weights: integers in 32-bit words, with scales and zero points per group of inputs.

Both hold the transpose of a weight [out, in], and both give (q - zero) * scale. Layouts: gptqmodel's and
AutoGPTQ's QuantLinear, AutoAWQ's WQLinear_GEMM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvjax.base.errors import InputError
from kvjax.models.files import Stored
from kvjax.models.quantised.matrices import (
    AffineMatrix,
    BlockNumbers,
    Matrix,
    Plain,
    Transposed,
    UnpackedMatrix,
)
from kvjax.models.quantised.module import Module
from kvjax.models.quantised.settings import GPTQ_BITS, gptq_format

PARTS = ("qweight", "qzeros", "scales", "g_idx")
_FLOATS = ("F16", "BF16", "F32")
# AWQ: which of every 8 columns is at each place of a word.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(module: Module, settings: Mapping[str, Any]) -> Matrix | None:
    """Decode the AWQ weight of a module, packed along its outputs; None if it is not quantised.

    Raises InputError if its parts are inconsistent.
    """
    words = module.parts.get("qweight")
    if words is None:
        return None
    _, packed = module.matrix(words, "I32")
    scales = module.need("scales")
    groups, _ = module.matrix(scales, *_FLOATS)
    zeros = module.check(module.need("qzeros"), ((groups, packed),), "I32")
    codes, held = (UnpackedMatrix(Plain(x), 4, 8 * packed, order=_AWQ_ORDER) for x in (words, zeros))
    return _grouped(
        module, Transposed(codes), scales, held, settings.get("group_size", settings.get("q_group_size"))
    )


def gptq(module: Module, settings: Mapping[str, Any]) -> Matrix | None:
    """Decode the GPTQ weight of a module, packed along its inputs; None if it is not quantised.

    Per-module widths in the settings (`dynamic`) are not read: the tensors show the width.
    Raises InputError if its parts are inconsistent.
    """
    words = module.parts.get("qweight")
    if words is None:
        return None
    packed, n = module.matrix(words, "I32")
    scales, zeros, order = module.need("scales"), module.need("qzeros"), module.parts.get("g_idx")
    groups, _ = module.matrix(scales, *_FLOATS)
    bits = _bits(words, module.check(zeros, (zeros.shape,), "I32"), groups, settings)
    k = packed * 32 // bits
    if order is not None:
        module.check(order, ((k,),), "I32", "I64")
    held = _zeros(UnpackedMatrix(Plain(zeros), bits, n), zeros, settings)
    codes = UnpackedMatrix(Transposed(Plain(words)), bits, k)
    return _grouped(module, codes, scales, held, settings.get("group_size"), order)


def _bits(words: Stored, zeros: Stored, groups: int, settings: Mapping[str, Any]) -> int:
    """Find the bit width that fits words [in bits / 32, out] and zero points [groups, out bits / 32]."""
    given, (packed, n) = settings.get("bits"), words.shape
    widths = (given,) if given and not settings.get("dynamic") else (*([given] if given else ()), *GPTQ_BITS)
    for bits in widths:
        if zeros.shape == (groups, -(-n * bits // 32)) and packed % (bits if 32 % bits else 1) == 0:
            return bits
    raise InputError(
        f"{words.name} has the shape {list(words.shape)} and {zeros.name} {list(zeros.shape)}, expected "
        f"those of {' or '.join(map(str, dict.fromkeys(widths)))}-bit integers in {groups} groups: fetch "
        "the checkpoint again, or correct the quantization_config in config.json"
    )


def _grouped(
    module: Module, codes: Matrix, scales: Stored, zeros: Matrix, size: Any, order: Stored | None = None
) -> AffineMatrix:
    """Codes [out, in] with scales and zeros [groups, out].

    A group has `size` consecutive inputs, or those that `order` names.
    """
    (n, k), groups = codes.shape, scales.shape[0]
    module.check(scales, ((groups, n),))
    if not isinstance(size, int) or order is not None:
        size = -(-k // max(groups, 1))
    size = size if size > 0 else k
    if groups != -(-k // size):
        raise InputError(
            f"{scales.name} has scales for {groups} groups of inputs, expected {-(-k // size)} of {size}: "
            "fetch the checkpoint again, or correct group_size in the quantization_config of config.json"
        )
    spread = BlockNumbers(Transposed(Plain(scales)), (n, k), (1, size), order)
    return AffineMatrix(codes, spread, spread._replace(numbers=Transposed(zeros)))


# --- zero points of GPTQ -----------------------------------------------------------------------------


class Next(NamedTuple):
    """Numbers of `bits` bits plus one, modulo 2 ** bits."""

    numbers: Matrix
    bits: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        return (self.numbers[index] + np.uint32(1)) & np.uint32(2**self.bits - 1)


def _zeros(held: UnpackedMatrix, stored: Stored, settings: Mapping[str, Any]) -> Matrix:
    """Decode the zero points, which are stored unchanged (format v2), or minus one in one of two ways (v1).

    For symmetric weights all are 2 ** (bits - 1), which shows how they are stored: some published v2 files
    are labelled v1. Raises InputError if no way gives that number.
    """
    bits = held.bits
    readings: dict[str, Matrix] = {
        "gptq": Next(held, bits) if bits == 3 else held._replace(change=partial(_more, _ones(bits))),
        "gptq_v2": held,
    }
    if bits == 3:
        readings["gptqmodel"] = held._replace(change=partial(_more, _ones(3)[::-1]))
    named = gptq_format(settings)
    first = "gptqmodel" if bits == 3 and named == "gptq" and _by_old_gptqmodel(settings) else named
    if settings.get("sym") is not True:
        return readings[first]
    for name in dict.fromkeys((first, *readings)):
        if (readings[name][:1, :] == 2 ** (bits - 1)).all():
            return readings[name]
    raise InputError(
        f"quantization_config in config.json gives sym = true, and {stored.name} holds zero points other "
        f"than {2 ** (bits - 1)}: correct sym, or fetch the checkpoint again"
    )


def _ones(bits: int) -> np.ndarray:
    """Words with a one in every number of `bits` bits, up to where the pattern repeats."""
    out = [0] * (bits if 32 % bits else 1)
    for bit in range(0, 32 * len(out), bits):
        out[bit // 32] |= 1 << bit % 32
    return np.array(out, np.uint32)


def _more(ones: np.ndarray, words: np.ndarray, first: int) -> np.ndarray:
    """Words [rows, words] whose columns start at `first`, plus `ones`.

    gptqmodel subtracts these words when it saves, with borrows from number to number, and adds them when it
    loads. Up to version 6 its three words for 3 bits stood in the reverse order.
    """
    return words + ones[(first + np.arange(words.shape[1])) % len(ones)]


def _by_old_gptqmodel(settings: Mapping[str, Any]) -> bool:
    meta = settings.get("meta")
    by = str(meta.get("quantizer", "")) if isinstance(meta, Mapping) else ""
    version = re.search(r"gptqmodel:(\d+)", by)
    return version is not None and int(version[1]) < 7

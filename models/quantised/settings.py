"""The `quantization_config` of a config.json: how the weights were quantised, and whether that is supported.

Which tensors are quantised follows from the tensors beside them, so lists of unquantised modules (`ignore`,
`modules_to_not_convert`) are not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.base.errors import InputError
from kvjax.models.files import read_json

GPTQ_BITS = (2, 3, 4, 8)
# The supported formats of compressed-tensors; marlin-24 and the sparse ones leave out zeros.
COMPRESSED_FORMATS = (
    "dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision",
    "mxfp4-pack-quantized", "nvfp4-pack-quantized",
)  # fmt: skip
_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_ADVICE = "choose another checkpoint of the model, or one in float32, float16 or bfloat16"


class Quantisation(NamedTuple):
    """How a checkpoint was quantised: its `quant_method`, and the other settings."""

    method: str
    settings: Mapping[str, Any]


def quantisation_of(data: Mapping[str, Any]) -> Quantisation | None:
    """Read the quantisation that a config.json names; None for plain weights.

    Raises InputError for an unsupported method, bit width or layout.

    >>> quantisation_of({"quantization_config": {"quant_method": "gptq", "bits": 4}}).method
    'gptq'
    """
    text = data.get("text_config")
    given = data.get("quantization_config") or (
        text.get("quantization_config") if isinstance(text, Mapping) else None
    )
    if not given:
        return None
    method = given.get("quant_method", "unknown") if isinstance(given, Mapping) else given
    if not isinstance(given, Mapping) or method not in list(_CHECKS):
        raise InputError(
            f"the weights are quantised ({method!s:.40}), expected one of {', '.join(_CHECKS)}: {_ADVICE}"
        )
    _CHECKS[method](given)
    return Quantisation(method, given)


def beside(folder: Path, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read a directory's config.json, with the settings that older writers put into a separate file.

    AutoGPTQ and AutoAWQ do so. Raises InputError for a file that is not JSON.
    """
    for name, method in _BESIDE.items():
        if not data.get("quantization_config") and (folder / name).is_file():
            return {**data, "quantization_config": {"quant_method": method, **read_json(folder / name)}}
    return data


def _check_fp8(given: Mapping[str, Any]) -> None:
    size = given.get("weight_block_size")
    pair = isinstance(size, list | tuple) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    _expect(size is None or pair, "weight_block_size", size, "two whole numbers above 0, or none")


def _check_compressed(given: Mapping[str, Any]) -> None:
    form = given.get("format", "dense")
    _expect(form in COMPRESSED_FORMATS, "format", form, f"one of {', '.join(COMPRESSED_FORMATS)}")
    sparse = given.get("sparsity_config") or {}
    _expect(sparse.get("format", "dense") == "dense", "sparsity_config", sparse, "none")
    # Rotations that the model applies at run time.
    changes = given.get("transform_config") or {}
    _expect(not changes.get("config_groups"), "transform_config", changes, "none")
    groups = given.get("config_groups") or {}
    _expect(isinstance(groups, Mapping), "config_groups", groups, "an object")


def _check_awq(given: Mapping[str, Any]) -> None:
    bits = given.get("bits", given.get("w_bit", 4))
    _expect(bits == 4, "bits", bits, "4")
    version = given.get("version") or given.get("checkpoint_format") or given.get("format") or "gemm"
    _expect(str(version).lower() == "gemm", "version", version, "gemm")
    _expect(given.get("zero_point", True), "zero_point", given.get("zero_point"), "true")


def _check_gptq(given: Mapping[str, Any]) -> None:
    bits = given.get("bits")
    _expect(bits is None or bits in GPTQ_BITS, "bits", bits, f"one of {', '.join(map(str, GPTQ_BITS))}")
    _expect(gptq_format(given) in ("gptq", "gptq_v2"), "format", gptq_format(given), "gptq or gptq_v2")
    word = given.get("pack_dtype") or "int32"
    _expect(word == "int32", "pack_dtype", word, "int32")
    _expect(not given.get("rotation"), "rotation", given.get("rotation"), "none")


def gptq_format(given: Mapping[str, Any]) -> str:
    """How zero points of a GPTQ checkpoint are stored: "gptq" (minus one) or "gptq_v2" (unchanged)."""
    return str(given.get("checkpoint_format") or given.get("format") or "gptq").lower()


def _expect(good: Any, key: str, value: Any, expected: str) -> None:
    if not good:
        raise InputError(
            f"quantization_config in config.json gives {key} = {value!r:.80}, expected {expected}: others "
            f"are not read; {_ADVICE}"
        )


_CHECKS: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "fp8": _check_fp8,
    "fbgemm_fp8": _check_fp8,
    "compressed-tensors": _check_compressed,
    "awq": _check_awq,
    "gptq": _check_gptq,
    "mxfp4": lambda given: None,
}

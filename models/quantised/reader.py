"""The tensors of a quantised checkpoint under the names of an unquantised one, as families expect them.

Only names, shapes and dtypes are read here (and the two numbers of a `weight_shape`); weights are
decoded when the loader reads their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

import numpy as np

from kvjax.models.files import Stored
from kvjax.models.hf_tensors import short_name
from kvjax.models.quantised import compressed, float8, gptq
from kvjax.models.quantised.matrices import Matrix
from kvjax.models.quantised.module import Module
from kvjax.models.quantised.mxfp4 import BLOCKS, SCALES, Experts, experts
from kvjax.models.quantised.settings import Quantisation

_METHODS: dict[str, tuple[tuple[str, ...], Callable[[Module, Mapping[str, Any]], Matrix | None]]] = {
    "fp8": (float8.PARTS, float8.float8),
    "fbgemm_fp8": (float8.PARTS, float8.float8),
    "compressed-tensors": (compressed.PARTS, compressed.compressed),
    "awq": (gptq.PARTS, gptq.awq),
    "gptq": (gptq.PARTS, gptq.gptq),
}
# Settings of activation and cache quantisation, which kvjax' methods decide instead.
_PASSED_OVER = tuple(
    f"{what}_{kind}"
    for what in ("input", "output", "activation", "k", "v", "q", "kv")
    for kind in ("scale", "zero_point", "global_scale", "scale_ub")
)


class QuantisedWeights(NamedTuple):
    """Plays the role of an open safetensors file in `Stored`."""

    pieces: dict[str, Matrix | Experts]

    def get_slice(self, name: str) -> Matrix | Experts:
        return self.pieces[name]


def plain_tensors(
    found: Mapping[str, Stored], quantisation: Quantisation, expected: Container[str]
) -> dict[str, Stored]:
    """Decode a quantised checkpoint's tensors to float32, under the names of an unquantised one.

    expected: the model's names, without prefix. Extra biases, which some writers add to quantised modules,
    are ignored if they are zero. Raises InputError if a scale is missing or parts are inconsistent.
    """
    weights = QuantisedWeights({})
    out = {n: t for n, t in found.items() if n.rpartition(".")[2] not in _PASSED_OVER}
    if quantisation.method == "mxfp4":
        for name in [n.removesuffix(BLOCKS) for n in found if n.endswith(BLOCKS)]:
            weights.pieces[name] = experts(name, out.pop(name + BLOCKS), out.pop(name + SCALES, None))
            out[name] = _stored(found[name + BLOCKS], weights, name)
        return out
    parts, decode = _METHODS[quantisation.method]
    for module in _modules(out, parts):
        matrix = decode(module, quantisation.settings)
        if matrix is None:
            continue
        first = next(iter(module.parts.values()))
        for part in module.parts:
            del out[f"{module.name}.{part}"]
        name, bias = f"{module.name}.weight", f"{module.name}.bias"
        weights.pieces[name] = matrix
        out[name] = _stored(first, weights, name)
        if bias in out and short_name(bias) not in expected and not np.any(out[bias].read()):
            del out[bias]
    return out


def _stored(part: Stored, weights: QuantisedWeights, name: str) -> Stored:
    # Decoded numbers are float32, whatever the stored type.
    return Stored(part.path, weights, name, "F32", weights.pieces[name].shape)


def _modules(found: Mapping[str, Stored], parts: Container[str]) -> list[Module]:
    modules: dict[str, dict[str, Stored]] = {}
    for name, tensor in found.items():
        module, _, part = name.rpartition(".")
        if part in parts:
            modules.setdefault(module, {})[part] = tensor
    return [Module(name, held) for name, held in modules.items()]

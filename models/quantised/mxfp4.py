"""MXFP4 weights of gpt-oss: experts in one tensor, blocks of 32 inputs as 16 bytes and one exponent.

A byte holds two 4-bit floats (E2M1), the lower half first; a block has the factor 2 ** (scale - 127). Files
hold [experts, outputs, blocks, 16], a plain checkpoint [experts, inputs, outputs]. Layout: transformers'
integrations/mxfp4.py; format: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvjax.base.errors import InputError
from kvjax.models.files import Stored
from kvjax.models.quantised.matrices import float4, powers

BLOCKS, SCALES = "_blocks", "_scales"
_BYTES = 16


class Experts(NamedTuple):
    """Weights [experts, inputs, outputs] of blocks [experts, outputs, blocks, 16] and their exponents."""

    blocks: Stored
    scales: Stored

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, outputs, count, size = self.blocks.shape
        return experts, 2 * size * count, outputs

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        experts, inputs, outputs = (*index, *(slice(None),) * 3)[:3]
        bytes_, exponents = self.blocks.read(experts, outputs), self.scales.read(experts, outputs)
        codes = np.stack([bytes_ & 15, bytes_ >> 4], -1).reshape(*exponents.shape, 2 * _BYTES)
        out = float4(codes) * powers(exponents)[..., None]
        return out.reshape(*out.shape[:2], -1).swapaxes(1, 2)[:, inputs]


def experts(name: str, blocks: Stored, scales: Stored | None) -> Experts:
    """Decode the experts' weights of these blocks and scales. InputError for missing or misfit scales."""
    if scales is None:
        raise InputError(f"{blocks.name} is quantised and lacks {name}{SCALES}: fetch the checkpoint again")
    fits = len(blocks.shape) == 4 and blocks.shape[-1] == _BYTES and scales.shape == blocks.shape[:-1]
    if not fits or {blocks.dtype, scales.dtype} != {"U8"}:
        raise InputError(
            f"{blocks.name} has the shape {list(blocks.shape)} of {blocks.dtype} and {scales.name} "
            f"{list(scales.shape)} of {scales.dtype}, expected [experts, outputs, blocks, {_BYTES}] and the "
            "same without the last, of U8: fetch the checkpoint again"
        )
    return Experts(blocks, scales)

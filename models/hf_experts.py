"""Experts that a checkpoint stores in one tensor per layer, presented as one tensor per expert.

transformers 5 keeps gate_up_proj [experts, 2 F, D] and down_proj [experts, D, F] in memory, and published
checkpoints of Qwen3.5 store them so; others have a gate_proj, an up_proj and a down_proj for every expert.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

import numpy as np

from kvjax.models.files import Stored
from kvjax.models.hf_tensors import short_name


class ExpertRows(NamedTuple):
    """Rows [start, stop) of one expert of a tensor [experts, rows, columns]."""

    stored: Stored
    expert: int
    start: int
    stop: int

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        rows, columns = (*index, slice(None), slice(None))[:2]
        first, last, _ = rows.indices(self.stop - self.start)
        span = slice(self.start + first, self.start + last)
        return self.stored.read(slice(self.expert, self.expert + 1), span, columns)[0]


class ExpertsFile(NamedTuple):
    """Plays the role of an open file in `Stored`."""

    rows: dict[str, ExpertRows]

    def get_slice(self, name: str) -> ExpertRows:
        return self.rows[name]


def experts_apart(found: Mapping[str, Stored], expected: Container[str]) -> dict[str, Stored]:
    """Split the tensors of all experts in a checkpoint into single ones, if these are expected.

    expected: the model's names, without prefix. Nothing is read.
    """
    out, pieces = {}, ExpertsFile({})
    for name, tensor in found.items():
        room, _, last = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last, ())
        joined = room.endswith(".experts") and len(tensor.shape) == 3 and short_name(name) not in expected
        if not parts or not joined or tensor.shape[1] % len(parts):
            out[name] = tensor
            continue
        experts, rows, columns = tensor.shape
        each = rows // len(parts)
        for expert in range(experts):
            for i, part in enumerate(parts):
                own = f"{room}.{expert}.{part}.weight"
                pieces.rows[own] = ExpertRows(tensor, expert, i * each, (i + 1) * each)
                out[own] = Stored(tensor.path, pieces, own, tensor.dtype, (each, columns))
    return out

"""The tensors of a GGUF file under their Hugging Face names, decoded as they are read, a few rows at a time.

Changes of the conversion to GGUF are undone here: reordered rows of Llama's q and k, one added to Gemma's
norms, experts stacked into one tensor, Mamba's decay as a number below zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.files import Stored
from kvjax.models.gguf.names import concatenated, expert_of, gguf_name, stacked
from kvjax.models.gguf.orders import columns_of, joined_rows, rows_of
from kvjax.models.gguf.pieces import (
    ConcatenatedTensors,
    DecodedTensor,
    JoinedProjection,
    Piece,
    StackedExperts,
)
from kvjax.models.gguf.reader import Gguf, StoredTensor
from kvjax.models.hf_families import FAMILIES
from kvjax.models.hf_tensors import hf_name, tensors

# Tensors that hold no weights of the model.
_PASSED_OVER = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_ROTATIONS = ".attn_rot_embd"
# Architectures whose norms multiply by one more than the checkpoint's numbers.
_FROM_ONE = ("gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")
# Layer 0 of RWKV-7 has no values before its own; files hold others in their place.
_NO_VALUES = re.compile(r"blk\.0\.time_mix_v[012]\.weight")
_KEY_OR_VALUE = re.compile(r"blk\.(\d+)\.attn_(?:k|v|k_norm)\.weight")
_STACKED = re.compile(r"layers\.(\d+)\.(?:mlp|feed_forward)\.experts\.(gate_up_proj|down_proj)(_bias)?")


class GgufWeights(NamedTuple):
    """Plays the role of an open safetensors file in `Stored`."""

    pieces: dict[str, Piece]

    def get_slice(self, name: str) -> Piece:
        return self.pieces[name]


def stored_tensors(file: Gguf, config: Config) -> dict[str, Stored]:
    """Return every tensor of a checkpoint of `config`, by its full Hugging Face name, none of them read yet.

    Raises InputError that lists tensors which are missing, have another shape, or are unknown.
    """
    finder = _Finder(file, config)
    weights = GgufWeights({})
    for name, tensor in tensors(config).items():
        if (piece := finder.find(name, tensor.shape)) is not None:
            weights.pieces[hf_name(name, config)] = piece
    finder.check()
    return {
        # The loader need not know stored types: it gets decoded numbers.
        name: Stored(file.path, weights, name, "F32", piece.shape)
        for name, piece in weights.pieces.items()
    }


def is_later(name: str, config: Config) -> bool:
    """Whether a tensor belongs to a layer after the model's own, which predicts a later token."""
    layer = name.split(".")[1] if name.startswith("blk.") else ""
    return layer.isdigit() and int(layer) >= config.layers // FAMILIES[config.family].side_by_side


class _Finder:
    """Looks tensors up by their GGUF names, and records which are missing or left over."""

    def __init__(self, file: Gguf, config: Config) -> None:
        self.file, self.config = file, config
        self.used: set[str] = set()
        self.missing: list[str] = []
        self.wrong: dict[str, str] = {}

    def find(self, name: str, shape: tuple[int, ...]) -> Piece | None:
        """Find the tensor of a Hugging Face name without prefix; None if it is missing or misshapen."""
        if (found := _STACKED.fullmatch(name)) is not None:
            return self._experts(found[1], found[2], found[3], shape)
        if parts := concatenated(name, self.file):
            return self._concatenated(name, parts, shape)
        if name.endswith("self_attn.kv_b_proj.weight") and (joined := self._joined(name, shape)) is not None:
            return joined
        if (expert := self._expert(name)) is not None:
            return self._one_expert(*expert, shape)
        if (one := stacked(name)) is not None:
            return self._one_of(*one, shape)
        wanted = gguf_name(name, self.file.architecture, self.config)
        held = self._held(wanted)
        if held is None:
            return None
        if name.startswith("embed_tokens_per_layer.") and held.shape[0] > shape[0]:
            # Below the model's own rows, the converter adds rows of zeros.
            held = StoredTensor(held.data[: shape[0]], held.kind, (shape[0], *held.shape[1:]))
        if not _fits(held.shape, shape):
            return self._misshapen(wanted, shape, held)
        arch = self.file.architecture
        rows, columns = rows_of(name, arch, self.config), columns_of(name, arch, self.config)
        return DecodedTensor(held, shape, rows, columns, self._undo(wanted))

    def check(self) -> None:
        """Raise InputError if any tensor is missing, misshapen or left over."""
        left = [n for n in self.file.tensors if n not in self.used and not self._passed_over(n)]
        said = [
            f"{len(names)} {what}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
            for names, what in (
                (self.missing, "missing"), (left, "not expected"),
                ([*self.wrong.values()], "of another shape"),
            )
            if names
        ]  # fmt: skip
        if said:
            raise InputError(
                f"the tensors of {self.file.path} do not fit its metadata (architecture "
                f"{self.file.architecture}, read as {self.config.family}); {'; '.join(said)}. Fetch or "
                "convert the file again."
            )

    def _held(self, name: str) -> StoredTensor | None:
        self.used.add(name)
        if name not in self.file.tensors and name not in self.missing:
            self.missing.append(name)
        return self.file.tensors.get(name)

    def _misshapen(self, name: str, expected: tuple[int, ...], held: StoredTensor) -> None:
        # A tensor that holds several is named once.
        self.wrong.setdefault(name, f"{name} (expected {list(expected)}, found {list(held.shape)})")

    def _passed_over(self, name: str) -> bool:
        """Whether a tensor is skipped: rotation tables, and layers that predict later tokens."""
        return name in _PASSED_OVER or _ROTATIONS in name or is_later(name, self.config) or self._unread(name)

    def _unread(self, name: str) -> bool:
        """Whether a tensor makes keys or values of a layer that has none of its own."""
        if self.file.architecture == "rwkv7" and _NO_VALUES.fullmatch(name):
            return True
        shared = int(self.file.of("attention.shared_kv_layers", 0))
        found = _KEY_OR_VALUE.fullmatch(name)
        return found is not None and int(found[1]) >= self.config.layers - shared

    def _expert(self, name: str) -> tuple[str, int, int | None] | None:
        """(tensor of all experts, expert, half of its rows) of a tensor of one expert."""
        if (found := expert_of(name)) is None:
            return None
        layer, what, number = found
        both = f"blk.{layer}.ffn_gate_up_exps.weight"
        if both in self.file.tensors and what != "down":
            return both, number, int(what == "up")
        return f"blk.{layer}.ffn_{what}_exps.weight", number, None

    def _one_expert(
        self, name: str, number: int, part: int | None, shape: tuple[int, ...]
    ) -> DecodedTensor | None:
        held = self._held(name)
        if held is None:
            return None
        rows = shape[0] * (1 if part is None else 2)
        if held.shape[1:] != (rows, shape[1]) or number >= held.shape[0]:
            return self._misshapen(name, (number + 1, rows, shape[1]), held)
        one = StoredTensor(held.data[number], held.kind, held.shape[1:])
        return DecodedTensor(
            one, shape, None if part is None else np.arange(part * shape[0], (part + 1) * shape[0])
        )

    def _one_of(self, name: str, number: int, shape: tuple[int, ...]) -> DecodedTensor | None:
        held = self._held(name)
        if held is None:
            return None
        if number >= held.shape[0] or not _fits(held.shape[1:], shape):
            return self._misshapen(name, (number + 1, *shape), held)
        return DecodedTensor(StoredTensor(held.data[number], held.kind, held.shape[1:]), shape)

    def _concatenated(self, name: str, names: list[str], shape: tuple[int, ...]) -> Piece | None:
        parts = tuple(held for one in names if (held := self._held(one)) is not None)
        if len(parts) < len(names):
            return None
        for one, part in zip(names, parts, strict=True):
            expected = (*shape[:-2], shape[-2] - sum(p.shape[-2] for p in parts if p is not part), shape[-1])
            if part.shape != expected:
                return self._misshapen(one, expected, part)
        return ConcatenatedTensors(parts, shape, joined_rows(name, self.config))

    def _experts(self, layer: str, what: str, bias: str | None, shape: tuple[int, ...]) -> Piece | None:
        kind = "bias" if bias else "weight"
        names = [f"blk.{layer}.ffn_{part}_exps.{kind}" for part in what.split("_")[:-1]]
        held = [self._held(name) for name in names]
        if any(one is None for one in held):
            return None
        parts = tuple(one for one in held if one is not None)
        each = shape[-1] // len(parts)
        expected = (shape[0], each, *shape[1:-1])
        for name, one in zip(names, parts, strict=True):
            if one.shape != expected:
                return self._misshapen(name, expected, one)
        return StackedExperts(parts, shape, by_turns=self.file.architecture == "gpt-oss")

    def _joined(self, name: str, shape: tuple[int, ...]) -> JoinedProjection | None:
        prefix = f"blk.{name.split('.')[1]}"
        names = f"{prefix}.attn_k_b.weight", f"{prefix}.attn_v_b.weight"
        if not all(n in self.file.tensors for n in names):
            return None
        keys, values = (self._held(n) for n in names)
        assert keys is not None and values is not None
        rows = keys.shape[0] * (keys.shape[-1] + values.shape[1])
        if len(keys.shape) != 3 or len(values.shape) != 3 or (rows, values.shape[2]) != shape:
            return self._misshapen(names[0], shape, keys)
        return JoinedProjection(keys, values, shape)

    def _undo(self, name: str) -> Callable[[np.ndarray], np.ndarray] | None:
        shifted = name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")
        if self.file.architecture in _FROM_ONE and shifted:
            return lambda x: x - x.dtype.type(1)
        if name.endswith(".ssm_a"):
            return lambda x: np.log(-x)
        return None


def _fits(found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether a tensor has the shape up to axes of length one, or a vector is the rows of a matrix."""
    thin = [tuple(n for n in shape if n != 1) for shape in (found, expected)]
    flat = min(len(shape) for shape in thin) == 1
    return thin[0] == thin[1] or (flat and int(np.prod(found)) == int(np.prod(expected)))

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
from kvjax.models.gguf.reader import Gguf, StoredTensor, decoded
from kvjax.models.hf_tensors import hf_name, tensors

_TOP = {
    "embed_tokens": "token_embd",
    "embeddings": "token_embd",
    "norm": "output_norm",
    "norm_f": "output_norm",
    "lm_head": "output",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mixer.in_proj": "ssm_in",
    "mixer.conv1d": "ssm_conv1d",
    "mixer.norm": "ssm_norm",
    "mixer.out_proj": "ssm_out",
}
_WHOLE = {
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
}
_MLP = re.compile(r"mlp\.(shared_experts?\.)?(gate|up|down)_proj")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)")
_MIXTRAL = {"w1": "gate", "w2": "down", "w3": "up"}
# Tensors that hold no weights of the model.
_PASSED_OVER = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_ROTATIONS = ".attn_rot_embd"


class Decoded(NamedTuple):
    """A tensor as a checkpoint on the hub has it, decoded when it is read.

    rows: which rows of the file's tensor are its rows, in order, if they differ. undo: a function that
    reverses the conversion of its numbers. shape: that of the checkpoint, with as many numbers.
    """

    held: StoredTensor
    shape: tuple[int, ...]
    rows: np.ndarray | None = None
    undo: Callable[[np.ndarray], np.ndarray] | None = None

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        data, kind, _ = self.held
        if data.ndim != 2 or len(self.shape) != 2 or not index:
            return self._small(index)
        taken = data[index[0]] if self.rows is None else data[self.rows[index[0]]]
        out = decoded(np.ascontiguousarray(taken), kind)
        return (out if self.undo is None else self.undo(out))[:, *index[1:]]

    def _small(self, index: tuple[slice, ...]) -> np.ndarray:
        """Vectors, and convolutions, which have more axes here than in the file."""
        out = decoded(np.ascontiguousarray(self.held.data), self.held.kind)
        out = out if self.rows is None else out[self.rows]
        return (out if self.undo is None else self.undo(out)).reshape(self.shape)[index].copy()


class Joined(NamedTuple):
    """DeepSeek's `kv_b_proj`, joined from the two tensors of newer files, head by head.

    keys [heads, latents, channels], values [heads, channels, latents]: a head's rows are those of its keys,
    then those of its values.
    """

    keys: StoredTensor
    values: StoredTensor
    shape: tuple[int, ...]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        heads, each = self.keys.shape[0], self.keys.shape[2] + self.values.shape[1]
        start, stop, _ = index[0].indices(heads * each)
        first, last = start // each, -(-stop // each)
        rows = [self._head(head) for head in range(first, last)]
        out = np.concatenate(rows) if rows else np.empty((0, self.shape[1]), np.float32)
        return out[start - first * each : stop - first * each, *index[1:]]

    def _head(self, head: int) -> np.ndarray:
        keys, values = (decoded(np.ascontiguousarray(x.data[head]), x.kind) for x in (self.keys, self.values))
        return np.concatenate([keys.T, values])


class Weights(NamedTuple):
    """Plays the role of an open safetensors file in `Stored`."""

    pieces: dict[str, Decoded | Joined]

    def get_slice(self, name: str) -> Decoded | Joined:
        return self.pieces[name]


def stored_tensors(file: Gguf, config: Config) -> dict[str, Stored]:
    """Every tensor of a checkpoint of `config`, by its full Hugging Face name, none of them read yet.

    Raises InputError that lists tensors which are missing, have another shape, or are unknown.
    """
    finder = _Finder(file, config)
    weights = Weights({})
    for name, tensor in tensors(config).items():
        if (piece := finder.find(name, tensor.shape)) is not None:
            weights.pieces[hf_name(name, config)] = piece
    finder.check()
    return {
        # The loader need not know stored types: it gets decoded numbers.
        name: Stored(file.path, weights, name, "F32", piece.shape)
        for name, piece in weights.pieces.items()
    }


class _Finder:
    """Looks tensors up by their GGUF names, and records which are missing or left over."""

    def __init__(self, file: Gguf, config: Config) -> None:
        self.file, self.config = file, config
        self.used: set[str] = set()
        self.missing: list[str] = []
        self.wrong: list[str] = []

    def find(self, name: str, shape: tuple[int, ...]) -> Decoded | Joined | None:
        """The tensor of a Hugging Face name without prefix; None if it is missing or misshapen."""
        if name.endswith("self_attn.kv_b_proj.weight") and (joined := self._joined(name, shape)) is not None:
            return joined
        if (expert := self._expert(name)) is not None:
            return self._one_expert(*expert, shape)
        wanted = self._name(name)
        held = self._held(wanted)
        if held is None:
            return None
        if not _fits(held.shape, shape):
            return self._misshapen(wanted, shape, held)
        return Decoded(held, shape, self._rows(name), self._undo(wanted))

    def check(self) -> None:
        """Raises InputError if any tensor is missing, misshapen or left over."""
        left = [n for n in self.file.tensors if n not in self.used and not self._passed_over(n)]
        said = [
            f"{len(names)} {what}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
            for names, what in (
                (self.missing, "missing"), (left, "not expected"), (self.wrong, "of another shape"),
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
        if name not in self.file.tensors:
            self.missing.append(name)
        return self.file.tensors.get(name)

    def _misshapen(self, name: str, expected: tuple[int, ...], held: StoredTensor) -> None:
        self.wrong.append(f"{name} (expected {list(expected)}, found {list(held.shape)})")

    def _passed_over(self, name: str) -> bool:
        """Whether a tensor is skipped: rotation tables, and DeepSeek-V3's layers for further tokens."""
        layer = name.split(".")[1] if name.startswith("blk.") else ""
        beyond = self.config.family == "deepseek_v3" and layer.isdigit() and int(layer) >= self.config.layers
        return name in _PASSED_OVER or _ROTATIONS in name or beyond

    def _name(self, name: str) -> str:
        """The GGUF name of a tensor that is stored by itself."""
        if not name.startswith("layers."):
            stem, _, kind = name.rpartition(".")
            return f"{_TOP[stem]}.{kind}"
        _, layer, inner = name.split(".", 2)
        if inner in _WHOLE:
            return f"blk.{layer}.{_WHOLE[inner]}"
        stem, _, kind = inner.rpartition(".")
        if stem == "post_attention_layernorm":
            found = "ffn_norm" if self.config.norms == "pre" else "post_attention_norm"
        elif (dense := _MLP.fullmatch(stem)) is not None:
            found = f"ffn_{dense[2]}{'_shexp' if dense[1] else ''}"
        else:
            found = _LAYER.get(stem, stem)
        return f"blk.{layer}.{found}.{kind}"

    def _expert(self, name: str) -> tuple[str, int, int | None] | None:
        """(tensor of all experts, expert, half of its rows) of a tensor of one expert."""
        _, layer, inner = (name.split(".", 2) + ["", ""])[:3]
        found = _EXPERT.fullmatch(inner.removesuffix(".weight"))
        if found is None:
            return None
        what = _MIXTRAL.get(found[2], found[2].removesuffix("_proj"))
        both = f"blk.{layer}.ffn_gate_up_exps.weight"
        if both in self.file.tensors and what != "down":
            return both, int(found[1]), int(what == "up")
        return f"blk.{layer}.ffn_{what}_exps.weight", int(found[1]), None

    def _one_expert(self, name: str, number: int, part: int | None, shape: tuple[int, ...]) -> Decoded | None:
        held = self._held(name)
        if held is None:
            return None
        rows = shape[0] * (1 if part is None else 2)
        if held.shape[1:] != (rows, shape[1]) or number >= held.shape[0]:
            return self._misshapen(name, (number + 1, rows, shape[1]), held)
        one = StoredTensor(held.data[number], held.kind, held.shape[1:])
        return Decoded(
            one, shape, None if part is None else np.arange(part * shape[0], (part + 1) * shape[0])
        )

    def _joined(self, name: str, shape: tuple[int, ...]) -> Joined | None:
        prefix = f"blk.{name.split('.')[1]}"
        names = f"{prefix}.attn_k_b.weight", f"{prefix}.attn_v_b.weight"
        if not all(n in self.file.tensors for n in names):
            return None
        keys, values = (self._held(n) for n in names)
        assert keys is not None and values is not None
        rows = keys.shape[0] * (keys.shape[-1] + values.shape[1])
        if len(keys.shape) != 3 or len(values.shape) != 3 or (rows, values.shape[2]) != shape:
            return self._misshapen(names[0], shape, keys)
        return Joined(keys, values, shape)

    def _rows(self, name: str) -> np.ndarray | None:
        """The order of rows that converts llama.cpp's heads (neighbouring pairs rotate) to ours."""
        found = re.fullmatch(r"layers\.\d+\.self_attn\.(q|k)_proj\.(?:weight|bias)", name)
        if self.file.architecture != "llama" or found is None:
            return None
        heads, size = self.config.heads if found[1] == "q" else self.config.kv_heads, self.config.head_dim
        order = np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2)])
        return (np.arange(heads)[:, None] * size + order).ravel()

    def _undo(self, name: str) -> Callable[[np.ndarray], np.ndarray] | None:
        if self.file.architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            return lambda x: x - x.dtype.type(1)
        if name.endswith(".ssm_a"):
            return lambda x: np.log(-x)
        return None


def _fits(found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether a tensor has the shape up to axes of length one, or is a vector in several rows."""
    thin = [tuple(n for n in shape if n != 1) for shape in (found, expected)]
    return thin[0] == thin[1] or (len(thin[1]) == 1 and int(np.prod(found)) == thin[1][0])

"""Config of Gemma 3n: sparse gates, upper layers that read lower ones, and tables that the converter pads."""

from __future__ import annotations

import statistics

import numpy as np

from kvjax.base.errors import InputError
from kvjax.models.gguf.fields import Json, attention, depth, windows
from kvjax.models.gguf.reader import Gguf, StoredTensor, decoded

_BLOCK = 256


def gemma3n(file: Gguf) -> Json:
    """Gemma 3n (text)."""
    widths = file.need("feed_forward_length")
    sparsity = file.of("activation_sparsity_scale") or [-np.inf] * depth(file)
    data = attention(file, each_layer=("intermediate_size",))
    return {
        "model_type": "gemma3n_text",
        **data,
        **windows(file, every=5),
        "intermediate_size": widths,
        "rope_local_base_freq": float(file.of("rope.freq_base_swa", 10000.0)),
        "activation_sparsity_pattern": [_share(scale) for scale in sparsity],
        "num_kv_shared_layers": file.of("attention.shared_kv_layers", 0),
        "final_logit_softcapping": file.of("final_logit_softcapping"),
        "hidden_size_per_layer_input": file.need("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": _own_rows(file),
        "altup_num_inputs": file.need("altup.num_inputs"),
        "altup_active_idx": file.need("altup.active_idx"),
        "laurel_rank": _tensor(file, "blk.0.laurel_l.weight").shape[0],
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _share(scale: float) -> float:
    """Compute the share of a gate's channels that its file gives as a normal quantile, rounded as written."""
    return round(statistics.NormalDist().cdf(scale), 6) if np.isfinite(scale) else 0.0


def _own_rows(file: Gguf) -> int:
    """How many tokens have per-layer embeddings: rows before those of zeros, which the converter adds."""
    held = _tensor(file, "per_layer_token_embd.weight")
    rows = held.shape[0]
    while rows:
        block = held.data[max(rows - _BLOCK, 0) : rows]
        if len(used := np.flatnonzero(decoded(np.ascontiguousarray(block), held.kind).any(-1))):
            return rows - len(block) + int(used[-1]) + 1
        rows -= len(block)
    raise InputError(f"{file.path} has per-layer embeddings of zeros alone: convert it again")


def _tensor(file: Gguf, name: str) -> StoredTensor:
    if name not in file.tensors:
        raise InputError(f"{file.path} lacks {name}: fetch or convert it again")
    return file.tensors[name]

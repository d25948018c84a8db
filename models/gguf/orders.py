"""The order of rows and columns that undoes how llama.cpp's converter reorders heads and their channels."""

from __future__ import annotations

import re

import numpy as np

from kvjax.models.config import Config
from kvjax.models.mixers.recurrent import GatedDelta

# Architectures in whose files the two channels of q and k that rotate together are neighbours.
# Nemotron-H does not rotate, and its converter reorders them all the same.
_PAIRED = ("llama", "mistral3", "smollm3", "granite", "granitehybrid", "nemotron_h", "nemotron_h_moe")
_QWEN_3_5 = ("qwen35", "qwen35moe")
_Q_OR_K = re.compile(r"layers\.\d+\.(?:self_attn|mixer)\.(q|k)_proj\.(?:weight|bias)")
_LINEAR = re.compile(r"layers\.(\d+)\.linear_attn\.(\w+?)(?:\.weight)?")


def rows_of(name: str, architecture: str, config: Config) -> np.ndarray | None:
    """Which rows of the file's tensor are those of a Hugging Face tensor, in order; None if all are."""
    if architecture in _PAIRED and (found := _Q_OR_K.fullmatch(name)) is not None:
        heads, size = config.heads if found[1] == "q" else config.kv_heads, config.head_dim
        order = np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2)])
        return (np.arange(heads)[:, None] * size + order).ravel()
    found = _LINEAR.fullmatch(name)
    if architecture not in _QWEN_3_5 or found is None:
        return None
    word = _delta(config, int(found[1]))
    before = 2 * word.key_heads * word.key_dim
    if found[2] in ("in_proj_qkv", "conv1d"):
        return np.concatenate([np.arange(before), before + _values(word, word.value_dim)])
    width = {"in_proj_z": word.value_dim, "in_proj_a": 1, "in_proj_b": 1, "A_log": 1, "dt_bias": 1}
    return _values(word, width[found[2]]) if found[2] in width else None


def columns_of(name: str, architecture: str, config: Config) -> np.ndarray | None:
    """`rows_of` for columns."""
    found = _LINEAR.fullmatch(name)
    if architecture not in _QWEN_3_5 or found is None or found[2] != "out_proj":
        return None
    word = _delta(config, int(found[1]))
    return _values(word, word.value_dim)


def joined_rows(name: str, config: Config) -> np.ndarray | None:
    """Order Qwen3-Next's `in_proj_qkvz` rows as all q, all k, all v and all z; None for other tensors.

    A key head has its q and k there, then the v and z of its value heads.
    """
    if not name.endswith("linear_attn.in_proj_qkvz.weight"):
        return None
    word = _delta(config, int(name.split(".")[1]))
    values = word.heads // word.key_heads * word.value_dim
    widths = (word.key_dim, word.key_dim, values, values)
    starts = np.cumsum([0, *(word.key_heads * width for width in widths)])
    heads = np.arange(word.key_heads)[:, None]
    return np.concatenate(
        [start + heads * width + np.arange(width) for start, width in zip(starts, widths, strict=False)],
        axis=1,
    ).ravel()


def _delta(config: Config, layer: int) -> GatedDelta:
    word = config.mixers[layer]
    assert isinstance(word, GatedDelta)
    return word


def _values(word: GatedDelta, width: int) -> np.ndarray:
    """Where the value heads of each key head, one after the other, lie in the file, `width` rows each.

    The file has the first value head of every key head, then the second of every one, and so on.
    """
    tiled = np.arange(word.heads).reshape(-1, word.key_heads).T.ravel()
    return (tiled[:, None] * width + np.arange(width)).ravel()

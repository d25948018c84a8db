"""Shared by families: pieces of tensors, and the names of attention, norms and experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from kvjax.models.config import Config
from kvjax.models.feed_forward import MoE, mlp_of
from kvjax.models.hf_family import TensorRows
from kvjax.models.mixers.attention import mixer_of


def whole(leaf: str, count: int, expert: int | None = None) -> list[TensorRows]:
    return [TensorRows(leaf, np.arange(count), expert)]


def stacked_rows(parts: Mapping[str, int]) -> list[TensorRows]:
    """Pieces for parameters stacked one after the other in a tensor."""
    out, start = [], 0
    for leaf, count in parts.items():
        out.append(TensorRows(leaf, np.arange(start, start + count)))
        start += count
    return out


def per_head(leaf: str, heads: int, count: int) -> list[TensorRows]:
    """Pieces for a parameter with a head axis, with `count` consecutive columns per head."""
    return [TensorRows(leaf, np.arange(h * count, (h + 1) * count), h) for h in range(heads)]


def unpaired(size: int) -> np.ndarray:
    """Return the order that moves channels rotated in pairs (2 i, 2 i + 1) to our pairs (i, i + size / 2)."""
    return np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2)])


def experts(
    config: Config, layer: int, room: str, names: tuple[str, str, str]
) -> Iterator[tuple[str, list[TensorRows]]]:
    """Tensors of a mixture of experts under `room`, with the experts' gate, up and down called `names`."""
    moe = mlp_of(config, layer)
    assert isinstance(moe, MoE)
    yield f"{room}.gate.weight", whole("router", moe.experts)
    widths = (moe.width, moe.width, config.d_model)
    for e in range(moe.experts):
        for leaf, name, width in zip(("gate", "up", "down"), names, widths, strict=True):
            yield f"{room}.experts.{e}.{name}.weight", whole(f"experts_{leaf}", width, e)


def mlp(
    config: Config,
    layer: int,
    shared: str = "",
    room: str = "mlp",
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    dense: str = "mlp",
) -> Iterator[tuple[str, list[TensorRows]]]:
    """Yield a gated MLP under `dense`, or experts under `room` with a shared one called `shared`."""
    word, d = mlp_of(config, layer), config.d_model
    names = ("gate_proj", "up_proj", "down_proj")
    if not isinstance(word, MoE):
        sizes = word.shapes(config)
        for leaf, name in zip(("gate", "up", "down"), names, strict=True):
            yield f"{dense}.{name}.weight", whole(leaf, sizes[leaf][-1])
            if f"{leaf}_bias" in sizes:
                yield f"{dense}.{name}.bias", whole(f"{leaf}_bias", sizes[leaf][-1])
        return
    yield from experts(config, layer, room, expert_names)
    if word.has_bias:
        yield f"{room}.gate.e_score_correction_bias", whole("router_bias", word.experts)
    if word.shared:
        for leaf, name, width in zip(
            ("gate", "up", "down"), names, (word.shared, word.shared, d), strict=True
        ):
            yield f"{room}.{shared}.{name}.weight", whole(f"shared_{leaf}", width)
    if word.shared_gate:
        yield f"{room}.shared_expert_gate.weight", whole("shared_switch", 1)


def attention(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    sizes = mixer_of(config, layer).shapes(config)
    for leaf in (leaf for leaf in "qkvo" if leaf in sizes):
        yield f"self_attn.{leaf}_proj.weight", whole(leaf, sizes[leaf][-1])
        if f"{leaf}_bias" in sizes:
            yield f"self_attn.{leaf}_proj.bias", whole(f"{leaf}_bias", sizes[leaf][-1])
    for leaf in ("q_norm", "k_norm"):
        if leaf in sizes:
            yield f"self_attn.{leaf}.weight", whole(leaf, sizes[leaf][-1])


def in_pairs(
    config: Config, tensors: Iterator[tuple[str, list[TensorRows]]]
) -> Iterator[tuple[str, list[TensorRows]]]:
    """Yield attention tensors, channels in the order that rotates neighbours (2 i, 2 i + 1) as pairs."""
    h, turning = config.head_dim, config.rope.turning(config.head_dim)
    order = np.concatenate([unpaired(turning), np.arange(turning, h)])
    for name, pieces in tensors:
        if name.startswith(("self_attn.q_proj", "self_attn.k_proj")):
            heads = np.arange(0, len(pieces[0].rows), h)
            pieces = [p._replace(rows=(heads[:, None] + order[None]).ravel()) for p in pieces]
        yield name, pieces


def norms(config: Config) -> Iterator[tuple[str, list[TensorRows]]]:
    yield "input_layernorm.weight", whole("attn_norm", config.d_model)
    yield "post_attention_layernorm.weight", whole("mlp_norm", config.d_model)

"""DeepSeek-V2 and V3, Kimi K2 and GLM-4.7-Flash: latent attention, and experts with shared ones.

Under YaRN with mscale_all_dim, logits have the additional factor (0.1 mscale_all_dim ln(factor) + 1)^2, in V2
as in V3: so does the authors' modeling_deepseek.py of both (read in public copies of it), and so does vLLM.
transformers 5.2 has the factor for V3 alone; its pull request 47435 added it to V2 later.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.feed_forward import FeedForward, GatedMLP, MoE
from kvjax.models.hf_family import Json, TensorRows
from kvjax.models.hf_mixed.pieces import mlp, norms, per_head, unpaired, whole
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.mixers.indexed_latent import IndexedLatent
from kvjax.models.mixers.latent import Latent
from kvjax.ops.base.rope import Rope


def read_deepseek(data: Json, rope: Rope) -> dict[str, Any]:
    third = data["model_type"] != "deepseek_v2"
    if not data.get("rope_interleave", True):
        raise InputError("rope_interleave = false is not supported: expected channels that turn in pairs")
    nope, turned = data["qk_nope_head_dim"], data["qk_rope_head_dim"]
    scale = None
    if rope.kind == "yarn" and rope.mscale_all_dim:
        scale = (nope + turned) ** -0.5 * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2
    latent = Latent(
        data["kv_lora_rank"], turned, nope, data["v_head_dim"], q_rank=data.get("q_lora_rank"), scale=scale
    )
    bias = bool(data.get("attention_bias", False))
    return {
        "mixers": (latent,) * data["num_hidden_layers"],
        "mlps": read_experts(data, third),
        "qkv_bias": bias,
        "o_bias": bias,
        "head_dim": turned,
        "kv_heads": data["num_attention_heads"],
    }


def read_experts(data: Json, third: bool) -> tuple[FeedForward, ...]:
    """Feed-forwards from the settings of DeepSeek-V3 and GLM-4.5, or of DeepSeek-V2 (third=False)."""
    grouped = third or data.get("topk_method", "greedy") != "greedy"
    experts = MoE(
        data["n_routed_experts"], data["num_experts_per_tok"], data["moe_intermediate_size"],
        scores="sigmoid" if third else "softmax",
        normalise=third and bool(data["norm_topk_prob"]),
        scale=float(data["routed_scaling_factor"]),
        groups=(data.get("n_group") or 1) if grouped else 1,
        top_groups=(data.get("topk_group") or 1) if grouped else 1,
        shared=data["moe_intermediate_size"] * (data.get("n_shared_experts") or 0),
    )  # fmt: skip
    dense = data["first_k_dense_replace"]
    return tuple(GatedMLP() if i < dense else experts for i in range(data["num_hidden_layers"]))


def write_deepseek(config: Config) -> dict[str, Any]:
    latent = config.mixers[0]
    assert isinstance(latent, Latent)
    return write_experts(config) | {
        "kv_lora_rank": latent.rank,
        "q_lora_rank": latent.q_rank,
        "qk_rope_head_dim": latent.rope_dim,
        "qk_nope_head_dim": latent.nope_dim,
        "v_head_dim": latent.value_dim,
    }


def write_experts(config: Config) -> dict[str, Any]:
    """Invert `read_experts`."""
    words = [w for w in config.mlps if isinstance(w, MoE)]
    out: dict[str, Any] = {"first_k_dense_replace": config.layers - len(words)}
    if words:
        moe = words[0]
        out |= {
            "n_routed_experts": moe.experts,
            "num_experts_per_tok": moe.top,
            "moe_intermediate_size": moe.width,
            "n_shared_experts": moe.shared // moe.width or None,
            "routed_scaling_factor": moe.scale,
            "norm_topk_prob": moe.normalise,
            "n_group": moe.groups,
            "topk_group": moe.top_groups,
        }
        if config.family == "deepseek_v2":
            out["topk_method"] = "greedy" if moe.groups == 1 else "group_limited_greedy"
    return out


def spell_glm4_moe_lite(data: Json) -> dict[str, Any]:
    """Spell how many feed-forwards are dense, the first ones; the files name the kind of each."""
    kinds = data.get("mlp_layer_types") or []
    dense = list(kinds).count("dense")
    if kinds and list(kinds) != ["dense"] * dense + ["sparse"] * (data["num_hidden_layers"] - dense):
        raise InputError(
            f"mlp_layer_types {kinds} is not supported: expected dense layers, then sparse ones, "
            f"{data['num_hidden_layers']} in all"
        )
    return {"first_k_dense_replace": dense} if kinds else {}


def write_glm4_moe_lite(config: Config) -> dict[str, Any]:
    kinds = ["sparse" if isinstance(word, MoE) else "dense" for word in config.mlps]
    return write_deepseek(config) | {"mlp_layer_types": kinds}


def read_indexed(data: Json, rope: Rope) -> dict[str, Any]:
    """DeepSeek-V3.2 and GLM-5: V3 with an indexer in every layer, or in those that do not share another's."""
    fields, layers = read_deepseek(data, rope), data["num_hidden_layers"]
    kinds = data.get("indexer_types") or ["full"] * layers
    if len(kinds) != layers or {*kinds} - {"full", "shared"}:
        raise InputError(f"indexer_types {kinds} must name full or shared for each of {layers} layers")
    if data.get("index_topk_pattern") or data.get("index_topk_freq", 1) > 1:
        if not data.get("indexer_types"):
            raise InputError("index_topk_freq or index_topk_pattern without indexer_types is not supported")
    latent = fields["mixers"][0]
    indexed = IndexedLatent(
        **dataclasses.asdict(latent), index_heads=data["index_n_heads"], index_dim=data["index_head_dim"],
        index_top=data["index_topk"],
    )  # fmt: skip
    if kinds[0] != "full":
        raise InputError("indexer_types begins with shared: expected a full layer, whose tokens others take")
    words, last = [], 0
    for i, kind in enumerate(kinds):
        last = i if kind == "full" else last
        words.append(indexed if kind == "full" else dataclasses.replace(indexed, index_source=last))
    return fields | {"mixers": tuple(words)}


def write_indexed(config: Config) -> dict[str, Any]:
    words = [m for m in config.mixers if isinstance(m, IndexedLatent)]
    word, kinds = words[0], ["full" if m.index_source is None else "shared" for m in words]
    own = {"index_n_heads": word.index_heads, "index_head_dim": word.index_dim, "index_topk": word.index_top}
    own |= {"indexer_types": kinds} if config.family == "glm_moe_dsa" else {}
    return write_glm4_moe_lite(config) | own


def indexed(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    yield from deepseek(config, layer)
    word = mixer_of(config, layer)
    if isinstance(word, IndexedLatent) and word.index_source is None:
        order = np.arange(word.index_dim)
        if config.family == "glm_moe_dsa":
            # Its indexer rotates neighbouring channels, that of DeepSeek-V3.2 those half of them apart.
            order[: word.rope_dim] = unpaired(word.rope_dim)
        heads = np.arange(word.index_heads)[:, None] * word.index_dim + order[None]
        rows = {"index_q": heads.ravel(), "index_weights": np.arange(word.index_heads)}
        names = {
            "wq_b.weight": "index_q",
            "wk.weight": "index_k",
            "k_norm.weight": "index_k_norm",
            "k_norm.bias": "index_k_norm_bias",
            "weights_proj.weight": "index_weights",
        }
        for name, leaf in names.items():
            yield f"self_attn.indexer.{name}", [TensorRows(leaf, rows.get(leaf, order))]


def deepseek(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    yield from norms(config)
    yield from latent_attention(config, layer)
    yield from mlp(config, layer, "shared_experts")


def latent_attention(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    """Tensors of latent attention, whose channels rotate in neighbouring pairs, if at all."""
    word = mixer_of(config, layer)
    assert isinstance(word, Latent)
    sizes, turned = word.shapes(config), word.rope_dim
    order = unpaired(turned) if word.turns else np.arange(turned)
    width = word.nope_dim + turned
    within = np.concatenate([np.arange(word.nope_dim), word.nope_dim + order])
    heads = (np.arange(config.heads)[:, None] * width + within[None]).ravel()
    down = np.concatenate([np.arange(word.rank), word.rank + order])
    if word.q_rank is None:
        yield "self_attn.q_proj.weight", [TensorRows("q", heads)]
    else:
        yield "self_attn.q_a_proj.weight", whole("q_down", word.q_rank)
        yield "self_attn.q_a_layernorm.weight", whole("q_latent_norm", word.q_rank)
        yield "self_attn.q_b_proj.weight", [TensorRows("q_up", heads)]
        if "q_down_bias" in sizes:
            yield "self_attn.q_a_proj.bias", whole("q_down_bias", word.q_rank)
    yield "self_attn.kv_a_proj_with_mqa.weight", [TensorRows("kv_down", down)]
    if "kv_down_bias" in sizes:
        yield "self_attn.kv_a_proj_with_mqa.bias", [TensorRows("kv_down_bias", down)]
    yield "self_attn.kv_a_layernorm.weight", whole("latent_norm", word.rank)
    yield "self_attn.kv_b_proj.weight", per_head("kv_up", config.heads, sizes["kv_up"][-1])
    yield "self_attn.o_proj.weight", whole("o", config.d_model)
    if "o_bias" in sizes:
        yield "self_attn.o_proj.bias", whole("o_bias", config.d_model)

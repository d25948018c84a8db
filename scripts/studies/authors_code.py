"""The functions of methods' authors that choose slots, run on one layer's attention in float64 torch."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from scripts.fixtures.record_published import earliest, found, taken
from scripts.studies.authors_slots import KERNEL, ROWS, SEPLLM_NEWEST, SINKS, WINDOW, Attended

Choose = Callable[[Attended], np.ndarray]


@cache
def kept_by(clones: Path) -> dict[str, Choose]:
    """By method, the function that gives the slots [K, T] that the authors' code keeps of a layer."""
    torch.set_default_dtype(torch.float64)
    torch.topk = earliest  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.topk = earliest  # type: ignore[assignment]
    with contextlib.redirect_stdout(io.StringIO()):
        return {id: make(clones / ROWS[id].clone) for id, make in CHOOSE.items()}


def tensors(x: Attended) -> tuple[torch.Tensor, ...]:
    """Q [1, N, T, H], k, v [1, K, T, H] and p [1, N, T, T]."""
    return tuple(torch.tensor(a)[None] for a in (x.q, x.k, x.v, x.p))


def share(x: Attended) -> int:
    """Query heads per KV head."""
    return len(x.q) // len(x.k)


def one_of(indices: torch.Tensor, x: Attended) -> np.ndarray:
    """Repeat the same slots in every head."""
    return np.tile(np.isin(np.arange(len(x.tokens)), indices.numpy()), (len(x.k), 1))


def snapkv(clone: Path) -> Choose:
    helpers = ("repeat_kv", "_gqa_groups", "_reduce_group_scores", "_grouped_window_attn_cache")
    file = clone / "pyramidkv" / "pyramidkv_utils.py"
    *_, cluster = taken(file, *helpers, "_select_topk_kv", "SnapKVCluster", _debug_print=lambda *_: None)

    def choose(x: Attended) -> np.ndarray:
        q, k, v, _ = tensors(x)
        one = cluster(window_size=WINDOW, kernel_size=KERNEL, pooling="maxpool", max_capacity_prompt=x.slots)
        return found(k, one.update_kv(k, q, v, None, share(x))[0])

    return choose


def pyramidkv(clone: Path) -> Choose:
    helpers = ("repeat_kv", "_gqa_groups", "_reduce_group_scores", "_grouped_window_attn_cache")
    file = clone / "pyramidkv" / "pyramidkv_utils.py"
    *_, cluster = taken(file, *helpers, "_select_topk_kv", "PyramidKVCluster", _debug_print=lambda *_: None)

    def choose(x: Attended) -> np.ndarray:
        q, k, v, _ = tensors(x)
        one = cluster(
            num_hidden_layers=x.layers, layer_idx=x.layer, window_size=WINDOW, kernel_size=KERNEL,
            pooling="maxpool", max_capacity_prompt=x.slots, beta=20,
        )  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):
            return found(k, one.update_kv(k, q, v, None, share(x))[0])

    return choose


def h2o(clone: Path) -> Choose:
    """Their model has as many KV heads as query heads; here attention is summed over a group first."""
    (layerwise,) = taken(clone / "h2o_hf" / "utils_real_drop" / "modify_llama.py", "H2OKVCache_LayerWise")

    def choose(x: Attended) -> np.ndarray:
        _, k, v, p = tensors(x)
        with contextlib.redirect_stdout(io.StringIO()):
            one = layerwise(hh_size=x.slots - x.slots // 2, recent_size=x.slots // 2)
        grouped = p.reshape(1, k.shape[1], -1, *p.shape[2:]).sum(2)
        return found(k, one((k, v), grouped)[0])

    return choose


def tova(clone: Path) -> Choose:
    (cached,) = taken(clone / "src" / "tova_cache.py", "TOVACache", DynamicCache=object)

    def choose(x: Attended) -> np.ndarray:
        _, k, v, p = tensors(x)
        one = SimpleNamespace(cache_size=x.slots, key_cache=[k], value_cache=[v])
        cached.reduce(one, 0, p)
        return found(k, one.key_cache[0])

    return choose


def adakv(clone: Path) -> Choose:
    file = clone / "adaptive_snapkv" / "monkeypatch" / "snapkv_utils.py"
    *_, cluster = taken(file, "repeat_kv", "AdaptiveSnapKVCluster")

    def choose(x: Attended) -> np.ndarray:
        q, k, v, _ = tensors(x)
        one = cluster(
            window_size=WINDOW, kernel_size=KERNEL, base_capacity=x.slots, floor_alpha=0.2, skip=0,
            layer_idx=x.layer, gqa_support=True, num_key_value_groups=share(x), gqa_func="mean",
        )  # fmt: skip
        flat = one.update_kv(k, q, v)[0]
        heads = flat.split(one.head_lens.tolist())
        return np.stack([found(k[:, i : i + 1], held[None, None])[0] for i, held in enumerate(heads)])

    return choose


def keydiff(clone: Path) -> Choose:
    """Keep the highest scores, as the press does."""
    (press,) = taken(clone / "kvpress" / "presses" / "keydiff_press.py", "KeyDiffPress", ScorerPress=object)

    def choose(x: Attended) -> np.ndarray:
        _, k, v, _ = tensors(x)
        return best(press.score(None, None, None, k, v, None, {}), x)

    return choose


def expected_attention(clone: Path) -> Choose:
    """Score by queries before rotation, which come from the layer; the press rotates their moments."""
    file = clone / "kvpress" / "presses" / "expected_attention_press.py"

    def repeated(k: torch.Tensor, times: int) -> torch.Tensor:
        return k.repeat_interleave(times, 1)

    def choose(x: Attended) -> np.ndarray:
        _, k, v, _ = tensors(x)
        raw = torch.tensor(x.raw_q)[None]
        (press,) = taken(
            file, "ExpectedAttentionPress", ScorerPress=object, repeat_kv=repeated,
            get_prerope_query_states=lambda module, hidden: raw[:, :, -hidden.shape[1] :],
        )  # fmt: skip
        one = press()
        theirs = SimpleNamespace(
            head_dim=k.shape[-1], config=SimpleNamespace(num_attention_heads=len(x.q)), rotary_emb=turns
        )
        hidden = torch.zeros(1, len(x.tokens), 1)
        return best(one.score(theirs, hidden, k, v, None, {}), x)

    return choose


THETA = 100_000.0


def turns(_: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of SmolLM2's rotation at positions [1, S], as transformers lays them out."""
    half = 32
    angle = positions[..., None] * THETA ** (-torch.arange(half) / half)
    return torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()


def best(scores: torch.Tensor, x: Attended) -> np.ndarray:
    """Choose the slots with the highest scores [1, K, T]."""
    index = scores[0].topk(x.slots, dim=-1).indices
    return np.stack([np.isin(np.arange(len(x.tokens)), head) for head in index])


def lacache(clone: Path) -> Choose:
    """Span half of the layers: steps of two tokens, of which every layer keeps one."""
    (ladder,) = taken(clone / "LongBench" / "lacache" / "kv_cache.py", "LaCache")

    def choose(x: Attended) -> np.ndarray:
        numbers = torch.arange(len(x.tokens)).reshape(1, 1, -1, 1)
        one = ladder(cache_size=x.slots, start_size=SINKS, span=x.layers // 2, overlap=0)
        return one_of(one([(numbers, numbers)] * x.layers)[x.layer][0].flatten(), x)

    return choose


def sepllm(clone: Path) -> Choose:
    """Their list of separators is Llama 3's; here it is what kvjax finds in the model's tokenizer."""
    file = clone / "Streaming-SepLLM" / "sepllm_kv_cache" / "kv_cache_manager.py"
    known: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), known)

    def choose(x: Attended) -> np.ndarray:
        numbers = torch.arange(len(x.tokens)).reshape(1, 1, -1, 1)
        between = x.slots - SINKS - SEPLLM_NEWEST
        with contextlib.redirect_stdout(io.StringIO()):
            one = known["SepLLM_KVCache_Manager"](SINKS, between, SEPLLM_NEWEST, x.slots, 2, 2, x.separators)
        one.update_past_tok_ids(torch.tensor([list(x.tokens)]))
        return one_of(one([(numbers, numbers)])[0][0].flatten(), x)

    return choose


CHOOSE: dict[str, Callable[[Path], Choose]] = {
    "pyramidkv": pyramidkv, "h2o": h2o, "snapkv": snapkv, "tova": tova, "sepllm": sepllm,
    "expected-attention": expected_attention, "keydiff": keydiff, "adakv": adakv, "lacache": lacache,
}  # fmt: skip

"""Records what authors' code keeps and computes: files of tests/fixtures/authors.

    python scripts/record_published.py NAME CHECKOUT

CHECKOUT is a clone of the repository that `RECORDERS` names for NAME, at the commit to record; torch is
needed. Classes and functions are taken from its files one by one (`taken`), because the files import versions
of transformers that are no more. Of equal scores, which smoothing by the maximum gives neighbours, `topk`
takes the earliest; torch promises nothing. Prompts and the format are those of `tests/methods/recorded.py`.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.methods import recorded

WINDOW, KERNEL = 8, 5
SNAP = dict(window=WINDOW, kernel=KERNEL)
LAYERS = recorded.model().config.layers


def taken(file: Path, *names: str, numbers: dict[int, int] | None = None, **more: Any) -> list[Any]:
    """Functions and classes of a file by their names, without what else it does; `more` they find as globals.

    numbers: constants in them that are replaced, where code is written for texts of thousands of tokens.
    """
    tree = ast.parse(file.read_text())
    parts = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and type(node.value) is int:
            node.value = (numbers or {}).get(node.value, node.value)
    known: dict[str, Any] = dict(
        torch=torch, nn=nn, F=functional, math=math, copy=copy, json=json, np=np, Optional=Any, Tuple=tuple,
        List=list, Dict=dict, Any=Any,
    )  # fmt: skip
    known |= more
    for name in names:
        parts[name].decorator_list = []
        exec(compile(ast.Module([parts[name]], []), str(file), "exec"), known)
    return [known[name] for name in names]


def tensors(row: int, layer: int) -> tuple[torch.Tensor, ...]:
    """q [1, N, T, H], k, v [1, K, T, H] and p [1, N, T, T] of a row's layer, in float64."""
    prompt = recorded.prompt(row)
    return tuple(torch.tensor(x[layer])[None] for x in (prompt.q, prompt.k, prompt.v, prompt.p))


def found(keys: torch.Tensor, held: torch.Tensor) -> np.ndarray:
    """Which of the keys [1, K, T, H] are held [1, K, S, H]: bool [K, T]."""
    same = (keys[0, :, :, None] == held[0, :, None]).all(-1)
    return same.any(-1).numpy()


def of_rows(rows: range, kept: Callable[[int, int], np.ndarray]) -> dict[int, list[np.ndarray]]:
    return {row: [kept(row, layer) for layer in range(LAYERS)] for row in rows}


def counts(row: int, budget: float) -> int:
    return int(recorded.LENGTHS[row] * budget)


def snapkv(checkout: Path) -> list[recorded.Case]:
    """One selection per query head, smoothed by the maximum; what is shorter than the budget stays whole."""
    file = checkout / "snapkv" / "monkeypatch" / "snapkv_utils.py"
    (cluster,) = taken(file, "SnapKVCluster")

    def kept(budget: float) -> Callable[[int, int], np.ndarray]:
        def of(row: int, layer: int) -> np.ndarray:
            q, k, v, _ = tensors(row, layer)
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            one = cluster(WINDOW, counts(row, budget), KERNEL, "maxpool")
            return found(k, one.update_kv(k, q, v, None, None)[0])

        return of

    rows = {0.25: range(3), 0.75: range(4)}
    return [
        recorded.Case("snapkv", dict(budget=b, variant="paper", **SNAP), of_rows(r, kept(b)))
        for b, r in rows.items()
    ]


def kvcache_factory(checkout: Path) -> list[recorded.Case]:
    """SnapKV and PyramidKV with one selection per KV head, smoothed by the maximum."""
    file = checkout / "pyramidkv" / "pyramidkv_utils.py"
    helpers = ("repeat_kv", "_gqa_groups", "_reduce_group_scores", "_grouped_window_attn_cache")
    *_, snap, pyramid = taken(
        file, *helpers, "_select_topk_kv", "SnapKVCluster", "PyramidKVCluster", _debug_print=lambda *_: None
    )
    more = {"num_hidden_layers": LAYERS, "beta": 2}

    def kept(id: str, budget: float) -> Callable[[int, int], np.ndarray]:
        def of(row: int, layer: int) -> np.ndarray:
            q, k, v, _ = tensors(row, layer)
            sizes = dict(window_size=WINDOW, kernel_size=KERNEL, pooling="maxpool")
            sizes["max_capacity_prompt"] = counts(row, budget)
            one = snap(**sizes) if id == "snapkv" else pyramid(**sizes, **more, layer_idx=layer)
            return found(k, one.update_kv(k, q, v, None, 2)[0])

        return of

    hyper = {"snapkv": SNAP, "pyramidkv": dict(SNAP, beta=2.0, page=4)}
    rows = {0.25: range(3), 0.75: range(4)}
    return [
        recorded.Case(id, dict(budget=b, **hyper[id]), of_rows(r, kept(id, b)))
        for id in hyper
        for b, r in rows.items()
    ]


def a2sf(checkout: Path) -> list[recorded.Case]:
    """The code of today, with the number of newest tokens given; a budget has to be above it."""
    folder = checkout / "utils_real_drop"
    (base,) = taken(folder / "policies" / "base.py", "CompressionPolicy")
    (policy,) = taken(folder / "policies" / "a2sf.py", "A2SFPolicy", CompressionPolicy=base)
    (attention,) = taken(folder / "attention.py", "compressed_attention", CompressionPolicy=base)

    def kept(budget: float, recent: int) -> Callable[[int, int], np.ndarray]:
        def of(row: int, layer: int) -> np.ndarray:
            q, k, v, _ = tensors(row, layer)
            one = policy(k.shape[1], counts(row, budget), 0.95, recent)
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            _, index = attention(q, k, v, policy=one, attn_mask=None, head_dim=q.shape[-1])
            return np.stack([np.isin(np.arange(q.shape[2]), head) for head in index[0]])

        return of

    cases = {(0.75, None): range(4), (0.25, 4): range(4)}
    return [
        recorded.Case(
            "a2sf",
            dict(budget=b, variant="prefill") | ({} if recent is None else {"newest": recent}),
            of_rows(rows, kept(b, 16 if recent is None else recent)),
        )  # fmt: skip
        for (b, recent), rows in cases.items()
    ]


def a2sf_first(checkout: Path) -> list[recorded.Case]:
    """The first commit's code, where heads of a group are added up before."""
    (layerwise,) = taken(checkout / "utils_real_drop" / "modify_llama.py", "H2OKVCache_LayerWise")

    def kept(budget: float) -> Callable[[int, int], np.ndarray]:
        def of(row: int, layer: int) -> np.ndarray:
            _, k, v, p = tensors(row, layer)
            grouped = p.reshape(1, k.shape[1], -1, *p.shape[2:]).sum(2)
            one = layerwise(hh_size=counts(row, budget), recent_size=0)
            return found(k, one((k, v), grouped)[0])

        return of

    return [recorded.Case("a2sf", dict(budget=b), of_rows(range(4), kept(b))) for b in (0.25, 0.75)]


def l2compress(checkout: Path) -> list[recorded.Case]:
    """The first layer stays whole. The ratio is such that rounding up gives the budget."""
    (compress,) = taken(checkout / "cache.py", "l2_compress", ceil=math.ceil)

    def kept(budget: float) -> Callable[[int, int], np.ndarray]:
        def of(row: int, layer: int) -> np.ndarray:
            every = [tensors(row, i)[1:3] for i in range(LAYERS)]
            ratio = (counts(row, budget) - 0.5) / recorded.LENGTHS[row]
            held = compress(every, keep_ratio=ratio, prune_after=1, skip_layers=[0])
            return found(every[layer][0], held[layer][0])

        return of

    hyper = [(b, dict(budget=b, skip_layers=1)) for b in (0.25, 0.75)]
    return [recorded.Case("l2compress", more, of_rows(range(4), kept(b))) for b, more in hyper]


def simlayerkv(checkout: Path) -> list[recorded.Case]:
    """The form for prompts, over windows of 8 tokens in place of 512; lazy layers keep 4 + 16 tokens."""
    file = checkout / "LongBench" / "SimLayerKV_attention_llama.py"
    (weights,) = taken(file, "compute_attention_sink_weights", numbers={512: 8})

    def kept(threshold: float) -> Callable[[int, int], np.ndarray]:
        def of(row: int, layer: int) -> np.ndarray:
            _, k, _, p = tensors(row, layer)
            lazy = weights(p)[:, :, -32:].mean() > threshold
            at = np.arange(k.shape[2])
            near = (at < 4) | (at >= k.shape[2] - 16)
            return np.tile(near if lazy else near | True, (k.shape[1], 1))

        return of

    hyper = dict(variant="prefill", window=16, page=4)
    return [
        recorded.Case("simlayerkv", hyper | {"threshold": t}, of_rows(range(4), kept(t))) for t in (0.3, 0.5)
    ]


def headkv(checkout: Path) -> dict[str, np.ndarray]:
    """How many slots every head has, by a steep profile, of prompts and budgets in slots."""
    file = checkout / "headkv" / "snapkv_utils.py"
    profile, found = np.array([[0.02, 0.9], [0.05, 0.03]]), {"profile": np.array([[0.02, 0.9], [0.05, 0.03]])}
    with tempfile.TemporaryDirectory() as folder:
        scores = Path(folder) / "Important_Head" / "head_score"
        scores.mkdir(parents=True)
        heads = {f"{i}-{j}": [x] for (i, j), x in np.ndenumerate(profile)}
        name = "Meta-Llama-3-8B-Instruct_retrieval_reasoning_heads.json"
        (scores / name).write_text(json.dumps(heads))
        root = str(Path(folder) / "headkv" / "snapkv_utils.py")
        (cluster,) = taken(file, "ReasonSnapKVCluster", __file__=root, os=__import__("os"))
        for budget, tokens in ((24, 96), (24, 40), (48, 60), (16, 32)):
            lens = []
            for layer in range(len(profile)):
                one = cluster(
                    WINDOW, KERNEL, "maxpool", budget, "reason", 1.5, 1, layer, *profile.shape, "llama"
                )
                q, k, v = (torch.randn(1, profile.shape[1], tokens, 4) for _ in range(3))
                one.update_kv(k, q, v)
                lens.append(one.head_lens.numpy())
            found[f"slots/{budget}/{tokens}"] = np.stack(lens)
    return found


def keyformer(checkout: Path) -> dict[str, np.ndarray]:
    """Mean and standard deviation of every token's score over the noise, from 2000 draws."""
    file = checkout / "models" / "gptj-keyformer-lib" / "modeling_gptj.py"
    (attention,) = taken(file, "GPTJAttention")
    q, k, v, _ = (x.float() for x in tensors(3, 0))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    seen = torch.tril(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool))[None, None]
    one = SimpleNamespace(bias=seen, scale_attn=math.sqrt(q.shape[-1]), attn_dropout=lambda x: x)
    torch.manual_seed(0)
    scores = [attention._attn(one, q, k, v, keyformer=True, kv_cache=100.0)[2].double() for _ in range(2000)]
    drawn = torch.stack(scores)
    return {"mean": drawn.mean(0).numpy(), "deviation": drawn.std(0).numpy()}


def zeromerge(checkout: Path) -> dict[str, np.ndarray]:
    """A prompt's heavy hitters, a merge into the one residual slot, and what queries get of what it holds."""
    file = checkout / "mergekv" / "mergekv.py"
    names = ("topk_split", "score_scaled_dot_product_attention", "de_repeat_kv", "cache_init", "cache_merge")
    _, attend, grouped, start, merge = taken(file, *names)
    known, out = dict(cache_dense=1, metric="dot_product", score_update="max"), {}
    for row in range(len(recorded.LENGTHS)):
        for layer in range(LAYERS):
            q, k, v, _ = tensors(row, layer)
            share = q.shape[1] // k.shape[1]
            every = (x.repeat_interleave(share, 1) for x in (k, v))
            _, scores = attend(q, *every, None, None, 0.6, 0.98)
            budget = counts(row, 0.5)
            sizes = dict(cache_budget=budget, cache_tail=int(0.4 * budget))
            keys = start(k, v, scores=grouped(scores, share), **sizes, **known)[0]
            out[f"kept/{row}/{layer}"] = found(k, keys[:, :, 1:])
    rng = np.random.default_rng(47)
    held = {name: torch.tensor(rng.normal(size=(1, 2, 12, 8))) for name in ("k", "v")}
    held["weight"] = torch.ones(1, 2, 12, dtype=torch.float64)
    held["weight"][..., 0] = 5
    # The slot that takes up has less than the one that leaves in one head, and more in the other.
    held["score"] = torch.tensor(rng.uniform(1, 2, (1, 2, 12)))
    held["score"][0, :, 0] = torch.tensor([0.5, 3.0])
    out |= {f"before/{name}": x.numpy().copy() for name, x in held.items()}
    new = [torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), torch.ones(1, 2, 1), torch.ones(1, 2, 1)]
    after = merge(*(x.double() for x in new), *held.values(), **known)
    out |= {f"after/{name}": x.numpy()[:, :, 0] for name, x in zip(held, after, strict=True)}
    q = torch.tensor(rng.normal(size=(1, 2, 1, 8)))
    before = [torch.tensor(out[f"before/{name}"]) for name in ("k", "v", "weight")]
    out |= {"q": q.numpy(), "attended": attend(q, *before[:2], None, before[2], 0.6, 0.98)[0].numpy()}
    return out


def cam(checkout: Path) -> dict[str, np.ndarray]:
    """The streaming form, over 4 tokens in place of 16: the chance of a merge, and the values it leaves."""
    file = checkout / "generate_task" / "streaming_llm" / "kv_cache_cam.py"
    (merge,) = taken(file, "slicev", numbers={16: 4})
    rng = np.random.default_rng(48)
    values, attention = rng.normal(size=(1, 3, 12, 6)), rng.uniform(0.2, 1, (1, 3, 1, 12))
    # The token in front of the recent ones received more than they in one head, and nothing in another.
    attention[0, :2, 0, 3] = 2.0, 0.0
    chances, plain = [], torch.bernoulli
    torch.bernoulli = lambda chance: chances.append(chance) or torch.ones_like(chance)
    x = torch.tensor(values)
    merge(x, 4, 12, "recent", None, torch.tensor(attention), merge=True)
    torch.bernoulli = plain
    return {
        "before": values, "attention": attention[:, :, 0], "chance": chances[0].numpy()[..., 0],
        "after": x.numpy(),
    }  # fmt: skip


def earliest(x: torch.Tensor, k: int, dim: int = -1, **_: Any) -> Any:
    """As `topk`, which takes any of equal elements."""
    index = x.argsort(dim=dim, descending=True, stable=True).narrow(dim, 0, k)
    return torch.return_types.topk((x.gather(dim, index), index))


RECORDERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "snapkv": ("FasterDecoding/SnapKV", snapkv),
    "kvcache_factory": ("Zefan-Cai/KVCache-Factory", kvcache_factory),
    "a2sf": ("Dirac-Notation/A2SF", a2sf),
    "a2sf_first": ("Dirac-Notation/A2SF, its first commit", a2sf_first),
    "l2compress": ("alessiodevoto/l2compress", l2compress),
    "simlayerkv": ("sail-sg/SimLayerKV", simlayerkv),
    "headkv": ("FYYFU/HeadKV", headkv),
    "keyformer": ("d-matrix-ai/keyformer-llm", keyformer),
    "zeromerge": ("SusCom-Lab/ZSMerge", zeromerge),
    "cam": ("zyxxmu/cam", cam),
}


def main() -> None:
    names = ", ".join(f"{name}: {repository}" for name, (repository, _) in RECORDERS.items())
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], epilog=names)
    parser.add_argument("name", choices=RECORDERS)
    parser.add_argument("checkout", type=Path)
    args = parser.parse_args()
    # Masks of the lowest float64 have the default type.
    torch.set_default_dtype(torch.float64)
    vars(torch)["topk"] = earliest
    torch.Tensor.topk = earliest  # type: ignore[assignment]
    made = RECORDERS[args.name][1](args.checkout)
    cases, numbers = (made, {}) if isinstance(made, list) else ([], made)
    recorded.write(args.name, recorded.commit_of(args.checkout), cases, numbers)


if __name__ == "__main__":
    main()

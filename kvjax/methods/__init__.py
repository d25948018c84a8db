"""Methods: every published method as one short function, and the one table that names them all."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from kvjax.grammar import STEP, Method, chain, check
from kvjax.methods.eviction import (
    adakv,
    expected_attention,
    h2o,
    keepkv,
    kvzip,
    l2compress,
    pyramidkv,
    random,
    sink_recent,
    snapkv,
    streamingllm,
    tova,
)
from kvjax.methods.quantisation import fp8, full, int4, int8, kivi
from kvjax.methods.reading import quest


class MethodInfo(NamedTuple):
    """One row of the table of methods. phase says when it acts; training whether it needs fitted weights."""

    id: str
    title: str
    arxiv: str
    year: int | None
    family: str
    verbs: tuple[str, ...]
    phase: str
    training: bool


class _Row(NamedTuple):
    build: Callable[..., Method]
    title: str
    arxiv: str
    year: int | None
    family: str


TABLE: dict[str, _Row] = {
    "full": _Row(full, "Full cache", "", None, "baseline"),
    "random": _Row(random, "Random eviction", "", None, "baseline"),
    "sink-recent": _Row(sink_recent, "Sinks and recent tokens", "", None, "baseline"),
    "streamingllm": _Row(
        streamingllm, "Efficient Streaming Language Models with Attention Sinks", "2309.17453", 2023, "selection-dynamic"
    ),
    "l2compress": _Row(
        l2compress, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", "2406.11430", 2024,
        "selection-static",
    ),
    "h2o": _Row(
        h2o, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", "2306.14048", 2023,
        "selection-dynamic",
    ),
    "tova": _Row(tova, "Transformers are Multi-State RNNs", "2401.06104", 2024, "selection-dynamic"),
    "snapkv": _Row(
        snapkv, "SnapKV: LLM Knows What You are Looking for Before Generation", "2404.14469", 2024, "selection-static"
    ),
    "pyramidkv": _Row(
        pyramidkv, "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling", "2406.02069", 2024,
        "budget-layer",
    ),
    "adakv": _Row(
        adakv, "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference",
        "2407.11550", 2024, "budget-head",
    ),
    "expected-attention": _Row(
        expected_attention,
        "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution",
        "2510.00636", 2025, "selection-static",
    ),
    "kvzip": _Row(
        kvzip, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", "2505.23416", 2025,
        "selection-static",
    ),
    "keepkv": _Row(
        keepkv, "KeepKV: Achieving Periodic Lossless KV Cache Compression for Efficient LLM Inference", "2504.09936",
        2025, "merge-token",
    ),
    "int8": _Row(int8, "Per-token int8", "", None, "baseline"),
    "int4": _Row(int4, "Per-token int4", "", None, "baseline"),
    "fp8": _Row(fp8, "Per-token float8", "", None, "baseline"),
    "kivi": _Row(
        kivi, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", "2402.02750", 2024, "quant-mixed"
    ),
    "quest": _Row(
        quest, "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", "2406.10774", 2024,
        "retrieval-sparse",
    ),
}  # fmt: skip

ALIASES = {
    "knorm": "l2compress",
    "streaming-llm": "streamingllm",
    "ada-kv": "adakv",
    "sinkrecent": "sink-recent",
}


def resolve(id: str) -> str:
    """The table's id for an id or alias; ValueError naming the nearest one otherwise."""
    name = ALIASES.get(id.lower().replace("_", "-"), id.lower().replace("_", "-"))
    if name not in TABLE:
        near = difflib.get_close_matches(name, [*TABLE, *ALIASES], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known methods: {', '.join(TABLE)}"
        raise ValueError(f"unknown method {id!r}: {hint}")
    return name


@lru_cache(maxsize=None)
def _build(id: str, hyper: tuple[tuple[str, Any], ...]) -> Method:
    built = dataclasses.replace(TABLE[id].build(**dict(hyper)), spec=(id, hyper))
    check(built)
    return built


def method(id: str, **hyper: Any) -> Method:
    """The method `id` with its hyper-parameters; equal arguments give the same object.

    budget is a fraction of the tokens kept (float in (0, 1]) or slots per head (int >= 1; the mean where
    heads or layers differ).

    >>> method("snapkv", budget=0.25, window=16).id
    'snapkv'
    """
    name = resolve(id)
    known = inspect.signature(TABLE[name].build).parameters
    for key in hyper:
        if key not in known:
            near = difflib.get_close_matches(key, list(known), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known) or 'none'}"
            raise ValueError(f"method {name!r} has no hyper-parameter {key!r}: {hint}")
    if "budget" in known and "budget" not in hyper:
        raise ValueError(f"method {name!r} needs budget=: a fraction such as 0.25, or a number of slots")
    return _build(name, tuple(sorted(hyper.items())))


def takes_budget(id: str) -> bool:
    """Whether a method has a budget to choose."""
    return "budget" in inspect.signature(TABLE[resolve(id)].build).parameters


def methods() -> list[MethodInfo]:
    """Every method in the table, in its order."""
    out = []
    for id, row in TABLE.items():
        m = row.build(**({"budget": 0.5} if takes_budget(id) else {}))
        verbs = tuple(n for n in ("keep", "store", "read") if getattr(m, n) is not None)
        if m.keep is not None and not m.keep.allocate.uniform:
            verbs = (*verbs, "place")
        both = m.store is not None or (m.keep is not None and m.keep.when == STEP)
        phase = "decode" if m.read is not None else "both" if both else "prefill" if m.keep else "none"
        out.append(MethodInfo(id, row.title, row.arxiv, row.year, row.family, verbs, phase, False))
    return out


class _CallableModule(types.ModuleType):
    # `kvjax.methods` is both this folder and the public call that lists it.
    def __call__(self) -> list[MethodInfo]:
        return methods()


sys.modules[__name__].__class__ = _CallableModule

__all__ = ["ALIASES", "TABLE", "MethodInfo", "chain", "method", "methods", "resolve", "takes_budget"]

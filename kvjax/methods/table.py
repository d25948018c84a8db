"""The one table of methods: id, how to build it, family, arXiv id, title. A new method is a new row."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvjax.grammar import Method
from kvjax.methods import eviction, quantisation, reading


class Row(NamedTuple):
    """What the table says about a method; arxiv is "" for baselines."""

    build: Callable[..., Method]
    family: str
    arxiv: str
    title: str

    @property
    def year(self) -> int | None:
        """The year in the arXiv id."""
        return 2000 + int(self.arxiv[:2]) if self.arxiv else None


def _baseline(build: Callable[..., Method], title: str) -> Row:
    return Row(build, "baseline", "", title)


TABLE: dict[str, Row] = {
    "full": _baseline(quantisation.full, "Full cache"),
    "random": _baseline(eviction.random, "Random eviction"),
    "sink-recent": _baseline(eviction.sink_recent, "Sinks and recent tokens"),
    "streamingllm": Row(
        eviction.streamingllm,
        "selection-dynamic",
        "2309.17453",
        "Efficient Streaming Language Models with Attention Sinks",
    ),
    "l2compress": Row(
        eviction.l2compress,
        "selection-static",
        "2406.11430",
        "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
    ),
    "h2o": Row(
        eviction.h2o,
        "selection-dynamic",
        "2306.14048",
        "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
    ),
    "tova": Row(eviction.tova, "selection-dynamic", "2401.06104", "Transformers are Multi-State RNNs"),
    "snapkv": Row(
        eviction.snapkv,
        "selection-static",
        "2404.14469",
        "SnapKV: LLM Knows What You are Looking for Before Generation",
    ),
    "pyramidkv": Row(
        eviction.pyramidkv,
        "budget-layer",
        "2406.02069",
        "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
    ),
    "adakv": Row(
        eviction.adakv,
        "budget-head",
        "2407.11550",
        "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference",
    ),
    "expected-attention": Row(
        eviction.expected_attention,
        "selection-static",
        "2510.00636",
        "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution",
    ),
    "kvzip": Row(
        eviction.kvzip,
        "selection-static",
        "2505.23416",
        "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction",
    ),
    "keepkv": Row(
        eviction.keepkv,
        "merge-token",
        "2504.09936",
        "KeepKV: Achieving Periodic Lossless KV Cache Compression for Efficient LLM Inference",
    ),
    "int8": _baseline(quantisation.int8, "Per-token int8"),
    "int4": _baseline(quantisation.int4, "Per-token int4"),
    "fp8": _baseline(quantisation.fp8, "Per-token float8"),
    "kivi": Row(
        quantisation.kivi,
        "quant-mixed",
        "2402.02750",
        "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache",
    ),
    "quest": Row(
        reading.quest,
        "retrieval-sparse",
        "2406.10774",
        "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference",
    ),
}

ALIASES = {
    "knorm": "l2compress",
    "streaming-llm": "streamingllm",
    "ada-kv": "adakv",
    "sinkrecent": "sink-recent",
}

"""kvjax: KV-cache compression for decoders, in JAX. Every method a short sentence in one grammar.

One alphabet names every dimension, in einsums, annotations and docstrings:
B batch, T new tokens, S slots, N query heads, K KV heads, G = N / K, H head dim, V values' dim or vocabulary,
D model dim, F MLP dim, L layers, Lg layers of a group, R latent rank, P pages, M pages per table row.
Keys are [B, K, S, H]: each head's slots are contiguous.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "load": "kvjax.loading",
    "Model": "kvjax.models.model",
    "methods": "kvjax.methods",
    "method": "kvjax.methods",
    "chain": "kvjax.grammar",
    "per_layer": "kvjax.methods.per_layer",
    "prefill": "kvjax.generation",
    "step": "kvjax.generation",
    "generate": "kvjax.generation",
    "encode_context": "kvjax.context",
    "Sampler": "kvjax.sampling",
    "nbytes": "kvjax.cache",
    "kept_positions": "kvjax.cache",
    "fork": "kvjax.place.rows",
    "save_cache": "kvjax.cache_file",
    "load_cache": "kvjax.cache_file",
    "compare": "kvjax.eval.compare",
    "InputError": "kvjax.errors",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

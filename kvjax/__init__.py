"""kvjax: KV-cache compression for decoders, in JAX. Every method is a short sentence in one grammar.

One alphabet names every dimension, in einsums, annotations and docstrings:
B batch, T new tokens, S slots, N query heads, K KV heads, G = N / K, H head dim, V values' dim or vocabulary,
D model dim, F MLP dim, L layers, Lg layers of a group, R latent rank, P pages, M pages per table row.
Keys are [B, K, S, H]: each head's slots are contiguous.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


class _CheckoutFinder:
    """Imports the three subpackages beside this one in a checkout, and nothing else from there.

    In an installed package, setup.py has put them inside it.
    """

    rooms = {f"{__name__}.{room}": room for room in ("models", "configs", "pallas_kernels")}

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in cls.rooms:
            return None
        home = Path(__file__).parents[1] / cls.rooms[name]
        if not (home / "__init__.py").is_file():
            return None
        return importlib.util.spec_from_file_location(
            name, home / "__init__.py", submodule_search_locations=[str(home)]
        )


if not (Path(__file__).parent / "models").is_dir():
    sys.meta_path.append(_CheckoutFinder)

_HOMES = {
    "load": "kvjax.io.load",
    "start_hosts": "kvjax.hosts.start",
    "fetch": "kvjax.hosts.arrays",
    "Rules": "kvjax.mesh.rules",
    "spread": "kvjax.io.load",
    "shardings": "kvjax.state.shardings",
    "Model": "kvjax.models.model",
    "methods": "kvjax.methods",
    "architectures": "kvjax.models.architectures",
    "architecture": "kvjax.models.architectures",
    "method": "kvjax.methods",
    "chain": "kvjax.methods.parse",
    "per_layer": "kvjax.methods.per_layer",
    "by_layer": "kvjax.methods.per_layer",
    "tiered": "kvjax.methods.tiers",
    "in_chunks": "kvjax.methods.wrappers",
    "in_blocks": "kvjax.methods.wrappers",
    "merging": "kvjax.methods.wrappers",
    "while_decoding": "kvjax.methods.wrappers",
    "phased": "kvjax.methods.wrappers",
    "prepare": "kvjax.api.prepare",
    "prefill": "kvjax.api.prefill",
    "step": "kvjax.api.step",
    "verify": "kvjax.api.verify",
    "rollback": "kvjax.api.rollback",
    "generate": "kvjax.api.generate",
    "speculate": "kvjax.api.speculate",
    "Lookup": "kvjax.api.drafts",
    "FirstCodes": "kvjax.api.drafts",
    "FewerSlots": "kvjax.api.drafts",
    "chat": "kvjax.api.chat",
    "likelihood": "kvjax.api.likelihood",
    "shorten": "kvjax.prompts.shorten",
    "fit_classifier": "kvjax.prompts.classifier",
    "parallel_contexts": "kvjax.api.parallel_contexts",
    "encode_context": "kvjax.api.contexts",
    "Sampler": "kvjax.api.sampling",
    "RepetitionPenalty": "kvjax.api.logit_processors",
    "FrequencyPenalty": "kvjax.api.logit_processors",
    "nbytes": "kvjax.state.cache",
    "kept_positions": "kvjax.state.cache",
    "kept_texts": "kvjax.api.kept_texts",
    "summary": "kvjax.api.summary",
    "fork": "kvjax.api.fork",
    "join": "kvjax.api.join",
    "LongText": "kvjax.api.long_text",
    "take_rows": "kvjax.api.rows",
    "reset_rows": "kvjax.api.rows",
    "save_cache": "kvjax.io.cache_file",
    "load_cache": "kvjax.io.cache_file",
    "send_cache": "kvjax.io.cache_stream",
    "receive_cache": "kvjax.io.cache_stream",
    "quality_in_time": "kvjax.io.cache_stream",
    "save_chat": "kvjax.io.chat_file",
    "load_chat": "kvjax.io.chat_file",
    "scores": "kvjax.api.scores",
    "fit": "kvjax.fitting",
    "fit_coder": "kvjax.fitting.statistics.file_coders",
    "fit_links": "kvjax.fitting.prompts.links",
    "save_fitted": "kvjax.grammar.fitted",
    "load_fitted": "kvjax.grammar.fitted",
    "draw_scores": "kvjax.eval.report.scores_picture",
    "compare": "kvjax.eval.compare",
    "InputError": "kvjax.base.errors",
}

# Public modules, imported on first use.
_MODULES = ("pure", "words")
# Public modules with further dependencies.
_OPTIONAL = ("nnx",)

__all__ = [*_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in (*_MODULES, *_OPTIONAL):
        return importlib.import_module(f"kvjax.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'kvjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_MODULES, *_OPTIONAL])

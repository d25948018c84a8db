"""Papers that are verbs, architectures or systems here, not methods: what to write instead."""

from __future__ import annotations

# By the names that papers and their code use.
VERBS = {
    "llmlingua": "kvjax.shorten(model, documents, by='llmlingua')",
    "longllmlingua": "kvjax.shorten(model, documents, question=..., by='longllmlingua')",
    "cpc": "kvjax.shorten(model, documents, question=..., by='cpc')",
    "cacheblend": "kvjax.join(model, caches, texts=..., recompute=0.15)",
    "prompt-cache": "kvjax.join(model, caches)",
    "block-attention": "kvjax.join(model, caches)",
    "kvlink": "kvjax.join(model, caches), without its link tokens",
    "hydragen": "kvjax.fork(cache, copies, room=...)",
    "bifurcated-attention": "kvjax.fork(cache, copies, room=...)",
    "speculative-decoding": "kvjax.speculate(model, tokens, draft=...)",
}


def elsewhere(name: str) -> str:
    """What to write for a paper that is not a method, as a clause; empty for an unknown name.

    >>> elsewhere("CacheBlend")
    'is kvjax.join(model, caches, texts=..., recompute=0.15)'
    >>> elsewhere("YOCO")
    'is an architecture: see `kvjax architectures yoco`'
    """
    from kvjax.models.architectures import architecture

    name = name.lower().replace("_", "-").replace(" ", "-")
    if name in VERBS:
        return f"is {VERBS[name]}"
    try:
        return f"is an architecture: see `kvjax architectures {architecture(name).id}`"
    except ValueError:
        return ""

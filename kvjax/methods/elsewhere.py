"""Papers that are verbs, architectures or rewrites of weights here, not methods: what to write instead."""

from __future__ import annotations

# By the name in the paper or its code: the call to write instead.
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
    "quantspec": "kvjax.speculate(model, tokens, method='int8', draft='int4'), with codes of the draft's own",
    "triforce": "kvjax.speculate(model, tokens, draft=...), with a method such as 'quest' as the one draft",
    "magicdec": "kvjax.speculate(model, tokens, draft=...), with a method such as 'snapkv' as the draft",
    "sirius": "kvjax.speculate(model, tokens, draft=...), which accepts only what the model itself would say",
    "bild": "kvjax.speculate(model, tokens, draft=...), which accepts only what the model itself would say",
}

# Papers on weights and inputs of layers: with their rewrites, keys and values are the same numbers as before.
OF_WEIGHTS = {
    "awq": "scales channels of weights before they are quantised; kvjax.load reads checkpoints in AWQ's form",
    "os-plus": "shifts and scales inputs of layers; omniquant has shifts and scales of keys and values",
    "outlier-suppression": "moves scales of norms into weights; omniquant has scales of keys and values",
}


def elsewhere(name: str) -> str:
    """What to write for a paper that is not a method, as a clause; empty for an unknown name.

    >>> elsewhere("CacheBlend")
    'is kvjax.join(model, caches, texts=..., recompute=0.15)'
    >>> elsewhere("YOCO")
    'is an architecture: see `kvjax architectures yoco`'
    >>> elsewhere("os-plus").startswith("changes no number of a cache")
    True
    """
    from kvjax.models.architectures import architecture

    name = name.lower().replace("_", "-").replace(" ", "-")
    if name in VERBS:
        return f"is {VERBS[name]}"
    if name in OF_WEIGHTS:
        return f"changes no number of a cache, because it {OF_WEIGHTS[name]}"
    try:
        return f"is an architecture: see `kvjax architectures {architecture(name).id}`"
    except ValueError:
        return ""

"""No methods: verbs, parts of methods, architectures, conversions, rewrites of weights, papers left out."""

from __future__ import annotations

# By the name in the paper or its code: the call to write instead.
VERBS = {
    "llmlingua": "kvjax.shorten(model, documents, by='llmlingua')",
    "llmlingua2": "kvjax.shorten(model, documents, by='llmlingua2'), and classifier=kvjax.fit_classifier()",
    "llmlingua-2": "kvjax.shorten(model, documents, by='llmlingua2'), and classifier=kvjax.fit_classifier()",
    "longllmlingua": "kvjax.shorten(model, documents, question=..., by='longllmlingua')",
    "cpc": "kvjax.shorten(model, documents, question=..., by='cpc')",
    "cacheblend": "kvjax.join(model, caches, texts=..., recompute=0.15)",
    "prompt-cache": "kvjax.join(model, caches)",
    "block-attention": "kvjax.join(model, caches)",
    "kvlink": "kvjax.join(model, caches, links=kvjax.fit_links(model, texts))",
    "kvtc": "kvjax.fit_coder(model, texts, kind='kvtc'), for save_cache(..., coder=) and send_cache",
    "hydragen": "kvjax.fork(cache, copies, room=...)",
    "bifurcated-attention": "kvjax.fork(cache, copies, room=...)",
    "speculative-decoding": "kvjax.speculate(model, tokens, draft=...)",
    "triforce": "kvjax.speculate(model, tokens, draft=kvjax.FewerSlots('quest(budget=0.1)'))",
    "magicdec": "kvjax.speculate(model, tokens, draft=kvjax.FewerSlots('quest(budget=0.1)')), over one cache",
    "sirius": "kvjax.speculate(model, tokens, draft=...), which accepts only what the model itself would say",
    "bild": "kvjax.speculate(model, tokens, draft=...), which accepts only what the model itself would say",
}

# Papers on weights and inputs of layers: with their rewrites, keys and values are the same numbers as before.
OF_WEIGHTS = {
    "awq": "scales channels of weights before they are quantised; kvjax.load reads checkpoints in AWQ's form",
    "os-plus": "shifts and scales inputs of layers; omniquant has shifts and scales of keys and values",
    "outlier-suppression": "moves scales of norms into weights; omniquant has scales of keys and values",
}

# Papers that make another model of a given one, which is trained or used as it is.
CONVERSIONS = {
    "eckvh": "eckvh:kv_heads=2",
    "lorc": "lorc",
    "matryoshkakv": "matryoshkakv:rank=16",
}

# Ideas that are parts of several methods.
PARTS = {
    "rope": "is how keys are rotated: Rope of a model's config, and Store(unrotated=True) of a method",
    "simhash": "is how 'hashevict' and 'magicpig' find keys: by the signs of random projections",
    "pq-base": "is the index of 'pqcache' and the code of 'cq': parts of a vector by their nearest centroids",
}

# What was considered and is left out: what it does, and why. `scripts.studies.left_out` measures RotorQuant.
LEFT_OUT = {
    "aoc": "its encoder (arXiv:2501.06730), a language model without feed-forwards, is trained to write a "
    "prompt into memory tokens; those of 'gisting', 'ccm' and 'kv-distill' are made by the model itself",
    "epikv": "its abstract (arXiv:2606.26472) alone was at hand, which does not define its score; 'keydiff' "
    "and 'r-kv' need no attention weights of all tokens either",
    "foresightkv": "its scorer (arXiv:2602.03203) is trained by reinforcement on answers of a reasoning "
    "model, and the code of its authors comes without a trained one and without the answers; 'locret' has a "
    "scorer that `kvjax fit` makes",
    "hisparse": "it is a buffer of a serving system for slots in host memory, without codes of its own; "
    "'quest + offloaded' has slots in host memory",
    "icpc": "it ranks words by their information under an encoder that reads both sides (arXiv:2501.01625), "
    "which no model is that kvjax loads, and no code of its authors was found; kvjax.shorten(model, "
    "documents, by='llmlingua') ranks tokens by that under a causal model",
    "lossless": "codes in memory have a fixed width; kvjax.save_cache(path, cache, coder='range') codes "
    "files without loss",
    "rotorquant": "it rotates 3 channels where 'turboquant' rotates all, with larger errors at the same "
    "bytes; 'q-int4' rotates blocks",
    "skipkv": "beside evicting sentences (arXiv:2512.07993) it steers hidden states, by a vector made from "
    "answers of a reasoning model. The code of its authors was read: it has vectors for three models of 7 "
    "to 14 billion weights, and scores tokens as 'r-kv' does, less in sentences that repeat others",
    "taco-rl": "it trains the classifier of LLMLingua-2 (arXiv:2409.13035) by rewards of answers; "
    "kvjax.shorten(model, documents, by='llmlingua2') has one that is fitted to what KVzip keeps",
    "tcra-llm": "it writes summaries by a fine-tuned T5, or removes words that change an embedding of their "
    "sentence least (arXiv:2310.15556), which takes an encoder of sentences, and a reading of the sentence "
    "per word; kvjax.shorten(model, documents, by='llmlingua') removes tokens by a language model alone",
    "thinkv": "it sorts thoughts (arXiv:2510.01290) by a calibration on answers of a reasoning model, and no "
    "code of its authors was found; 'r-kv' and 'morphkv' act while decoding without one",
    "trim-kv": "its gates (arXiv:2512.03324) are trained inside attention that they fade, and its authors "
    "have some for models of 1.7 billion weights and more; 'dms', 'wg-kv' and 'locret' have gates that are "
    "fitted to a model",
}
# Names of the same idea, by the name above.
ALSO = {
    "attention-only-compressor": "aoc",
    "trimkv": "trim-kv",
    "planarquant": "rotorquant",
    "isoquant": "rotorquant",
}


def elsewhere(name: str) -> str:
    """Say what to write for a paper that is not a method, as a clause; empty for an unknown name.

    >>> elsewhere("CacheBlend")
    'is kvjax.join(model, caches, texts=..., recompute=0.15)'
    >>> elsewhere("YOCO")
    'is an architecture: see `kvjax architectures yoco`'
    >>> elsewhere("os-plus").startswith("changes no number of a cache")
    True
    >>> elsewhere("LoRC")
    'makes another model: see `kvjax convert --help`, for example `lorc`'
    """
    from kvjax.models.architectures import architecture

    name = name.lower().replace("_", "-").replace(" ", "-")
    if name in VERBS:
        return f"is {VERBS[name]}"
    if name in OF_WEIGHTS:
        return f"changes no number of a cache, because it {OF_WEIGHTS[name]}"
    if name in PARTS:
        return PARTS[name]
    if name in CONVERSIONS:
        return f"makes another model: see `kvjax convert --help`, for example `{CONVERSIONS[name]}`"
    if (which := ALSO.get(name, name)) in LEFT_OUT:
        return f"is left out: {LEFT_OUT[which]}"
    try:
        return f"is an architecture: see `kvjax architectures {architecture(name).id}`"
    except ValueError:
        return ""

"""Catalogue of the architectures that this decoder supports: papers, config words, and states.

One row each, under the short names of the literature. The equations of a row's words are in their
files under `kvjax/models/mixers`; `docs/architectures.md` has the costs of the rows.
"""

from __future__ import annotations

import difflib
from typing import NamedTuple

from kvjax.base.errors import InputError


class ArchitectureInfo(NamedTuple):
    """A row of the catalogue of architectures.

    about: what it does, in one line. state: what a row of the cache keeps. words: what makes it in a
    `Config`. training: the shipped file of `kvjax train` that trains one, "" without one. aliases: other
    names that `architecture` accepts.
    """

    id: str
    title: str
    arxiv: str
    family: str
    about: str
    state: str
    words: str
    training: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def year(self) -> int | None:
        """The year of its preprint; None without one."""
        return 2000 + int(self.arxiv[:2]) if self.arxiv else None


_A = ArchitectureInfo
_PER_TOKEN, _CONSTANT = "per token: ", "constant: "

_GROUPING = (
    _A("transformer", "Attention Is All You Need", "1706.03762", "attn-grouping",
       "softmax attention, a key and a value per head", _PER_TOKEN + "k and v of all heads",
       "Attention(), heads = kv_heads", "bytes", ("mha",)),
    _A("mqa", "Fast Transformer Decoding: One Write-Head is All You Need", "1911.02150", "attn-grouping",
       "all query heads share one key and value head", _PER_TOKEN + "k and v of one head",
       "Attention(), kv_heads = 1", "bytes-mqa"),
    _A("gqa", "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints",
       "2305.13245", "attn-grouping", "groups of query heads share a key and value head",
       _PER_TOKEN + "k and v of the KV heads", "Attention(), kv_heads < heads", "bytes-gqa",
       ("weighted-gqa", "kdgqa")),
    _A("asymgqa", "Optimised Grouped-Query Attention Mechanism for Transformers", "2406.14963",
       "attn-grouping", "groups of unequal sizes, found by search; so do QCQA's",
       _PER_TOKEN + "k and v of the groups", "HeadMaps(q, k, k)", aliases=("qcqa",)),
    _A("gqkva", "GQKVA: Efficient Pre-training of Transformers by Grouping Queries, Keys, and Values",
       "2311.03426", "attn-grouping", "every pair of a query and a key-value group is a head",
       _PER_TOKEN + "k and v of the groups", "HeadMaps(q, k, k)"),
    _A("dha", "DHA: Learning Decoupled-Head Attention from Transformer Checkpoints via Adaptive Heads Fusion",
       "2406.06567", "attn-grouping", "unlike numbers of key heads and value heads, per layer",
       _PER_TOKEN + "k and v of their own numbers of heads", "HeadMaps(q, k, v)"),
)  # fmt: skip
_LOW_RANK = (
    _A("mla", "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model",
       "2405.04434", "attn-arch", "keys and values from a latent, and one rotated key for all heads",
       _PER_TOKEN + "latent and rotated key", "Latent", "bytes-mla"),
    _A("tpa", "Tensor Product Attention Is All You Need", "2501.06425", "low-rank",
       "queries, keys and values are sums of outer products", _PER_TOKEN + "factors of k and v",
       "TensorProduct", "bytes-tpa"),
    _A("palu", "Palu: Compressing KV-Cache with Low-Rank Projection", "2407.21118", "low-rank",
       "groups of heads store what both their projections have in common", _PER_TOKEN + "latents per group",
       "GroupedLatent"),
    _A("xquant", "XQuant: Breaking the Memory Wall for LLM Inference with KV Cache Rematerialization",
       "2508.10395", "quant", "keys and values are computed from stored inputs of layers",
       _PER_TOKEN + "the layer's input", "LayerInputs"),
    _A("clla", "Lossless KV Cache Compression to 2%", "2410.15252", "cross-layer-share",
       "adjacent layers read one layer's latents", _PER_TOKEN + "latents of some layers",
       "Latent(source=)"),
)  # fmt: skip
_SHARING = (
    _A("cla", "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention", "2405.12981",
       "cross-layer-share", "every other layer reads the slots of the one below",
       _PER_TOKEN + "k and v of half the layers", "Attention(source=)", "bytes-cla"),
    _A("mlkv", "MLKV: Multi-Layer Key-Value Heads for Memory Efficient Transformer Decoding", "2406.09297",
       "cross-layer-share", "few layers have slots, all others read them",
       _PER_TOKEN + "k and v of few layers", "Attention(source=)", "bytes-mlkv"),
    _A("lckv", "Layer-Condensed KV Cache for Efficient Inference of Large Language Models", "2405.10637",
       "cross-layer-share", "layers read the slots of a layer above them",
       _PER_TOKEN + "k and v of few layers", "Attention(source=) above", aliases=("xlayer-study",)),
    _A("yoco", "You Only Cache Once: Decoder-Decoder Architectures for Language Models", "2405.05254",
       "attn-arch", "windows or gated retention below, one global cache for all layers above",
       _PER_TOKEN + "k and v of one layer; windows or states", "Attention(source=), Retention(gated=True)",
       "bytes-yoco"),
    _A("mixattention", "Inference-Friendly Models With MixAttention", "2409.15012", "cross-layer-share",
       "windows and global layers, which share slots", _PER_TOKEN + "k and v of one layer; one window",
       "Attention(source=), windows", "bytes-mixattention"),
    _A("sa", "Beyond KV Caching: Shared Attention for Efficient LLMs", "2407.12866", "cross-layer-share",
       "layers attend with the weights of a layer below", _PER_TOKEN + "k of one layer, v of all",
       "SharedWeights"),
    _A("lisa", "Cross-layer Attention Sharing for Pre-trained Large Language Models", "2408.01890",
       "cross-layer-share", "aligned weights of the layer below, corrected by narrow queries and keys",
       _PER_TOKEN + "narrow k and v", "SharedWeights(hidden=, rank=)"),
    _A("svformer", "Value Residual Learning", "2410.17897", "cross-layer-share",
       "all layers have the first one's values, or mix them in (ResFormer)",
       _PER_TOKEN + "k of all layers, v of one", "Attention(value_source=), Attention(value_mix=)",
       "bytes-svformer", ("resformer",)),
    _A("swiftkv", "SwiftKV: Fast Prefill-Optimized Inference with Knowledge-Preserving Model Transformation",
       "2410.03960", "cross-layer-share", "upper layers make keys and values from one layer's input",
       _PER_TOKEN + "k and v of all layers", "Attention(kv_input=)"),
    _A("pod", "Compressing KV Cache for Long-Context LLM Inference with Inter-Layer Attention Similarity",
       "2412.02252", "cross-layer-share", "own keys for near tokens, another layer's for distant ones",
       _PER_TOKEN + "v of all layers, k of one per block; near keys", "SharedKeys", "bytes-pod"),
    _A("neurocache", "Neurocache: Efficient Vector Retrieval for Long-range Language Modeling", "2407.02486",
       "retrofit-training", "windows, and upper layers attend to the nearest states of what left them",
       _PER_TOKEN + "one compressed hidden state for all layers; k and v of windows",
       "HiddenCache, CacheAttention"),
    _A("attndrop", "What Matters in Transformers? Not All Attention is Needed", "2406.15786", "attn-arch",
       "layers without attention", _PER_TOKEN + "k and v of the other layers", "Dropped"),
)  # fmt: skip
_ATTENTION = (
    _A("gated-attention", "Gated Attention for Large Language Models", "2505.06708", "attn-arch",
       "a sigmoid gate per channel after attention", _PER_TOKEN + "k and v", "Attention(gate=True)"),
    _A("dsa", "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", "2512.02556", "attn-arch",
       "an indexer picks the tokens that a query attends to, by small keys of its own, or a layer below does "
       "(IndexCache, arXiv:2603.12201)", _PER_TOKEN + "latent, rotated key and index key",
       "IndexedLatent, IndexedLatent(index_source=)",
       aliases=("deepseek-sparse-attention", "lightning-indexer", "indexcache")),
    _A("moba", "MoBA: Mixture of Block Attention for Long-Context LLMs", "2502.13189", "attn-arch",
       "a query attends to its own block of tokens and to those whose mean keys it likes best",
       _PER_TOKEN + "k and v", "PickedBlocks"),
    _A("nsa", "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention",
       "2502.11089", "attn-arch",
       "compressed blocks, the blocks that attention to them points to, and a window, under gates",
       _PER_TOKEN + "k and v", "NativeSparse"),
    _A("gemma-4", "Gemma 4", "", "attn-arch",
       "full layers whose values are keys before norm and rotation", _PER_TOKEN + "one array of k and v",
       "KeyAsValue"),
    _A("attention-sinks", "gpt-oss-120b & gpt-oss-20b Model Card", "2508.10925", "attn-arch",
       "a learned logit per head that gives nothing", _PER_TOKEN + "k and v", "Attention(sink=True)"),
    _A("massive-activations", "Massive Activations in Large Language Models", "2402.17762", "attn-arch",
       "one learned key and value per head", _PER_TOKEN + "k and v", "Attention(kv_bias=True)"),
    _A("clipped-softmax", "Quantizable Transformers: Removing Outliers by Helping Attention Heads Do Nothing",
       "2306.12929", "attn-arch", "weights that can be exactly 0", _PER_TOKEN + "k and v",
       "Attention(clip=)", aliases=("quantizable-transformers",)),
    _A("forgetting", "Forgetting Transformer: Softmax Attention with a Forget Gate", "2503.02130",
       "attn-arch", "logits decay by gates that depend on the tokens between",
       _PER_TOKEN + "k, v and how much each has decayed", "Forgetting", "bytes-forgetting", ("fox",)),
    _A("path", "PaTH Attention: Position Encoding via Accumulating Householder Transformations", "2505.16381",
       "attn-arch", "positions are products of reflections that depend on the tokens between",
       _PER_TOKEN + "k as turned so far, v", "Path", "bytes-path"),
    _A("deltaformer", "Understanding Transformer from the Perspective of Associative Memory", "2505.19488",
       "attn-arch", "values less what attention to earlier ones already gives",
       _PER_TOKEN + "k and what is new in v", "DeltaFormer", "bytes-deltaformer"),
    _A("dmc", "Dynamic Memory Compression: Retrofitting LLMs for Accelerated Inference", "2403.09636",
       "retrofit-training", "every head appends a token or merges it into its last slot",
       _PER_TOKEN + "room for k and v, of which merged tokens share slots", "DynamicMerging"),
    _A("lla", "Local Linear Attention", "2510.01450", "linear-attn",
       "per query a regression of the values on the keys", _PER_TOKEN + "k and v", "LocalLinear",
       aliases=("parallax",)),
    _A("infini-attention", "Leave No Context Behind: Efficient Infinite Context Transformers with "
       "Infini-attention", "2404.07143", "attn-arch", "softmax in a segment, a linear memory of all before",
       _CONSTANT + "memory and one segment", "Infini", "bytes-infini"),
    _A("cepe", "Long-Context Language Modeling with Parallel Context Encoding", "2402.16617", "attn-arch",
       "cross-attention to an encoded context in every layer", "per token of a context: one hidden state",
       "CrossAttention, Bidirectional"),
    _A("xc-cache", "XC-Cache: Cross-Attending to Cached Context for Efficient LLM Inference", "2404.15420",
       "attn-arch", "few cross-attention layers in a frozen decoder",
       "per token of a context: one hidden state", "CrossAttention"),
    _A("block-transformer", "Block Transformer: Global-to-Local Language Modeling for Fast Inference",
       "2406.02657", "attn-arch", "one decoder over blocks, one over the tokens of a block",
       "per block: k and v of half the layers", "BlockConfig", "bytes-block"),
)  # fmt: skip
_LINEAR = (
    _A("flash-gau", "Transformer Quality in Linear Time", "2202.10447", "linear-attn",
       "one gated head: squared ReLU in a chunk, linear before it", _CONSTANT + "a sum and one chunk",
       "GatedUnit", "bytes-gau", ("gau",)),
    _A("linear-transformer", "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention",
       "2006.16236", "linear-attn", "phi(q)'phi(k) with phi = elu + 1, normalised", _CONSTANT + "S and z",
       "LinearAttention", "bytes-linear", ("linear",)),
    _A("performer", "Rethinking Attention with Performers", "2009.14794", "linear-attn",
       "positive random features of the softmax kernel", _CONSTANT + "a mean value per feature",
       "Performer", "bytes-performer"),
    _A("based", "Simple linear attention language models balance the recall-throughput tradeoff",
       "2402.18668", "linear-attn", "the second-order Taylor polynomial of exp", _CONSTANT + "S and z",
       "Based", "bytes-based"),
    _A("transformer-vq", "Transformer-VQ: Linear-Time Transformers via Vector Quantization", "2309.16354",
       "linear-attn", "softmax over keys that are codes", _CONSTANT + "count and mean per code, two blocks",
       "VectorQuantised", "bytes-transformer-vq"),
    _A("lattice", "Lattice: Learning to Efficiently Compress the Memory", "2504.05646", "linear-attn",
       "slots that move at a right angle to what they hold", _CONSTANT + "slots", "Lattice",
       "bytes-lattice"),
    _A("mesa", "MesaNet: Sequence Modeling by Locally Optimal Test-Time Training", "2506.05233",
       "linear-attn", "the ridge regression of all values on all keys so far",
       _CONSTANT + "two matrices per head", "Mesa", "bytes-mesa"),
    _A("gla", "Gated Linear Attention Transformers with Hardware-Efficient Training", "2312.06635",
       "linear-attn", "a state that decays per key channel", _CONSTANT + "S", "GatedLinear", "bytes-gla"),
    _A("gsa", "Gated Slot Attention for Efficient Linear-Time Sequence Modeling", "2409.07146",
       "linear-attn", "softmax over slots that forget", _CONSTANT + "slots of k and v", "GatedSlot"),
    _A("gated-deltanet", "Gated Delta Networks: Improving Mamba2 with Delta Rule", "2412.06464",
       "linear-attn", "a delta rule whose state decays", _CONSTANT + "S", "GatedDelta",
       "bytes-gated-deltanet"),
    _A("kda", "Kimi Linear: An Expressive, Efficient Attention Architecture", "2510.26692", "linear-attn",
       "a delta rule whose state decays per key channel", _CONSTANT + "S", "KimiDelta", "bytes-kda"),
    _A("kimi-linear", "Kimi Linear: An Expressive, Efficient Attention Architecture", "2510.26692",
       "linear-attn", "three layers of KDA to one of latents without positions",
       _PER_TOKEN + "latents of a quarter of the layers; states", "KimiDelta, Latent(turns=False)",
       "bytes-kimi-linear"),
    _A("log-linear", "Log-Linear Attention", "2506.04761", "linear-attn",
       "a state per power of two of distance", "by the logarithm of the tokens: states",
       "LogLinearMamba2, LogLinearDelta", "bytes-log-linear-mamba2"),
)  # fmt: skip
_RECURRENT = (
    _A("retnet", "Retentive Network: A Successor to Transformer for Large Language Models", "2307.08621",
       "ssm-hybrid", "a state with a fixed decay per head", _CONSTANT + "S", "Retention", "bytes-retnet"),
    _A("hgrn", "Hierarchically Gated Recurrent Neural Network for Sequence Modeling", "2311.04823",
       "ssm-hybrid", "a gated sum per channel", _CONSTANT + "one number per channel", "Hgrn", "bytes-hgrn"),
    _A("rwkv6", "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", "2404.05892",
       "ssm-hybrid", "decays and shifts that depend on the token", _CONSTANT + "S and the last inputs",
       "Rwkv6, ChannelMix(gate=True)"),
    _A("rwkv7", "RWKV-7 Goose with Expressive Dynamic State Evolution", "2503.14456", "ssm-hybrid",
       "a generalised delta rule", _CONSTANT + "S and the last inputs", "Rwkv7, ChannelMix", "bytes-rwkv7",
       ("rwkv",)),
    _A("mamba", "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", "2312.00752",
       "ssm-hybrid", "per channel a few states with decays that depend on the token",
       _CONSTANT + "states and a convolution's tail", "Mamba", "bytes-mamba"),
    _A("mamba2", "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured "
       "State Space Duality", "2405.21060", "ssm-hybrid", "heads with one decay each",
       _CONSTANT + "S and a convolution's tail", "Mamba2", "bytes-mamba2"),
    _A("mamba2-hybrid", "An Empirical Study of Mamba-based Language Models", "2406.07887", "ssm-hybrid",
       "few layers of attention among Mamba-2's", _PER_TOKEN + "k and v of few layers; states",
       "Mamba2, Attention()"),
    _A("lfm2", "LFM2 Technical Report", "2511.23404", "ssm-hybrid",
       "gated short convolutions in most layers, attention in few",
       _PER_TOKEN + "k and v of few layers; the last inputs of others", "ShortConv, Attention()"),
    _A("jamba", "Jamba: A Hybrid Transformer-Mamba Language Model", "2403.19887", "ssm-hybrid",
       "one layer of attention to seven of Mamba, experts in every other",
       _PER_TOKEN + "k and v of few layers; states", "Mamba(normed=True), Attention(), MoE"),
    _A("mcsd", "MCSD: An Efficient Language Model with Diverse Fusion", "2406.12230", "ssm-hybrid",
       "fixed weights of short and of long reach, times a projection of the token",
       _CONSTANT + "two numbers per channel", "SlopeDecay", "bytes-mcsd"),
    _A("mixcon", "MixCon: A Hybrid Architecture for Efficient and Adaptive Sequence Modeling", "",
       "ssm-hybrid", "Mamba whose output is scaled, delayed and fed back; attention and experts",
       _PER_TOKEN + "k and v of few layers; states", "Conba, Attention(), MoE", "bytes-mixcon"),
    _A("goldfinch", "GoldFinch: High Performance RWKV/Transformer Hybrid", "2407.12077", "ssm-hybrid",
       "RWKV below; keys and values from one narrow vector per token above",
       _PER_TOKEN + "a narrow vector and the id; states", "FinchC2, ChannelMix, Gold"),
    _A("recurformer", "RecurFormer: Not All Transformer Heads Need Self-Attention", "2410.12850",
       "ssm-hybrid", "heads that look near are Mamba-2's, beside those that stay",
       _PER_TOKEN + "k and v of few heads; states", "Attention(heads=), Mamba2, Config.inputs"),
)  # fmt: skip

ARCHITECTURES = {
    row.id: row for row in (*_GROUPING, *_LOW_RANK, *_SHARING, *_ATTENTION, *_LINEAR, *_RECURRENT)
}
_BY_ALIAS = {alias: row.id for row in ARCHITECTURES.values() for alias in row.aliases}


def architectures() -> list[ArchitectureInfo]:
    """List every architecture that a `Config` can describe, by family.

    Returns:
        An `ArchitectureInfo` for each: id, title, paper, family, and what a row of its cache keeps.

    >>> architectures()[0].id
    'transformer'
    """
    return list(ARCHITECTURES.values())


def architecture(id: str) -> ArchitectureInfo:
    """Describe one architecture.

    Args:
        id: its id or another name of it, in any case.

    Returns:
        Its `ArchitectureInfo`.

    Raises:
        InputError: for an unknown name; the message gives the nearest one.

    >>> architecture("FoX").words
    'Forgetting'
    """
    name = id.lower().replace("_", "-")
    name = _BY_ALIAS.get(name, name)
    if name not in ARCHITECTURES:
        near = difflib.get_close_matches(name, [*ARCHITECTURES, *_BY_ALIAS], 1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(ARCHITECTURES)}"
        raise InputError(f"unknown architecture {id!r}: {hint}")
    return ARCHITECTURES[name]

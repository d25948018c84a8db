"""Low rank: evicted or compressed slots are summarised by states of few dimensions."""

from __future__ import annotations

from typing import Annotated, Literal

from kvjax.grammar import Budget, Keep, Method, Store
from kvjax.grammar.fitted import as_fitted
from kvjax.grammar.when import STEP
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.merges.residue import Residue
from kvjax.keep.patterns import Recent
from kvjax.keep.scores.score import AccumulatedAttention
from kvjax.make.eigen_heads import EigenHeads
from kvjax.make.grouped_low_rank import GroupedLowRank
from kvjax.make.hidden_cache import HiddenStateCache
from kvjax.make.pruned_channels import PrunedChannels
from kvjax.methods.papers import paper
from kvjax.methods.parameters import Portion, Range
from kvjax.methods.shared import Amount, Depth, Fit, Ratio, Seed, Share, Window
from kvjax.store.affine import Affine
from kvjax.store.first_channels import FirstChannels
from kvjax.store.rotate import Rotate


@paper(
    "Get More with LESS: Synthesizing Recurrence with KV Cache Compression for Efficient LLM Inference",
    arxiv="2402.09398",
    family="low-rank",
    exact="deviates",
)
def less(budget: Amount, *, recent: Share = 0.5, fitted: Fit | None = None) -> Method:
    """LESS (Dong et al., 2024, arXiv:2402.09398): evicted slots are summed into a low-rank state.

    Heavy hitters and recent tokens stay as in H2O, and `Residue` accumulates the others. fitted: its kernels,
    as `kvjax fit less` writes them. With grouped queries, the tokens of a KV head are accumulated once, and
    each of its query heads reads them through its own kernel. Deviation: kernels are fitted to one eviction
    in the middle of a text and its effect on later queries, without dropout; the authors' code evicts after
    every query.
    """
    keep = Keep(
        AccumulatedAttention(), Budget(budget), Uniform(), (Recent(recent),), when=STEP,
        merge=Residue(as_fitted(fitted)),
    )  # fmt: skip
    return Method(keep)


@paper(
    "Palu: Compressing KV-Cache with Low-Rank Projection",
    arxiv="2407.21118",
    family="low-rank",
    exact="deviates",
)
def palu(
    *,
    rank: Annotated[float | int, Portion(1)] = 0.5,
    heads: Annotated[int, Range(1)] = 4,
    bits: Literal[2, 4, 8] | None = None,
    rotate: bool = True,
    ranks: Literal["equal", "fisher"] = "equal",
    fitted: Fit | None = None,
    seed: Seed = 0,
) -> Method:
    """Palu (Chang et al., 2024, arXiv:2407.21118), section 3: the cache holds latents of groups of heads.

    The weights of keys and values become products of rank `rank` for every `heads` KV heads, and the cache
    holds the outputs of the first factors; keys are computed from them before RoPE, and the second factor of
    values is merged into the output matrix (`kvjax.make.grouped_low_rank`). bits: of the latents' codes,
    token by token. rotate: a Hadamard rotation of latents, folded into the weights, so that no channel is
    larger than the others. fitted: the output of `kvjax fit palu`; products then minimise the error on texts,
    and without it the error of the weights. ranks="fisher": layers, keys and values get ranks by how much the
    loss depends on their weights; `rank` is their mean. A model must have plain attention in all layers.

    Deviation: latents are not quantised unless `bits` is given; the paper also has 3 bits. Ranks are not
    rounded to multiples of 32. The Hadamard matrix has random signs, and ranks that are not powers of two use
    one of their largest power-of-two factor. A rank's excess over its number of channels is given to the
    others in proportion.
    """
    made = GroupedLowRank(
        rank, heads, Rotate("hadamard", seed) if rotate else None, ranks == "fisher", as_fitted(fitted)
    )
    codec = None if bits is None else Affine(bits)
    return Method(store=None if codec is None else Store(codec, codec), make=made)


@paper(
    "Eigen Attention: Attention in Low-Rank Space for KV Cache Compression",
    arxiv="2408.05646",
    family="low-rank",
    exact="deviates",
)
def eigen_attention(*, threshold: Ratio = 0.9, fitted: Fit | None = None) -> Method:
    """Eigen Attention (Saxena et al., 2024, arXiv:2408.05646): keys and values in the texts' main directions.

    Keys, before RoPE, are stored in one basis for all heads of a layer, and the values of every head in their
    own; both are the right singular vectors of a few texts' keys and values. A layer keeps as many directions
    as have the share `threshold` of the sum of singular values (`EigenHeads`). The bases are folded into the
    weights. fitted: the output of `kvjax fit eigen-attention`. A model must have plain attention in all
    layers.

    Deviation: all layers have one threshold, where the paper lowers each layer's by 0.02 until its outputs
    are off by an error budget; nothing is fine-tuned. The authors' code for models with RoPE is followed:
    bases of keys do not depend on queries, as they do in its code for OPT and MPT.
    """
    return Method(make=EigenHeads(threshold, as_fitted(fitted)))


@paper(
    "KVPruner: Structural Pruning for Faster and Memory-Efficient Large Language Models",
    arxiv="2409.11057",
    family="low-rank",
    exact="deviates",
)
def kvpruner(*, keep: Ratio = 0.7, fitted: Fit | None = None) -> Method:
    """KVPruner (Lv et al., 2024, arXiv:2409.11057), section II: channels of keys and values are left out.

    The share `keep` of every head's channels stays, those whose weights are largest, of queries and keys in
    RoPE's pairs, and of values and outputs (`PrunedChannels`). fitted: the output of `kvjax fit kvpruner`, by
    how much the perplexity of a few texts grows if the channels of one layer leave; layers in which it grows
    most keep most channels, and `keep` is their mean. Without it, all layers keep equally many. A model must
    have plain attention in all layers.

    Deviation: the pruned model is not fine-tuned by LoRA. Only the paper's summary was at hand, and there was
    no code of the authors: that layers keep channels in proportion to the growth, and that channels count by
    the norms of their weights, is one reading of it. Channels of queries that meet none are computed.
    """
    return Method(make=PrunedChannels(keep, as_fitted(fitted)))


@paper(
    "Zero-Delay QKV Compression for Mitigating KV Cache and Network Bottlenecks in LLM Inference",
    arxiv="2408.04107",
    family="low-rank",
    exact="deviates",
)
def zdc(
    budget: Amount, *, rank: Annotated[float | int, Portion(1)] = 1.0, lower: Ratio = 0.5, recent: Share = 0.5
) -> Method:
    """ZDC, or ZeroC (Zhang and Shen, 2024, arXiv:2408.04107): less important tokens have a lower rank.

    The weights of every head's keys and values become products of rank `rank`, by their singular value
    decomposition, and the cache holds the outputs of the first factors, before RoPE; the second factor of
    values is folded into the output matrix (`GroupedLowRank`). At the end of a prompt, `budget` tokens stay
    with all components, those that received most attention and the newest, the share `recent` of the budget;
    all others keep the first `lower` of their components (`FirstChannels`). A model must have plain attention
    in all layers.

    Deviation: all layers have the same two ranks, where the paper's fall in shallow layers; generated tokens
    keep all components until the next prompt, which chooses among all tokens again, as they are stored.
    Queries are compressed in the paper, too, and sequences are split over devices. Only the paper's summary
    was at hand: that attention decides about tokens is one reading of it.
    """
    low = Store(FirstChannels(lower), FirstChannels(lower))
    keep = Keep(AccumulatedAttention(), Budget(budget), Uniform(), (Recent(recent),), lower=low)
    return Method(keep, make=GroupedLowRank(rank, 1))


@paper(
    "Neurocache: Efficient Vector Retrieval for Long-range Language Modeling",
    arxiv="2407.02486",
    family="low-rank",
    exact="deviates",
)
def neurocache(
    *,
    window: Window = 2048,
    top: Annotated[int, Range(1)] = 32,
    neighbours: Annotated[int, Range(1)] = 2,
    context: Annotated[int, Range(1)] = 2,
    factor: Annotated[int, Range(1)] = 8,
    layer: Depth = 0.75,
    fitted: Fit | None = None,
) -> Method:
    """Neurocache (Safaya and Yuret, 2024, arXiv:2407.02486), section 3: windows, and states of the past.

    Layers attend to `window` tokens. For every older token one state of D / `factor` channels is stored, once
    for the whole model: a normalised projection of the input of layer `layer`. A token retrieves the `top`
    states nearest to its own and `neighbours` of each; the layers from there on attend to these and to those
    of the token before it (`context`=2), and add the result to their attention (`HiddenStateCache`). fitted:
    projection and cache attention, and a LoRA, as `kvjax fit neurocache` writes them.

    Deviation: a window slides, where the paper processes segments and retrieves from earlier ones; all states
    are kept, where the paper's queue holds the newest 16384; the search is exact, where the authors' code
    takes the best of 512 buckets; missing states are masked, where the paper attends to zeros; and the
    queries and outputs of cache attention, initialised from the layer's own, are trained by low-rank updates,
    where the paper trains them in full.

    On the shipped model, with contexts of 256 tokens and a window of 64, a fit of a minute reduces the loss
    of answers from 6.2 to 2.7 nats a token; with the LoRA alone, without states, it is 3.0. Of the answers'
    tokens, 39% are right instead of 26%, and as many without states; of whole answers one in six, before and
    after. The fit that ships with kvjax is for prompts of 512 tokens and the window of its preset, 64.
    """
    made = HiddenStateCache(window, top, neighbours, context, factor, layer, as_fitted(fitted))
    return Method(make=made)

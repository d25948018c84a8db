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
from kvjax.make.grouped_low_rank import GroupedLowRank
from kvjax.make.hidden_cache import HiddenStateCache
from kvjax.methods.papers import paper
from kvjax.methods.parameters import Portion, Range
from kvjax.methods.shared import Amount, Depth, Fit, Seed, Share, Window
from kvjax.store.affine import Affine
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

"""Low rank: what is not held exactly is held in a state of few dimensions."""

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
from kvjax.make.hidden_cache import StatesOfThePast
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
    """LESS (Dong et al., 2024, arXiv:2402.09398): what H2O evicts is summed up, and answers for itself.

    Heavy hitters and recent tokens stay as in H2O, and `Residue` takes up the others. fitted: its kernels,
    as `kvjax fit less` writes them. With grouped queries, the tokens of a KV head are summed up once, and
    each of its query heads asks by a kernel of its own. Deviation: kernels are fitted to what leaves in the
    middle of a text and is missed by the queries behind it, without dropout; the authors' code evicts behind
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
    holds what their inner sides give; keys are computed from theirs before RoPE, and what makes values of
    theirs is part of the output matrix (`kvjax.make.grouped_low_rank`). bits: latents are stored so, token by
    token. rotate: a Hadamard rotation of latents, folded into the weights, so that no channel is larger than
    the others. fitted: what `kvjax fit palu` writes; products are then closest on texts, where without it
    they are closest to the weights. ranks="fisher": layers, keys and values get ranks by how much the loss
    depends on their weights; `rank` is their mean. A model must have plain attention in all layers.

    Deviation: as computed, latents are kept until `bits` is given; the paper has 3 bits, too. Ranks are no
    multiples of 32. The Hadamard matrix has random signs, and ranks that are no powers of two get one of
    their largest such factor. What a rank would have beyond its channels goes to the others in proportion.
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

    Layers see `window` tokens. Of all before, one state of D / `factor` channels is held per token, once for
    the whole model: a normalised projection of what enters layer `layer`. A token looks up the `top` nearest
    states by its own and takes `neighbours` of each; the layers from there on attend to these, to those of
    the token before it (`context`=2), and add that to their attention (`StatesOfThePast`). fitted: projection
    and cache attention, and a LoRA, as `kvjax fit neurocache` writes them.

    Deviation: a window slides, where the paper reads segments and looks among those before; all states stay,
    where the paper's queue forgets the oldest of 16384; the nearest are exact, where the authors' code takes
    the best of 512 buckets; what is not there has no weight, where it is a zero; and the queries and outputs
    of cache attention, which start as the layer's own, learn changes of low rank, where the paper learns them
    whole.

    On the shipped model, with contexts of 256 tokens and a window of 64, a fit of a minute makes answers
    likelier, at 2.7 nats a token in place of 6.2 before it; where the LoRA alone is learned, without states,
    they are at 3.0. Of the tokens of values that are asked for, 39% are right in place of 26%, and as many
    without states; of whole answers one in six, before and after. The fit that comes with kvjax is for
    prompts of 512 tokens and the window of its preset, 64.
    """
    made = StatesOfThePast(window, top, neighbours, context, factor, layer, as_fitted(fitted))
    return Method(make=made)

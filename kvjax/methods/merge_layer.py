"""Merging layers: neighbours in the stack are stored as one."""

from __future__ import annotations

from kvjax.grammar import Budget, Method
from kvjax.grammar.fitted import as_fitted
from kvjax.make.shared_layers import SharedLayers
from kvjax.methods.papers import paper
from kvjax.methods.shared import Depth, Fit, Ratio, Share
from kvjax.store.merged import MergedLayers


@paper(
    "MiniCache: KV Cache Compression in Depth Dimension for Large Language Models",
    arxiv="2405.14366",
    family="merge-layer",
    exact="deviates",
)
def minicache(*, start: Depth = 0.5, t: Share = 0.6, gamma: Share = 0.05, most: Ratio = 0.05) -> Method:
    """MiniCache (Liu et al., 2024, arXiv:2405.14366): upper layers share directions in pairs.

    `MergedLayers` does this: layers from `start` up are paired; a pair stores one direction per token and
    KV head, `t` of the way from the lower layer's to the upper one's, and the length of each layer's
    vector. Tokens whose angle is in the highest part `gamma` of the range of all angles are not merged,
    at most the share `most` of them. `minicache + int4` encodes directions and other tokens with 4 bits,
    as the paper does. A layer without a partner is left alone: the last of an odd number, and layers with
    a window. Where layers are stacked, as on TPUs, paired layers are unstacked, once per model
    (`kvjax.prepare`). Deviations: generated tokens are not merged until the next prompt ends, where the
    paper merges them step by step, and merged tokens stay merged. The bound d_min + (d_max - d_min) gamma
    is measured from the other end of the range, d_max, where layers differ most; the range is that of one
    row and KV head; keys and values of a token stay together; and `most`, which the paper does not have,
    makes sizes static.
    """
    return Method(stack=MergedLayers(start, t, gamma, Budget(float(most))))


@paper(
    "KVSharer: Efficient Inference via Layer-Wise Dissimilar KV Cache Sharing",
    arxiv="2410.18517",
    family="merge-layer",
    exact="equal",
)
def kvsharer(*, fitted: Fit | None = None) -> Method:
    """KVSharer (Yang et al., 2024, arXiv:2410.18517), section 3: layers reuse the slots of dissimilar ones.

    A sharing layer has no keys and values of its own: it uses those of a lower layer, in prompts and in steps
    (`SharedLayers`). fitted: which layers share, as `kvjax fit kvsharer` finds them: pairs of layers are
    tried in order of decreasing distance, and accepted as long as the last hidden states stay similar.
    """
    return Method(make=SharedLayers(as_fitted(fitted)))

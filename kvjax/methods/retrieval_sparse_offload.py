"""Retrieval for caches in host memory: what a step brings to the device is chosen before it is needed."""

from __future__ import annotations

from typing import Annotated

from kvjax.grammar import Budget, Method
from kvjax.methods.papers import paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Amount, Ratio, Share, Window
from kvjax.place.host import Host
from kvjax.read.foreseen import ForeseenSlots

# The first layers, which read everything: at least one, because the first layer has none below it.
FirstLayers = Annotated[int, Range(1)]
# How far below the largest logit.
Below = Annotated[float, Range(0)]


@paper(
    "InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV Cache Management",
    arxiv="2406.19707",
    family="retrieval-sparse",
    exact="deviates",
)
def infinigen(
    budget: Amount,
    *,
    alpha: Below = 5.0,
    columns: Ratio = 0.3,
    window: Window = 64,
    newest: Window = 32,
    skip_layers: FirstLayers = 2,
    resident: Share | None = None,
) -> Method:
    """InfiniGen (Lee et al., 2024, arXiv:2406.19707), section 4: a layer's slots are chosen a layer ahead.

    The input of the layer below, times this layer's query weights, predicts its queries; in a few columns of
    skewed queries and keys they rank the older tokens, and those whose logit is at most `alpha` below the
    largest one are read (`ForeseenSlots`). budget is the share (or number) of older tokens that a query reads
    at most. With `resident`, keys and values are in host memory, as in the paper, and the device caches this
    share of them, those that were read last, at least as many as one step reads; what a layer lacks can be
    copied while the layer below computes. Without it, all are in device memory. Deviation: the skew is that
    of the prompt's `window` newest queries, where the authors fit it to a sample text; the `newest` tokens
    are read beside the budget, and the largest logit is that of older tokens; every KV head counts for
    itself, where the authors read as many tokens in all heads as heads count on average; the query heads of a
    group read what any of them needs; nothing is dropped from host memory, where the paper bounds it. Prompts
    and several tokens at once are read in full.
    """
    read = ForeseenSlots(Budget(budget), newest, skip_layers, alpha, columns, window)
    return Method(read=read, host=None if resident is None else Host(resident))

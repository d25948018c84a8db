"""Retrieval by slots: everything stays in the cache, and each query reads the tokens that may matter."""

from __future__ import annotations

from typing import Annotated

from kvjax.grammar import Budget, Method
from kvjax.methods.papers import paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Amount, Layers, Window
from kvjax.read.channels import LargestChannels

# How many channels of every key are looked at.
Channels = Annotated[int, Range(1)]


@paper(
    "SparQ Attention: Bandwidth-Efficient LLM Inference",
    arxiv="2312.04985",
    family="retrieval-sparse",
    exact="deviates",
)
def sparq(budget: Amount, *, channels: Channels = 32, newest: Window = 32, skip_layers: Layers = 0) -> Method:
    """SparQ (Ribar et al., 2023, arXiv:2312.04985), section 4: few channels say which tokens to read.

    The `channels` largest channels of a query give all its logits by guess. The tokens of the largest ones
    are attended to, and the mean of all values stands for the others, with their probability by guess.
    budget is the share (or number) of older tokens that a query reads. Deviation: the `newest` tokens and the
    token itself are read beside this budget, where the authors count them in. As in the authors' code, the
    query heads of a group share channels and tokens, those of the largest sums over the heads. Prompts and
    several tokens at once are read in full.
    """
    return Method(read=LargestChannels(Budget(budget), channels, newest, skip_layers))

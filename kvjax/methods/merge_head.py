"""Merging heads: heads of a layer that attend alike share what they compare."""

from __future__ import annotations

from kvjax.grammar import Method
from kvjax.grammar.fitted import as_fitted
from kvjax.make.clustered_heads import ClusteredHeads
from kvjax.methods.papers import paper
from kvjax.methods.shared import Fit


@paper(
    "CHAI: Clustered Head Attention for Efficient LLM Inference",
    arxiv="2403.08058",
    family="merge-head",
    exact="deviates",
)
def chai(*, fitted: Fit | None = None) -> Method:
    """CHAI (Agarwal et al., 2024, arXiv:2403.08058), section 3: one head attends for all of its cluster.

    Of heads whose attention correlates, one makes the queries and keys, and the others apply its attention to
    their own values, so keys that nobody asks are not stored (`ClusteredHeads`). fitted: the clusters, as
    `kvjax fit chai` writes them. Deviation: clusters are fitted to texts, where the paper finds their number
    so, by an elbow, and the heads of each anew from the first five tokens of a prompt; they are those of
    average linkage, not of k-means. With grouped queries, the keys of a group stay as long as one of its
    heads stands for a cluster.
    """
    return Method(make=ClusteredHeads(as_fitted(fitted)))

"""Merging heads: heads of a layer with similar attention share keys."""

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
    """CHAI (Agarwal et al., 2024, arXiv:2403.08058), section 3: heads of a cluster share attention.

    Of heads whose attention correlates, one computes the attention, and the others apply it to their own
    values, so unused keys are not stored (`ClusteredHeads`). fitted: the clusters, as `kvjax fit chai` writes
    them. Deviation: clusters are fitted to texts, where the paper finds only their number this way, by an
    elbow, and the heads of each from the first five tokens of every prompt; clustering is by average linkage,
    not k-means. With grouped queries, a group's keys are stored if one of its heads represents a cluster.
    """
    return Method(make=ClusteredHeads(as_fitted(fitted)))

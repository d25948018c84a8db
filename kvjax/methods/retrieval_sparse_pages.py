"""Retrieval by pages: everything stays in the cache, and each query reads the pages that may matter to it."""

from __future__ import annotations

from kvjax.grammar import Budget, Method
from kvjax.methods.papers import paper
from kvjax.methods.shared import Amount, Layers, Page
from kvjax.read.pages import PageBounds


@paper(
    "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference",
    arxiv="2406.10774",
    family="retrieval-sparse",
    exact="deviates",
)
def quest(budget: Amount, *, page: Page = 16, skip_layers: Layers = 2) -> Method:
    """Quest (Tang et al., 2024, arXiv:2406.10774), section 3.3: only pages that may matter to this query.

    budget is the share (or number) of tokens visited per decoded token; the first `skip_layers` layers and
    the newest, not yet full page are always read. Deviation: the query heads of a group share their pages
    (the largest bound among them decides), since keys and values of a group are stored once. Prompts and
    several tokens at once are read in full.
    """
    return Method(read=PageBounds(Budget(budget), page, skip_layers))

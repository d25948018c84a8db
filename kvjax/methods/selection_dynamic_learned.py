"""Selection by trained interactions, by which newer tokens drop older ones."""

from __future__ import annotations

from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.fitted import as_fitted
from kvjax.grammar.when import STEP
from kvjax.keep.budgets.budget import UpTo
from kvjax.keep.gates.dropping import FirstDroppingToken, NotDropped
from kvjax.methods.papers import paper
from kvjax.methods.shared import Fit


@paper(
    "Dynamic Context Pruning for Efficient and Interpretable Autoregressive Transformers",
    arxiv="2305.15805",
    family="selection-dynamic",
    exact="deviates",
    aliases=("adaptively-sparse-attention",),
)
def dcp(*, fitted: Fit | None = None) -> Method:
    """DCP (Anagnostidis et al., 2023, arXiv:2305.15805), section 3.1: newer tokens drop older ones.

    In every layer, token n attends to an older token j as long as no token m with j < m <= n has dropped it,
    by

        (W_a x_m)' (W_b x_j) / sqrt(R) + c < 0

    of the layer's inputs, which is the paper's product of sparse sigmoids once these are steps. All heads of
    a layer drop the same tokens. Queries of a prompt attend only to tokens not yet dropped, and in steps a
    token's slot is free as soon as a token has dropped it; the number of kept tokens depends on the text.
    fitted: the interactions, as `kvjax fit dcp` writes them. Sources: the abstract, and the equations as
    quoted by later papers; there is no public code. Deviations: the model is frozen while interactions are
    fitted (`kvjax.fitting.gates.dropping`), while the authors train all of it; every KV head of a layer
    stores the R numbers W_b x_j of its slots; and rows of a batch have as many slots as the longest.

    On the shipped model 34 % of the slots of 512 tokens are kept, which with these numbers take 40 % of the
    full cache's bytes: all of the second layer, and almost none of the upper two. With them it finds 32 of 32
    records, whether the question is part of the prompt or follows it (all slots: 32).
    """
    keep = Keep(NotDropped(FirstDroppingToken(as_fitted(fitted))), Budget(1.0), UpTo(0.0), when=STEP)
    return Method(keep)

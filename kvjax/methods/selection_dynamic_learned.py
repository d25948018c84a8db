"""Selection by interactions that were taught, by which newer tokens drop older ones."""

from __future__ import annotations

from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.fitted import as_fitted
from kvjax.grammar.when import STEP
from kvjax.keep.budgets.budget import UpTo
from kvjax.keep.gates.dropping import Dropping, NotDropped
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
    """DCP (Anagnostidis et al., 2023, arXiv:2305.15805), section 3.1: newer tokens drop what is not needed.

    In every layer, token n sees an older token j as long as no token m with j < m <= n has dropped it, by

        (W_a x_m)' (W_b x_j) / sqrt(R) + c < 0

    of the layer's inputs, which is the paper's product of sparse sigmoids once these are steps. All heads of
    a layer lose the same tokens. Queries of a prompt see what is left for them, and in steps a token's slot
    is free as soon as the next token has dropped it; how much stays follows from the text. fitted: the
    interactions, as `kvjax fit dcp` writes them. Read: the abstract, and the equations as later papers have
    them; no public code. Deviations: the model stays as it is while interactions are fitted
    (`kvjax.fitting.gates.dropping`), where the authors train all of it; every list of a layer holds the R
    numbers W_b x_j of its slots; and rows of a batch have as many places as the longest.

    On the shipped model 34 % of the slots of 512 tokens are left, which with these numbers weigh 40 % of the
    full cache: all in the second layer, and next to none in the upper two. With them it finds 32 of 32
    records, whether the question is read with the prompt or behind it (all slots: 32).
    """
    keep = Keep(NotDropped(Dropping(as_fitted(fitted))), Budget(1.0), UpTo(0.0), when=STEP)
    return Method(keep)

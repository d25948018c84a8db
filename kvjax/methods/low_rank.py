"""Low rank: what is not held exactly is held in a state of few dimensions."""

from __future__ import annotations

from kvjax.fitted import as_fitted
from kvjax.grammar import Budget, Keep, Method
from kvjax.keep.budget import Uniform
from kvjax.keep.patterns import Recent
from kvjax.keep.residue import Residue
from kvjax.keep.score import AccumulatedAttention
from kvjax.methods.papers import paper
from kvjax.methods.shared import Amount, Fit, Share
from kvjax.when import STEP


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

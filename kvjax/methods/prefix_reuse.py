"""Contexts that are encoded independently, so that each can be reused with any others."""

from __future__ import annotations

from typing import Annotated

from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.shared_ranges import SharedRanges
from kvjax.keep.budgets.budget import Uniform
from kvjax.methods.papers import paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Tokens


@paper(
    "APE: Faster and Longer Context-Augmented Generation via Adaptive Parallel Encoding",
    arxiv="2502.05431",
    family="prefix-reuse",
    exact="deviates",
)
def ape(
    contexts: Annotated[tuple[int, ...], Range(1)] = (512, 512),
    *,
    shared_prefix: Tokens = 16,
    temperature: Annotated[float, Range(0.01, 1)] = 0.9,
    scale: Annotated[float, Range(0.01, 2)] = 0.9,
) -> Method:
    """APE (Yang et al., 2025, arXiv:2502.05431), section 4: contexts in parallel after a shared prefix.

    The first `shared_prefix` tokens are followed by contexts of `contexts` tokens each. These attend only to
    the prefix and themselves, and all begin at the position after the prefix; the text after them begins
    after the longest one. It attends to all contexts with logits divided by `temperature`, and to everything
    else as usual; the log-sum-exp of the former is multiplied by scale * temperature before both are merged
    (`SharedRanges`). With `contexts=()` every row has contexts of its own, as `kvjax.parallel_contexts` is
    told. Deviation: keys are stored before rotation, so kernels cannot read them.
    """
    phase = SharedRanges(shared_prefix, contexts, temperature, scale)
    return Method(Keep(None, Budget(1.0), Uniform(), phase=phase))

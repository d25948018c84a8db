"""KeyDiff as a user's own method: a score, and the sentence that uses it.

    kvjax compare --methods docs/examples/keydiff.py:keydiff snapkv --budgets 0.5 0.25

docs/tutorials/write-a-method.md explains it line by line.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.words import Amount, Budget, Keep, Method, Observed, Uniform, View, Word, paper


@dataclasses.dataclass(frozen=True)
class KeyDistinctness(Word):
    """score[j] = -cos(k_j, mean_i k_i / ||k_i||): keys that point away from the mean (arXiv:2504.15364)."""

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        k = view.k.astype(jnp.float32)
        unit = k / jnp.maximum(jnp.linalg.norm(k, axis=-1, keepdims=True), 1e-12)
        # The sum replaces the mean: only its direction matters.
        anchor = jnp.where((view.pos >= 0)[..., None], unit, 0.0).sum(2)
        anchor = anchor / jnp.maximum(jnp.linalg.norm(anchor, axis=-1, keepdims=True), 1e-12)
        return -jnp.einsum("bksh,bkh->bks", unit, anchor)


@paper(
    "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in "
    "Resource-Constrained Environments",
    arxiv="2504.15364",
    family="selection-static",
    exact="equal",
    kvpress="KeyDiffPress",
)
def keydiff(budget: Amount) -> Method:
    """KeyDiff (Park et al., 2025, arXiv:2504.15364): keeps the keys that are least like the mean key.

    It does not use attention. The paper compresses block by block, which is `prefill(..., chunk=block)`;
    without `chunk` a prompt is compressed once, at its end.
    """
    return Method(Keep(KeyDistinctness(), Budget(budget), Uniform()))

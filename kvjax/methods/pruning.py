"""Pruning of numbers: every slot stays, and holds only some of the numbers of its key and value."""

from __future__ import annotations

from kvjax.grammar import Method, Store
from kvjax.methods.papers import paper
from kvjax.methods.shared import Ratio, Tokens
from kvjax.store.pruned import Pruned


@paper(
    "Mustafar: Promoting Unstructured Sparsity for KV Cache Pruning in LLM Inference",
    arxiv="2505.22913",
    family="pruning",
    exact="deviates",
)
def mustafar(*, keys: Ratio = 0.5, values: Ratio = 0.5, residual: Tokens = 32) -> Method:
    """Mustafar (Joo et al., 2025, arXiv:2505.22913): of every key and value, the largest numbers stay.

    Behind the newest `residual` tokens, which are whole, a token keeps the share `keys` of the numbers of
    each key, and `values` of each value, by magnitude; beside these lies one bit per channel (`Pruned`).
    Deviation: one bitmap per token, where the paper has one per tile of 64 numbers and pads each to a
    multiple of eight; and attention reads rows that are decoded, without the paper's kernel.
    """
    return Method(store=Store(Pruned(keys), Pruned(values), residual=residual))

"""Pruning of numbers: every slot is kept, but stores only some of the numbers of its key and value."""

from __future__ import annotations

from kvjax.grammar import Method, Store
from kvjax.grammar.fitted import as_fitted
from kvjax.methods.papers import Press, paper
from kvjax.methods.shared import Fit, Group, Ratio, Tokens
from kvjax.store.channels import QueryDrivenChannels
from kvjax.store.pruned import Pruned


@paper(
    "Mustafar: Promoting Unstructured Sparsity for KV Cache Pruning in LLM Inference",
    arxiv="2505.22913",
    family="pruning",
    exact="deviates",
)
def mustafar(*, keys: Ratio = 0.5, values: Ratio = 0.5, residual: Tokens = 32) -> Method:
    """Mustafar (Joo et al., 2025, arXiv:2505.22913): keeps the largest numbers of every key and value.

    Except for the newest `residual` tokens, which are whole, a token keeps the share `keys` of the numbers of
    each key, and `values` of each value, by magnitude, with a bit mask of the channels (`Pruned`). Deviation:
    one bitmap per token, where the paper has one per tile of 64 numbers and pads each to a multiple of eight;
    and attention decodes the rows first, without the paper's kernel.
    """
    return Method(store=Store(Pruned(keys), Pruned(values), residual=residual))


@paper(
    "ThinK: Thinner Key Cache by Query-Driven Pruning",
    arxiv="2407.21018",
    family="pruning",
    exact="deviates",
    kvpress=Press(
        "ThinKPress", same="no: there, channels are chosen for a prompt and set to zero, which frees nothing"
    ),
)
def think(
    *, keys: Ratio = 0.6, group: Group = 128, residual: Tokens = 32, fitted: Fit | None = None
) -> Method:
    """ThinK (Xu et al., 2024, arXiv:2407.21018), section 3: keeps the key channels that matter to queries.

    Except for the newest `residual` tokens, which are whole, every `group` tokens of a head keep the share
    `keys` of the channels of their keys, those of the largest |q_c| |k_c| (`QueryDrivenChannels`); values are
    whole. It chains with any keep, and with stores that encode the kept channels, as in think + kivi. fitted:
    |q_c|, as `kvjax fit think` writes them; without, keys alone decide. Deviation: channels are chosen
    separately for every `group` tokens, by queries of texts, where the paper chooses once, by the last
    queries of a prompt, and keeps later tokens whole.
    """
    return Method(store=Store(QueryDrivenChannels(keys, group, as_fitted(fitted)), residual=residual))

"""Quantisation that treats keys, values, tokens or layers differently."""

from __future__ import annotations

from kvjax.grammar import Method, Store
from kvjax.methods.papers import paper
from kvjax.methods.shared import Bits, Group, Tokens
from kvjax.store.affine import Affine


@paper(
    "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache",
    arxiv="2402.02750",
    family="quant-mixed",
    exact="deviates",
)
def kivi(*, bits: Bits = 2, group: Group = 32, residual: Tokens = 128) -> Method:
    """KIVI (Liu et al., 2024, arXiv:2402.02750), section 3.3: keys per channel, values per token.

    Keys are quantised in groups of `group` tokens of a channel, values in groups of `group` channels of a
    token; the newest tokens stay as computed. Deviation: keys and values leave the full-precision residual
    together, `group` tokens at a time, so between `residual` and residual + group - 1 tokens are exact (the
    paper flushes keys `residual` at a time and values one by one).
    """
    keys = Affine(bits, axis="channel", group=group)
    return Method(store=Store(keys, Affine(bits, axis="token", group=group, together=group), residual))

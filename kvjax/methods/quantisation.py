"""Methods that keep every token and store it in fewer bits."""

from __future__ import annotations

from kvjax.grammar import Method, Store
from kvjax.store.affine import Affine, Float8


def full() -> Method:
    """Baseline: every token, as computed."""
    return Method()


def int8() -> Method:
    """Baseline: min-max int8 per token and head, keys and values alike."""
    return Method(store=Store(Affine(8), Affine(8)))


def int4(*, group: int | None = 32) -> Method:
    """Baseline: min-max int4 per token in groups of `group` channels (None: a whole head)."""
    return Method(store=Store(Affine(4, group=group), Affine(4, group=group)))


def fp8(*, kind: str = "e4m3") -> Method:
    """Baseline: float8 with one scale per token and head."""
    return Method(store=Store(Float8(kind), Float8(kind)))


def kivi(*, bits: int = 2, group: int = 32, residual: int = 128) -> Method:
    """KIVI (Liu et al., 2024, arXiv:2402.02750), section 3.3: keys per channel, values per token.

    Keys are quantised in groups of `group` tokens of a channel, values in groups of `group` channels of a
    token; the newest tokens stay as computed. Deviation: keys and values leave the full-precision residual
    together, `group` tokens at a time, so between `residual` and residual + group - 1 tokens are exact (the
    paper flushes keys `residual` at a time and values one by one).
    """
    keys = Affine(bits, axis="channel", group=group)
    return Method(store=Store(keys, Affine(bits, axis="token", group=group, together=group), residual))

"""Logits of a step's pages inside a kernel, for codes with their scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.pallas_kernels.streaming import product


def logits(q: Any, codes: Any, numbers: dict[str, Any]) -> Any:
    """Compute q k' [R, tokens] of keys that are codes [pages, page, W] with scales among `numbers`."""
    pages, _, width = codes.shape
    if "channel_scale" in numbers:
        scales, zeros = numbers["channel_scale"], numbers["channel_zero"]
        found = [_of_groups(q, codes[n], scales[n], zeros[n]) for n in range(pages)]
        return jnp.concatenate(found, axis=1)
    z = product(q.astype(codes.dtype), codes.reshape(-1, width), 1)
    z = z * numbers["key_scale"] if "key_scale" in numbers else z
    return z + q.sum(-1, keepdims=True) * numbers["key_zero"] if "key_zero" in numbers else z


def _of_groups(q: Any, codes: Any, scales: list[Any], zeros: list[Any]) -> Any:
    """Logits of a page with scales per group of tokens, which are multiplied into the queries.

    One product for all groups: more rows of queries cost a matrix unit nothing.
    """
    (count, _), page = q.shape, codes.shape[0]
    asked = jnp.concatenate([q * x for x in scales]).astype(codes.dtype)
    found = product(asked, codes, 1)
    rows = [found[i : i + count] for i in range(0, found.shape[0], count)]
    return _choose(rows, page) + _choose([(q * x).sum(-1, keepdims=True) for x in zeros], page)


def _choose(found: Sequence[Any], page: int) -> Any:
    """Return [R, page] with equal parts from found [groups][R, page or 1], one after the other."""
    group = jax.lax.broadcasted_iota(jnp.int32, (1, page), 1) // (page // len(found))
    out = found[0]
    for i, x in enumerate(found[1:], 1):
        out = jnp.where(group == i, x, out)
    return out

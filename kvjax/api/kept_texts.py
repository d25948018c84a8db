"""Which tokens of a prompt a cache keeps, as text."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from kvjax.api.prefill import check_cache, padded
from kvjax.api.types import Lengths, TokenIds
from kvjax.base.errors import InputError
from kvjax.models.model import Model
from kvjax.state.cache import Cache, kept_positions

GAP = " … "


def kept_texts(
    model: Model, cache: Cache, tokens: TokenIds, *, lengths: Lengths | None = None
) -> list[list[list[str]]]:
    """Show the tokens that a cache keeps as text.

    Args:
        model: the model that the cache is of, with a tokenizer.
        cache: a live cache.
        tokens: all tokens that the rows have read, [B, T] or a list of lists; tokens generated later have no
            text unless they are given here, too.
        lengths: tokens of each row [B], if rows are padded.

    Returns:
        A text for each layer, row and KV head, with " … " where tokens were evicted. Layers that carry states
        have no KV heads here.

    Raises:
        InputError: without a tokenizer, for another number of rows, for a cache of another model, and if a
            method reads another text instead of the prompt.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> prompt = [model.tokenizer.encode("<bos> the <set> brave otter 17 4 52 <.> a hill").ids]
    >>> _, cache = kvjax.prefill(model, prompt, method=kvjax.method("streamingllm", budget=6))
    >>> kvjax.kept_texts(model, cache, prompt)[0][0][0]
    '<bos> the <set> brave … a hill'
    """
    check_cache(model, cache)
    if model.tokenizer is None:
        raise InputError(
            f"{model.name} has no tokenizer, so its tokens have no text: see kvjax.kept_positions"
        )
    if cache.method is not None and cache.method.reread is not None:
        raise InputError(
            f"{cache.method.id} reads a text of its own making, and its cache keeps positions of that: "
            "see kvjax.kept_positions"
        )
    batch = padded(model, tokens, lengths)
    if len(batch.lengths) != cache.next.shape[0]:
        raise InputError(
            f"the tokens have {len(batch.lengths)} rows, the cache {cache.next.shape[0]}, expected the same: "
            "give what every row has read"
        )
    rows = [row[:n] for row, n in zip(batch.tokens, batch.lengths, strict=True)]
    return [
        [[_text(model, row, heads) for heads in lists] for row, lists in zip(rows, layer, strict=True)]
        for layer in kept_positions(cache)
    ]


def _text(model: Model, ids: Int[np.ndarray, "T"], pos: Int[np.ndarray, "S"]) -> str:
    """Return the tokens at these positions, in order; positions beyond the given tokens are left out."""
    found = np.unique(pos[(pos >= 0) & (pos < len(ids))])
    runs = np.split(found, np.flatnonzero(np.diff(found) > 1) + 1)
    pieces = [model.tokenizer.decode(ids[run].tolist(), skip_special_tokens=False) for run in runs]
    return GAP.join(piece.strip() for piece in pieces)

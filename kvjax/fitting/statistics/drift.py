"""How far a layer's keys drift when a text is read block by block (EpiCache, arXiv:2509.17396)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.api.prefill import padded
from kvjax.base.errors import InputError
from kvjax.fitting.loops.whole import check_whole, read_whole
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.kinds import Inputs
from kvjax.keep.scores.score import probabilities
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer
from kvjax.models.model import Model
from kvjax.models.transformer import positions
from kvjax.ops.attention.union import Keys


def fit_drift(
    model: Model,
    batches: list[list[list[int]]],
    *,
    tokens: int = 128,
    sinks: int = 4,
    power: float = 1.3,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the importance [L, K] of every layer: how much its keys change under block-wise reading.

    A text is read whole, and once more with every token seeing only its block of `tokens` tokens, the second
    half of the block before it and the first `sinks` tokens. A layer's similarity is the mean cosine between
    the keys of both readings, over heads, blocks and texts; its importance is ((most - similarity) / (most -
    least))^power with the layers' largest and smallest similarity, as in the authors' code. Raises InputError
    for texts of a block or less, and for a model whose layers are not all plain attention that keeps all
    tokens.
    """
    check_whole(model, "budgets by drift")
    total, count = np.zeros(model.config.layers), 0
    for rows in progress(batches):
        rows = [row for row in rows if len(row) > tokens]
        if not rows:
            continue
        given = padded(model, rows, None)
        ids, lengths = jnp.asarray(given.tokens), jnp.asarray(given.lengths)
        whole, blocks = (
            np.asarray(_keys(model.config, model.params, ids, lengths, size, sinks), np.float64)
            for size in (0, tokens)
        )
        for i, row in enumerate(rows):
            total += _likeness(whole[:, i, :, : len(row)], blocks[:, i, :, : len(row)], tokens)
        count += len(rows)
    if not count:
        raise InputError(
            f"no text has more than {tokens} tokens, expected some: give longer texts, or lower tokens="
        )
    likeness = total / count
    apart = likeness.max() - likeness.min()
    weight = ((likeness.max() - likeness) / apart) ** power if apart > 0 else np.ones(len(likeness))
    importance = np.repeat(weight[:, None], model.config.kv_heads, 1).astype(np.float32)
    return Fitted({"importance": importance}, "DriftProfile", model.signature)


def _likeness(
    a: Float[np.ndarray, "L K T H"], b: Float[np.ndarray, "L K T H"], tokens: int
) -> Float[np.ndarray, "L"]:
    """Compute the mean over heads and blocks of the cosine of all keys of a block, as one vector."""
    each = []
    for start in range(0, a.shape[2], tokens):
        x, y = (k[:, :, start : start + tokens].reshape(*k.shape[:2], -1) for k in (a, b))
        each.append((x * y).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1))
    return np.mean(each, 0).mean(1)


@partial(jax.jit, static_argnames=("config", "block", "sinks"))
def _keys(
    config: Config,
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    block: int,
    sinks: int,
) -> Float[Array, "L B K T H"]:
    """Compute the rotated keys of all layers; block: how many tokens a token sees, 0 for all before it."""
    at = positions(tokens, lengths, jnp.zeros_like(lengths))
    sees: Bool[Array, "1 T T"] = jnp.ones((1, tokens.shape[1], tokens.shape[1]), bool)
    if block:
        pos = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        first = pos // block * block - block // 2
        sees = (pos[None, None] >= first[None, :, None]) | (pos[None, None] < sinks)

    def attention(layer: Layer, inputs: Inputs, keys: Keys, s: Array) -> tuple[Array, Array]:
        p = probabilities(jnp.where(sees[:, None, None], s, -jnp.inf))
        out = jnp.einsum("bkgts,bksv->bkgtv", p, keys.v.astype(s.dtype)).reshape(*inputs.q.shape[:3], -1)
        return out, keys.k

    ran = read_whole(config, params, tokens, at, attention, "budgets by drift")
    return jnp.concatenate(ran.collected)

"""What heads lose when a score selects their slots, and the budgets that minimise the total loss (LU-KV)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import steps
from kvjax.api.prefill import padded
from kvjax.base.errors import InputError
from kvjax.fitting.loops.whole import check_whole, read_whole
from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.kinds import Inputs
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.scores.score import probabilities
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer
from kvjax.models.model import Model
from kvjax.models.transformer import positions
from kvjax.ops.attention.union import Keys
from kvjax.steps import Run
from kvjax.steps.prefilling.scored import scored

PERCENT = 100


def fit_curves(
    model: Model,
    batches: list[list[list[int]]],
    *,
    method: Method,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the share [L, K, 99] of its slots that every head keeps if 1 to 99 percent of all are evicted.

    The method scores the first half of every text. The utility of a token there is the attention that it gets
    from the tokens of the other half, the mean over these and the heads of a group. A head's curve is the
    total utility of its best tokens by score, as a function of their share, the mean over texts. On the
    curve's concave hull each percent adds less than the one before, so the percents of all heads that add
    most are the best budgets (arXiv:2602.08585, section 4). Raises InputError for texts of fewer than 100
    tokens, and a model whose layers are not all plain attention that keeps all tokens.
    """
    check_whole(model, "budgets of heads")
    assert method.keep is not None and method.keep.score is not None
    run = Run(model.config, Method(Keep(method.keep.score, Budget(1.0), Uniform())))
    worth, count = np.zeros((model.config.layers, model.config.kv_heads, PERCENT + 1)), 0
    for rows in progress(batches):
        rows = [row for row in rows if len(row) >= PERCENT]
        if not rows:
            continue
        given = padded(model, rows, None)
        ids, lengths = jnp.asarray(given.tokens), jnp.asarray(given.lengths)
        cuts = lengths // 2
        score = np.asarray(_scores(run, model.params, ids, cuts), np.float64)
        good = np.asarray(_good_for(model.config, model.params, ids, lengths, cuts), np.float64)
        for i, row in enumerate(rows):
            cut = len(row) // 2
            worth += curves(score[:, i, :, :cut], good[:, i, :, :cut])
        count += len(rows)
    if not count:
        raise InputError(f"no text has {PERCENT} tokens, expected some: give longer texts")
    return Fitted({"kept": best_shares(worth / count)}, "CurveProfile", model.signature)


def curves(
    score: Float[np.ndarray, "L K T"], good: Float[np.ndarray, "L K T"]
) -> Float[np.ndarray, "L K 101"]:
    """Compute the total utility of the best 0 to 100 percent of a head's tokens by score."""
    order = np.argsort(-score, axis=-1, kind="stable")
    total = np.cumsum(np.take_along_axis(good, order, -1), -1)
    total = np.concatenate([np.zeros((*total.shape[:-1], 1)), total], -1)
    many = score.shape[-1]
    return total[..., np.arange(PERCENT + 1) * many // PERCENT]


def best_shares(worth: Float[np.ndarray, "L K 101"]) -> Float[np.ndarray, "L K 99"]:
    """Compute the shares of slots that heads keep when 1 to 99% of all are evicted, to keep most utility.

    >>> steep, even = np.minimum(np.arange(101) * 10.0, 100), np.arange(101.0)
    >>> best_shares(np.stack([steep, even])[None])[0, :, 94].tolist()  # 95 percent leave
    [0.10000000149011612, 0.0]
    """
    heads = worth.reshape(-1, PERCENT + 1)
    gains = np.stack([np.diff(_hull(one)) for one in heads])
    # On a concave curve the first percents add most, so selecting the best ones selects a prefix.
    order = np.argsort(-gains, axis=None, kind="stable") // PERCENT
    kept = [
        np.bincount(order[: (PERCENT - leave) * len(heads)], minlength=len(heads))
        for leave in range(1, PERCENT)
    ]
    return (np.stack(kept, -1) / PERCENT).reshape(*worth.shape[:-1], -1).astype(np.float32)


def _hull(worth: Float[np.ndarray, "P"]) -> Float[np.ndarray, "P"]:
    """Find the least concave curve that is nowhere below this one."""
    corners: list[int] = []
    for i, y in enumerate(worth):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (worth[b] - worth[a]) * (i - b) > (y - worth[b]) * (b - a):
                break
            corners.pop()
        corners.append(i)
    return np.interp(np.arange(len(worth)), corners, worth[corners])


@partial(jax.jit, static_argnames=("run",))
def _scores(
    run: Run, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> Float[Array, "L B K T"]:
    prompt = steps.observe(run, params, tokens, lengths, None, steps.needs_of(run, params))
    found = scored(run, params, prompt)
    return jnp.concatenate([found[i] for i in sorted(found)])


@partial(jax.jit, static_argnames=("config",))
def _good_for(
    config: Config, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, "B"], cuts: Int[Array, "B"]
) -> Float[Array, "L B K T"]:
    """Compute attention from tokens after cuts to every token, the mean over these and a group's heads."""
    at = positions(tokens, lengths, jnp.zeros_like(lengths))
    asks = (at.pos >= cuts[:, None])[:, None, None, :, None]
    many = jnp.maximum(lengths - cuts, 1).astype(jnp.float32)[:, None, None]

    def attention(layer: Layer, inputs: Inputs, keys: Keys, s: Array) -> tuple[Array, Array]:
        p = probabilities(s)
        out = jnp.einsum("bkgts,bksv->bkgtv", p, keys.v.astype(s.dtype)).reshape(*inputs.q.shape[:3], -1)
        return out, jnp.where(asks, p, 0.0).sum(3).mean(2) / many

    return jnp.concatenate(read_whole(config, params, tokens, at, attention, "budgets of heads").collected)

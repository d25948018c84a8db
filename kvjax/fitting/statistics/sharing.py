"""Which layers of a model can reuse another layer's keys and values (KVSharer, arXiv:2410.18517)."""

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
from kvjax.compress.select import ComputedTokens
from kvjax.fitting.loops.whole import check_whole
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.keep.observations.observe import UnrotatedKeys
from kvjax.make.shared_layers import SharedLayers
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.models.transformer import hidden
from kvjax.steps import Run


def fit_sharing(
    model: Model,
    batches: list[list[list[int]]],
    *,
    layers: int = 1,
    least: float = 0.5,
    tokens: int = 64,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the map "source" [L] of at most `layers` layers to lower ones (section 3).

    Pairs of layers are tried in order of decreasing distance between the keys and values that the first
    `tokens` tokens of the texts have on average. A pair is accepted if the last hidden states keep a cosine
    above `least` to those of the model itself, the mean over texts. Deviation: as in the authors' code, the
    upper layer of a pair reads the lower one. Raises InputError for texts shorter than `tokens`, and a model
    whose layers are not all plain attention that keeps all tokens.
    """
    check_whole(model, "shared layers")
    rows = [text[:tokens] for batch in batches for text in batch if len(text) >= tokens]
    if not rows:
        raise InputError(f"no text has {tokens} tokens, expected some: give longer texts, or lower tokens=")
    given = padded(model, rows, None)
    ids, lengths = jnp.asarray(given.tokens), jnp.asarray(given.lengths)
    mean = np.asarray(_mean_slots(model, ids, lengths), np.float64)[..., :tokens, :]
    own = np.arange(model.config.layers)
    pairs = [(i, j) for i in own for j in range(i)]
    far = {(i, j): np.linalg.norm(mean[:, i] - mean[:, j], axis=-1).mean() for i, j in pairs}
    whole, source = _hidden(model.config, model.params, ids, lengths), own
    for i, j in progress(sorted(pairs, key=lambda pair: -far[pair])):
        shares = source != own
        # A layer whose slots others reuse keeps its own.
        if shares[i] or i in source[shares] or shares.sum() >= layers:
            continue
        tried = source.copy()
        tried[i] = source[j]
        word = SharedLayers(Fitted({"source": tried.astype(np.int32)}, "SharedLayers", model.signature))
        config = word.config(model.config)
        mine = _hidden(config, word.params(model.params, model.config), ids, lengths)
        if np.mean([a @ b / np.sqrt(a @ a * (b @ b)) for a, b in zip(whole, mine, strict=True)]) > least:
            source = tried
    return Fitted({"source": source.astype(np.int32)}, "SharedLayers", model.signature)


def _mean_slots(
    model: Model, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> Float[Array, "2 L K T H"]:
    """Compute the mean over texts of what the layers would store: rotated keys, and values."""
    run = Run(model.config, Method())
    prompt = steps.observe(run, model.params, tokens, lengths, None, frozenset({UnrotatedKeys()}))
    each = [(f.k, f.v) for f in prompt.fresh if isinstance(f, ComputedTokens)]
    k, v = (jnp.concatenate([x for x in pair if x is not None]) for pair in zip(*each, strict=True))
    return jnp.stack([k, v]).astype(jnp.float32).mean(2)


def _hidden(
    config: Config, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> Float[np.ndarray, "B D"]:
    """Compute the last hidden states of every text, flattened; padding is zero."""
    x = jax.jit(partial(hidden, config=config))(params, tokens, lengths=lengths)
    live = np.arange(tokens.shape[1])[None] < np.asarray(lengths)[:, None]
    return np.where(live[..., None], np.asarray(x, np.float64), 0.0).reshape(len(live), -1)

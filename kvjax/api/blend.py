"""CacheBlend: computes keys and values of some tokens of joined texts again, given all earlier texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.api.chunks import bucket
from kvjax.base.checks import check_in_vocabulary, finite_number, ragged_rows
from kvjax.base.errors import InputError
from kvjax.compress.select import ComputedTokens
from kvjax.grammar import Method
from kvjax.hosts.arrays import fetch
from kvjax.keep.observations.observe import UnrotatedKeys
from kvjax.models.layers import Params
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.model import Model
from kvjax.models.transformer import Positions
from kvjax.state.cache import Cache, Slots
from kvjax.steps.prefilling.read import read_tokens
from kvjax.steps.shared.run import Run

# The layer whose values show which tokens change most in their new context, as in the authors' code.
CHECK = 1
_ALL = frozenset({UnrotatedKeys()})


def check_texts(
    model: Model, caches: Sequence[Cache], texts: Any, recompute: float
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:
    """Return tokens [B, T] and lengths [B] of joined rows; InputError for texts that caches do not hold."""
    finite_number("recompute", recompute, 0.0, 1.0)
    if texts is None or len(texts) != len(caches):
        given = "no texts" if texts is None else f"texts for {len(texts)} caches"
        raise InputError(
            f"recompute={recompute} was given with {given}, expected the token ids of all {len(caches)}: "
            "texts[i][b] is what row b of cache i was read from"
        )
    if caches[0].method not in (None, Method()):
        raise InputError(
            f"recompute={recompute} was given for caches of {caches[0].method!r:.60}, expected full caches, "
            "which hold every token: read the texts without a method"
        )
    check_layers(model)
    each = [ragged_rows(text) for text in texts]
    for i, (cache, text) in enumerate(zip(caches, each, strict=True)):
        given, held = [len(row) for row in text], fetch(cache.next).tolist()
        if given != held:
            raise InputError(
                f"texts[{i}] has rows of {given} tokens and cache {i} holds {held}, expected the text "
                "that it was read from"
            )
    rows = [np.concatenate(parts) for parts in zip(*each, strict=True)]
    check_in_vocabulary(np.concatenate(rows), model.config.vocab)
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), bucket(int(lengths.max()))), np.int32)
    for b, row in enumerate(rows):
        tokens[b, : len(row)] = row
    return tokens, lengths


def check_layers(model: Model) -> None:
    """Raise InputError if a layer has no keys and values of its own to compute again."""
    for layer in range(model.config.layers):
        mixer = mixer_of(model.config, layer)
        slots = mixer.slots(model.config)
        if slots is None or slots.ids or slots.fixed or mixer.takes:
            raise InputError(
                f"layer {layer} of {model.name} ({type(mixer).__name__}) has no keys and values of its own, "
                "which could be computed again: join without recompute and links"
            )


def blended(
    model: Model, cache: Cache, tokens: Int[np.ndarray, "B T"], lengths: Int[np.ndarray, "B"], share: float
) -> Cache:
    """Compute keys and values of floor(share * tokens) tokens of every row of the cache again.

    Layers 0 to `CHECK` are computed again for all tokens. The tokens whose values in layer `CHECK` differ
    most from the old ones (squared distance) are then computed again in all layers.
    """
    counts = np.floor(share * lengths + 1e-9).astype(np.int32)
    most = int(counts.max())
    if most == 0 or model.config.layers <= CHECK:
        return cache
    run = Run(model.config, Method())
    most = min(bucket(most), tokens.shape[1])
    given = jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(counts)
    return _blended(run, model.params, cache, *given, most=most)


@partial(jax.jit, static_argnames=("run", "most"))
def _blended(
    run: Run,
    params: Params,
    cache: Cache,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    counts: Int[Array, "B"],
    *,
    most: int,
) -> Cache:
    old = _values(cache, CHECK)[:, :, : tokens.shape[1]]
    below = params | {"layers": _first_layers(params["layers"], CHECK + 1)}
    fresh = read_tokens(run, below, tokens, lengths, None, _ALL).fresh
    new = fresh[-1]
    each = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    live = each < lengths[:, None]
    everywhere = jnp.where(live, each, -1)
    cache = _with(cache, fresh, everywhere)
    assert isinstance(new, ComputedTokens)
    changed = ((_shown(new)[-1] - old).astype(jnp.float32) ** 2).sum((1, 3))
    pos = _most_changed(jnp.where(live, changed, -1.0), counts, most)
    again = jnp.take_along_axis(tokens, jnp.maximum(pos, 0), axis=1)
    at = Positions(pos, lengths)
    read = read_tokens(run, params, again, counts, _without(cache, pos), _ALL, at=at)
    return _with(cache, read.fresh, pos)


def _most_changed(changed: Float[Array, "B T"], counts: Int[Array, "B"], most: int) -> Int[Array, "B M"]:
    """Find the positions of the `counts` most changed tokens of every row, in order, then -1."""
    _, index = jax.lax.top_k(changed, most)
    used: Bool[Array, "B M"] = jnp.arange(most)[None] < counts[:, None]
    ordered = jnp.sort(jnp.where(used, index, changed.shape[1]), axis=1)
    return jnp.where(used, ordered, -1).astype(jnp.int32)


def _first_layers(groups: Sequence[Any], layers: int) -> list[Any]:
    """Return the parameters of the first layers, whatever groups they are stacked in."""
    out = []
    for group in groups:
        if layers <= 0:
            break
        size = next(iter(group.values())).shape[0]
        out.append(group if size <= layers else jax.tree.map(lambda x, n=layers: x[:n], group))
        layers -= size
    return out


def _shown(slots: ComputedTokens | Slots) -> Float[Array, "Lg B K S H"]:
    """Return the values of slots; of latents, which hold keys and values together, the latents."""
    found = slots.k if slots.v is None else slots.v
    assert isinstance(found, jax.Array)
    return found


def _values(cache: Cache, layer: int) -> Float[Array, "B K S H"]:
    """Return the values of a layer in the cache."""
    for group in cache.groups:
        assert group.tail is not None
        size = group.tail.pos.shape[0]
        if layer < size:
            return _shown(group.tail)[layer]
        layer -= size
    raise ValueError(f"the cache has {layer} layers too few")


def _without(cache: Cache, pos: Int[Array, "B M"]) -> Cache:
    """Empty the cache's slots at these positions, because their tokens are computed again."""

    def emptied(slots: Slots) -> Slots:
        gone = (slots.pos[..., None] == jnp.where(pos < 0, -2, pos)[None, :, None, None]).any(-1)
        return dataclasses.replace(slots, pos=jnp.where(gone, -1, slots.pos))

    groups = tuple(group.with_tail(emptied(group.tail)) for group in cache.groups)  # type: ignore[arg-type]
    return dataclasses.replace(cache, groups=groups)


def _with(cache: Cache, fresh: Sequence[Any], pos: Int[Array, "B M"]) -> Cache:
    """Put new keys and values into the cache at these positions, in its first groups of layers.

    A joined cache holds all tokens, so the slot of a token has the number of its position.
    """
    groups = list(cache.groups)
    for i, new in enumerate(fresh):
        tail = groups[i].tail
        assert tail is not None and isinstance(new, ComputedTokens)
        where = jnp.where(pos < 0, tail.pos.shape[-1], pos)

        def put(x: Any, y: Any, where: Array = where) -> Any:
            if y is None:
                return x
            rows = jnp.arange(len(where))[:, None]
            moved = jnp.moveaxis(y.astype(x.dtype), (1, 3), (0, 1))
            return x.at[: len(y), rows, :, where].set(moved, mode="drop")

        groups[i] = groups[i].with_tail(dataclasses.replace(tail, k=put(tail.k, new.k), v=put(tail.v, new.v)))
    return dataclasses.replace(cache, groups=tuple(groups))

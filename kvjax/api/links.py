"""KVLink: learned tokens between joined texts, which attend to all texts before them."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.api.blend import check_layers
from kvjax.base.errors import InputError
from kvjax.compress.segments import whole_slots
from kvjax.compress.select import ComputedTokens
from kvjax.grammar.fitted import Fitted, as_fitted
from kvjax.grammar.kinds import View
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.models.transformer import Positions
from kvjax.state.cache import Cache
from kvjax.steps.prefilling.read import PrefillOutputs, needs_of, read_tokens
from kvjax.steps.prefilling.scored import as_stored
from kvjax.steps.shared.run import Run

# What fitted links are for (`Fitted.word`).
LINKS = "Links"


def check_links(model: Model, given: Fitted | str, texts: int) -> Float[np.ndarray, "texts links D"]:
    """Return the embeddings of the links of each text, and InputError for links that do not fit."""
    found = as_fitted(given)
    assert found is not None
    again = "fit them with kvjax.fit_links(model, texts)"
    if found.word != LINKS:
        raise InputError(f"links are arrays for {found.word}, expected what kvjax.fit_links gave: {again}")
    if found.model not in ("", model.signature):
        raise InputError(
            f"links are for a model of {found.model}, {model.name} has {model.signature}: {again}"
        )
    links = found.arrays["links"][0]
    if len(links) < texts:
        raise InputError(
            f"links are for at most {len(links)} texts, got {texts} caches: fit them with documents={texts}"
        )
    check_layers(model)
    return links[:texts]


def positions_of(ends: Int[Array, "texts B"], links: int) -> Int[Array, "B _"]:
    """Return the positions of the links of texts that end before these positions."""
    each = jnp.arange(links, dtype=jnp.int32)[None, None]
    return (ends.T[:, :, None] + each).reshape(ends.shape[1], -1)


def read_over(
    run: Run, params: Params, x: Float[Array, "B M D"], pos: Int[Array, "B M"], cache: Cache
) -> PrefillOutputs:
    """Read embeddings at these positions over joined texts; each attends to everything before it."""
    lengths = jnp.full((len(pos),), pos.shape[1], jnp.int32)
    at = Positions(pos, pos[:, -1] + 1)
    return read_tokens(run, params, x, lengths, cache, needs_of(run, params, compress=False), True, at=at)


def linked(
    run: Run,
    params: Params,
    cache: Cache,
    ends: Int[np.ndarray, "texts B"],
    links: Float[np.ndarray, "texts n D"],
) -> Cache:
    """Return joined texts with the slots of their links, which lie in the gaps after the texts."""
    return _linked(run, params, cache, jnp.asarray(ends, jnp.int32), jnp.asarray(links))


@partial(jax.jit, static_argnums=0)
def _linked(
    run: Run, params: Params, cache: Cache, ends: Int[Array, "texts B"], links: Float[Array, "texts n D"]
) -> Cache:
    pos = positions_of(ends, links.shape[1])
    x = links.reshape(1, -1, links.shape[-1]).astype(params["embed"].dtype)
    read = read_over(run, params, jnp.broadcast_to(x, (len(pos), *x.shape[1:])), pos, cache)
    groups = []
    for gm, group, fresh in zip(run.groups(params), cache.groups, read.fresh, strict=True):
        assert isinstance(fresh, ComputedTokens)
        new, old = as_stored(run, gm, fresh), group.tail
        assert old is not None and new.k is not None and new.v is not None
        places = jnp.broadcast_to(pos[None, :, None], new.k.shape[:4])
        bias = None if old.bias is None else jnp.zeros(places.shape, old.bias.dtype)
        more = whole_slots(gm, View(new.k, new.v, places, bias, {}))
        wide = jax.tree.map(lambda a, b: jnp.concatenate([a, b.astype(a.dtype)], 3), old, more)
        groups.append(group.with_tail(wide))
    return dataclasses.replace(cache, groups=tuple(groups))

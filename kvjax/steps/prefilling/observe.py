"""How a method reads a prompt: whole, some tokens alone, with marks, or with memory tokens after chunks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.compress.group import UNSTACK
from kvjax.compress.select import ComputedTokens
from kvjax.grammar.keys import key_of
from kvjax.keep.observations.observe import UnrotatedKeys
from kvjax.keep.prompts.distilled import Distilled
from kvjax.keep.prompts.memory_tokens import MemoryTokens
from kvjax.models.layers import Params
from kvjax.models.transformer import IdsOrVectors
from kvjax.state.cache import Cache
from kvjax.steps.prefilling.lora import Marks
from kvjax.steps.prefilling.memory_tokens import remembered
from kvjax.steps.prefilling.narrowing import chosen, unnarrowed
from kvjax.steps.prefilling.read import PrefillOutputs, read_tokens
from kvjax.steps.shared.run import Run


def observe(
    run: Run,
    params: Params,
    tokens: IdsOrVectors,
    lengths: Int[Array, "B"],
    cache: Cache | None,
    needs: frozenset,
    as_steps: bool = False,
) -> PrefillOutputs:
    """Run new tokens through the model over what the cache holds, as the method reads prompts."""
    word = run.method.reread
    if word is None:
        return read_tokens(run, params, tokens, lengths, cache, needs, as_steps)
    if isinstance(word, MemoryTokens):
        return remembered(run, params, tokens, lengths, cache)
    index, used = _chosen(run, params, tokens, lengths, cache)
    if isinstance(word, Distilled):
        return _distilled(run, params, tokens, lengths, cache, needs, (index, used))
    again = jnp.where(used, jnp.take_along_axis(tokens, index, axis=1), 0)
    lengths = used.sum(-1, dtype=jnp.int32)
    read = read_tokens(run, params, again, lengths, cache, needs, as_steps)
    return read._replace(source=jnp.where(used, index, -1))


def _chosen(
    run: Run, params: Params, tokens: IdsOrVectors, lengths: Int[Array, "B"], cache: Cache | None
) -> tuple[Int[Array, "B M"], Bool[Array, "B M"]]:
    """Return the tokens that a layer's score chooses, in order, and which of the M entries are in use."""
    first, count, last = 0, 0, run.method.reread.after(run.config.layers)
    while first <= last:
        first, count = first + next(iter(params["layers"][count].values())).shape[0], count + 1
    if first != last + 1:
        raise ValueError(
            f"the tokens to read are chosen at layer {last}, inside stacked layers that end at {first - 1}: "
            f"choose at layer {first - 1}, or {UNSTACK}"
        )
    below = params | {"layers": params["layers"][:count]}
    past = None if cache is None else dataclasses.replace(cache, groups=cache.groups[:count])
    # UnrotatedKeys is added so that something is observed, and no layer runs for the last tokens alone.
    needs = run.method.reread.needs | {UnrotatedKeys()}
    found = read_tokens(unnarrowed(run), below, tokens, lengths, past, needs)
    return chosen(run, params, found.positions, found.fresh[-1])


def _distilled(
    run: Run,
    params: Params,
    tokens: IdsOrVectors,
    lengths: Int[Array, "B"],
    cache: Cache | None,
    needs: frozenset,
    choice: tuple[Int[Array, "B M"], Bool[Array, "B M"]],
) -> PrefillOutputs:
    """Read all tokens, the chosen ones with marks; only these are stored, at their positions.

    The last token of a row has no mark, because the answer is predicted from it.
    """
    index, used = choice
    rows, one = jnp.arange(len(index))[:, None], (used & (index < lengths[:, None] - 1)).astype(jnp.float32)
    share = jnp.zeros(tokens.shape[:2], jnp.float32).at[rows, index].add(one)
    marks = Marks(share, run.method.reread.fitted.digest)
    read = read_tokens(unnarrowed(run), params, tokens, lengths, cache, needs, marks=marks)
    pos = jnp.where(used, jnp.take_along_axis(read.positions.pos, index, axis=1), -1)

    def stays(x: Float[Array, "Lg B K T H"] | None) -> Any:
        return None if x is None else jnp.take_along_axis(x, index[None, :, None, :, None], axis=3)

    def of_group(fresh: Any) -> ComputedTokens:
        raw = {name: stays(x) for name, x in fresh.observed.items() if name == key_of(UnrotatedKeys())}
        return ComputedTokens(stays(fresh.k), stays(fresh.v), raw, (), {})

    fresh = tuple(of_group(f) for f in read.fresh)
    return read._replace(fresh=fresh, positions=read.positions._replace(pos=pos))

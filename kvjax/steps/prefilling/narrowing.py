"""Which tokens of a prompt reach upper layers (`SelectivePropagation`, `Hierarchy`), or any (`Reread`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.compress.group import GroupMethod
from kvjax.compress.select import ComputedTokens
from kvjax.grammar.fitted import of_layer
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Observed, View
from kvjax.keep.observations.observe import UnrotatedKeys
from kvjax.keep.prompts.hierarchy import Hierarchy
from kvjax.keep.prompts.narrow import SelectivePropagation
from kvjax.models.layers import Params
from kvjax.models.mixer import Narrowing
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.transformer import Positions
from kvjax.steps.shared.rotate import seen_by_words
from kvjax.steps.shared.run import Run


def narrow_of(run: Run) -> SelectivePropagation | Hierarchy | None:
    """Find the word that narrows a run's prompts, if there is one."""
    return None if run.method.keep is None else run.method.keep.narrow


def unnarrowed(run: Run) -> Run:
    """Return the run with all layers reading all tokens."""
    keep = run.method.keep
    if keep is not None and keep.narrow is not None:
        keep = dataclasses.replace(keep, narrow=None)
    elif run.method.reread is None:
        return run
    return run._replace(method=dataclasses.replace(run.method, keep=keep, reread=None))


def narrowing(run: Run, params: Params, at: Positions, first: bool) -> Narrowing | None:
    """Where new tokens are narrowed, and how they are chosen. first: whether this is a first turn."""
    narrow = narrow_of(run)
    if narrow is None or (narrow.first_turn_only and not first):
        return None
    out, below = None, _left_below if narrow.all_layers else None
    for layer, word in reversed(narrow.stages(run.config.layers, at.pos.shape[1])):
        out = Narrowing(layer, _chooser(run, params, layer, word, at.length), below, out)
    return out


def chosen(
    run: Run, params: Params, at: Positions, collected: Any
) -> tuple[Int[Array, "B M"], Bool[Array, "B M"]]:
    """Choose the tokens that are read again, from what the group of the choosing layer collected."""
    ((layer, word),) = run.method.reread.stages(run.config.layers, at.pos.shape[1])
    return _chooser(run, params, layer, word, at.length)(collected, at.pos)


def _chooser(
    run: Run, params: Params, layer: int, word: Any, length: Int[Array, "B"]
) -> Callable[[Any, Int[Array, "B T"]], tuple[Int[Array, "B M"], Bool[Array, "B M"]]]:
    width = mixer_of(run.config, layer).slots_of(run.config).value
    spec = run.attention_spec(layer)

    def choose(collected: Any, at: Int[Array, "B T"]) -> tuple[Int[Array, "B M"], Bool[Array, "B M"]]:
        fresh: ComputedTokens = collected
        assert fresh.k is not None
        # The layer is the last one of its group.
        k, observed = jax.tree.map(lambda x: x[-1:], (fresh.k, fresh.observed))
        v = k[..., :width] if fresh.v is None else fresh.v[-1:]
        pos = jnp.broadcast_to(at[None, :, None], k.shape[:4])
        view = seen_by_words(run, spec.rope, View(k, v, pos, None, {}), length)
        n = word.count((at >= 0).sum(-1, dtype=jnp.int32))
        view, observed = jax.tree.map(lambda x: x[0], (view, observed))
        seen = Observed(observed, None, length, n, layer, spec, fitted=of_layer(params, layer))
        return word.choose(view, seen)

    return choose


def _left_below(collected: Any, index: Int[Array, "B M"]) -> Any:
    """Restrict what a lower group computed to the tokens that went on."""
    if not isinstance(collected, ComputedTokens) or collected.k is None:
        return collected

    def some(x: Float[Array, "Lg B K T H"]) -> Float[Array, "Lg B K M H"]:
        return jnp.take_along_axis(x, index[None, :, None, :, None], axis=3)

    raw = {key_of(UnrotatedKeys()): some(collected.observed[key_of(UnrotatedKeys())])}
    v = None if collected.v is None else some(collected.v)
    return collected._replace(k=some(collected.k), v=v, observed=collected.observed | raw)


def new_positions(
    run: Run, gm: GroupMethod, pos: Int[Array, "B T"], narrowed: Int[Array, "B M"]
) -> Int[Array, "B _"]:
    """Return the positions of the new tokens of a group's layers; narrowed: those that upper layers read."""
    narrow = narrow_of(run)
    if narrow is None:
        return pos
    above = narrow.all_layers or gm.first > narrow.after(run.config.layers)
    return narrowed if above else pos


def stored_of(run: Run, pos: Int[Array, "B T"], narrowed: Int[Array, "B M"], tokens: int) -> tuple[int, int]:
    """Find the most new tokens that are stored, and the most of a row's `tokens` that are stored in all."""
    narrow = narrow_of(run)
    if narrow is None or not narrow.all_layers:
        return pos.shape[1], tokens
    return narrowed.shape[1], min(tokens, narrowed.shape[1])


def by_token(
    scores: Float[Array, "Lg B K M"], pos: Int[Array, "B M"], tokens: int
) -> Float[Array, "Lg B K {tokens}"]:
    """Spread the scores of a first prompt's remaining tokens over all its tokens; -inf for the others."""
    whole = jnp.full((*scores.shape[:3], tokens + 1), -jnp.inf, scores.dtype)
    place = jnp.broadcast_to(jnp.where(pos >= 0, pos, tokens)[None, :, None], scores.shape)
    return jnp.put_along_axis(whole, place, scores, axis=3, inplace=False)[..., :tokens]

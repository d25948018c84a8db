"""Scores: shows what a method scores and keeps of a prompt, beside what the continuation attends to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import steps
from kvjax.api.generate import generate
from kvjax.api.prefill import bare_cache, padded, prefill
from kvjax.api.prepare import made
from kvjax.api.types import Lengths, TokenIds
from kvjax.base.errors import InputError
from kvjax.compat.layout_class import mesh_for
from kvjax.compat.shipped_fits import ready
from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.fitted import with_fitted
from kvjax.grammar.keys import key_of
from kvjax.hosts.arrays import fetch
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.observations.observe import Mass
from kvjax.methods import as_method
from kvjax.models.layers import Params
from kvjax.models.model import Model, check_single
from kvjax.pure import bind
from kvjax.state.cache import Cache, kept_positions
from kvjax.state.layer_order import by_layer
from kvjax.steps import Run

# How many tokens the model generates if no continuation is given.
WRITTEN = 16


class Scores(NamedTuple):
    """One entry per layer, T tokens of the prompt; None for layers without slots of their own.

    scores: the method's scores, +inf where a pattern protects and -inf after a row's end; None, too, if it
    scores nothing. kept: the tokens that a head holds after the prefill. oracle: the attention probability of
    the continuation's tokens for each token over the full cache, summed over them and a group's queries.
    overlap: the share of the kept tokens that are among as many of the largest in the oracle. mass: the share
    of the oracle's mass on the kept tokens. K are the KV heads, or the query heads if the method selects per
    query head.
    """

    scores: list[Float[np.ndarray, "B K T"] | None]
    kept: list[Bool[np.ndarray, "B K T"] | None]
    oracle: list[Float[np.ndarray, "B K T"] | None]
    overlap: list[Float[np.ndarray, "B K"] | None]
    mass: list[Float[np.ndarray, "B K"] | None]


def scores(
    model: Model,
    tokens: TokenIds,
    method: Method | str,
    *,
    lengths: Lengths | None = None,
    continuation: Array | np.ndarray | Sequence[Sequence[int]] | None = None,
) -> Scores:
    """Show which tokens of a prompt a method scores and keeps, and how far that agrees with an oracle.

    The oracle is the attention that the continuation pays to the prompt when nothing is evicted.

    Args:
        model: a model.
        tokens: token ids [B, T], padded on the right, or a list of lists.
        method: a method that keeps slots, or its text.
        lengths: tokens of each row [B], where rows are padded.
        continuation: one row of tokens per prompt, such as the true answers; None takes up to 16 tokens that
            the model itself generates over the full cache.

    Returns:
        A `Scores`, with an entry per layer: the method's scores and kept tokens, the oracle, and both
            compared.

    Raises:
        InputError: for what `kvjax.prefill` refuses, and if there are not as many continuations as prompts.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> found = scores(model, [list(range(3, 19))], kvjax.method("snapkv", budget=0.5, window=4))
    >>> found.scores[0].shape, found.kept[0].sum(-1).tolist()
    ((1, 2, 16), [[8, 8]])
    >>> all(0 < share <= 1 for share in found.mass[0][0])
    True
    """
    check_single(model, "scores are those of one decoder's layers")
    chosen = ready(model, as_method(method))
    if chosen.reread is not None:
        raise InputError(
            f"{chosen.id} reads prompts in a way of its own, expected a method that "
            "scores the slots of all: give one such as snapkv"
        )
    model = made(model, chosen)
    batch = padded(model, tokens, lengths)
    size = int(batch.lengths.max())
    _, cache = prefill(model, batch.tokens, lengths=batch.lengths, method=chosen, room=1)
    run = Run(model.config, bind(chosen, model), on_mesh=mesh_for(chosen, model.on_mesh))
    params = with_fitted(model.params, chosen)
    by_group = fetch(_scored(run, params, jnp.asarray(batch.tokens), jnp.asarray(batch.lengths)))
    kept = [_held(pos, size) if pos.shape[1] else None for pos in kept_positions(cache)]
    found = {
        gm.number(layer): x[..., :size]
        for i, gm in enumerate(run.groups(model.params))
        for layer, x in enumerate(by_group.get(i, ()))
    }
    oracle = _oracle(model, chosen, batch.tokens, batch.lengths, continuation)
    oracle = [None if x is None or mine is None else x for x, mine in zip(oracle, kept, strict=True)]
    pairs = [None if a is None or b is None else _agreement(a, b) for a, b in zip(kept, oracle, strict=True)]
    return Scores(
        [found.get(layer) for layer in range(len(kept))],
        kept,
        oracle,
        [None if pair is None else pair[0] for pair in pairs],
        [None if pair is None else pair[1] for pair in pairs],
    )


@partial(jax.jit, static_argnames="run")
def _scored(
    run: Run, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> dict[int, Float[Array, "_ B _ T"]]:
    prompt = steps.observe(run, params, tokens, lengths, None, steps.needs_of(run, params))
    return steps.scored(run, params, prompt)


@partial(jax.jit, static_argnames="run")
def _attended(
    run: Run, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, "B"], cache: Cache
) -> dict[int, Float[Array, "..."]]:
    """Per group, the attention that slots of a cache receive from new tokens [Lg, B, K, S]."""
    seen = steps.observe(run, params, tokens, lengths, cache, frozenset({Mass("sum")})).fresh
    return {
        i: f.masses[0][key_of(Mass("sum"))]
        for i, f in enumerate(seen)
        if f is not None and not isinstance(f, dict)
    }


def _oracle(
    model: Model,
    method: Method,
    tokens: Int[np.ndarray, "B T"],
    lengths: Int[np.ndarray, "B"],
    continuation: Array | np.ndarray | Sequence[Sequence[int]] | None,
) -> list[Float[np.ndarray, "B K _"] | None]:
    """Per layer, the attention that every token of the prompt receives from the continuation."""
    if continuation is None:
        new = min(WRITTEN, model.config.max_positions - int(lengths.max()))
        out = generate(model, tokens, lengths=lengths, max_new_tokens=new)
        written = zip(np.asarray(out.tokens).tolist(), out.lengths, strict=True)
        continuation = [row[:length] for row, length in written]
    after = padded(model, continuation, None)
    if len(after.lengths) != len(lengths):
        raise InputError(
            f"{len(after.lengths)} continuations were given for {len(lengths)} prompts, expected one for each"
        )
    per_query_head = method.keep is not None and method.keep.per_query_head
    whole = Method(Keep(None, Budget(1.0), Uniform(), per_query_head=per_query_head))
    _, cache = prefill(model, tokens, lengths=lengths, method=whole, room=1)
    run = Run(model.config, whole, on_mesh=mesh_for(whole, model.on_mesh))
    given = jnp.asarray(after.tokens), jnp.asarray(after.lengths)
    paid = fetch(_attended(run, model.params, *given, bare_cache(cache)))
    layers: list[np.ndarray | None] = []  # in the order of groups
    for i, group in enumerate(cache.groups):
        slots = group.tail
        count = jax.tree.leaves(group)[0].shape[0]
        if i not in paid or slots is None:
            layers += [None] * count
            continue
        pairs = zip(paid[i], fetch(slots.pos), strict=True)
        layers += [_by_position(*each, int(lengths.max())) for each in pairs]
    return by_layer(cache, layers)


def _by_position(
    mass: Float[np.ndarray, "B K S"], pos: Int[np.ndarray, "B K S"], size: int
) -> Float[np.ndarray, "B K T"]:
    """Move the mass of slots to the positions of their tokens."""
    at = np.asarray(pos)
    out = np.zeros((*at.shape[:2], size))
    b, k, s = np.nonzero(at >= 0)
    out[b, k, at[b, k, s]] = np.asarray(mass)[b, k, s]
    return out


def _held(pos: Int[np.ndarray, "B K S"], size: int) -> Bool[np.ndarray, "B K T"]:
    """Which positions the slots of a layer hold."""
    out = np.zeros((*pos.shape[:2], size), bool)
    b, k, s = np.nonzero(pos >= 0)
    out[b, k, pos[b, k, s]] = True
    return out


def _agreement(
    kept: Bool[np.ndarray, "B K T"], oracle: Float[np.ndarray, "B K T"]
) -> tuple[Float[np.ndarray, "B K"], Float[np.ndarray, "B K"]]:
    """Overlap with equally many of the largest, and the share of the mass; NaN if there is no mass.

    >>> _agreement(np.array([[[True, False, True]]]), np.array([[[0.5, 0.3, 0.2]]]))
    (array([[0.5]]), array([[0.7]]))
    """
    rank = np.argsort(np.argsort(-oracle, axis=-1, kind="stable"), axis=-1)
    count = kept.sum(-1)
    with np.errstate(invalid="ignore"):
        overlap = (kept & (rank < count[..., None])).sum(-1) / count
        return overlap, (oracle * kept).sum(-1) / oracle.sum(-1)

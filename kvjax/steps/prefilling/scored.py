"""The scores by which a prompt's slots are selected, of what it computed as the method stores it."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.compress.group import GroupMethod
from kvjax.compress.select import ComputedTokens, judged_layers, reused, score_slots, union
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import View
from kvjax.keep.observations.observe import UnrotatedKeys
from kvjax.models.layers import Params
from kvjax.models.stacking import layers_of_groups
from kvjax.state.cache import NOTHING
from kvjax.steps.prefilling.narrowing import by_token, new_positions
from kvjax.steps.prefilling.probe import with_probe
from kvjax.steps.prefilling.read import PrefillOutputs
from kvjax.steps.shared.rotate import seen_by_words
from kvjax.steps.shared.run import Run


def as_stored(run: Run, gm: GroupMethod, fresh: ComputedTokens) -> ComputedTokens:
    """Keys and values as the method stores them: perhaps unrotated, or repeated per query head."""
    assert fresh.k is not None
    k = fresh.observed[key_of(UnrotatedKeys())] if run.unrotated else fresh.k
    if gm.copies == 1:
        return fresh._replace(k=k)
    v = None if fresh.v is None else jnp.repeat(fresh.v, gm.copies, axis=2)
    return fresh._replace(k=jnp.repeat(k, gm.copies, axis=2), v=v)


def group_scores(
    run: Run,
    params: Params,
    gms: tuple[GroupMethod, ...],
    shown: dict[int, View],
    fresh: dict[int, ComputedTokens],
    length: Int[Array, "B"],
) -> dict[int, Float[Array, "Lg B K S"]]:
    """Compute the scores by which slots are selected, per group, with slots as words see them."""
    found = {
        i: score_slots(
            gms[i], view, fresh[i], length, run.attention_spec(gms[i].first), layers_of_groups(params)[i],
            run.met(gms[i].first),
        )
        for i, view in shown.items()
    }  # fmt: skip
    return reused({i: gms[i].keep for i in found}, found)


def scored(run: Run, params: Params, prompt: PrefillOutputs) -> dict[int, Float[Array, "_ B _ T"]]:
    """Per group, the scores of a first prompt's tokens by which `settle` selects; only groups that have any.

    Tokens that a group's layers did not read score -inf.
    """
    gms = run.groups(params)
    fresh = {
        i: as_stored(run, gms[i], f) for i, f in enumerate(prompt.fresh) if isinstance(f, ComputedTokens)
    }
    pos, some = prompt.positions.pos, prompt.narrowed
    at = {i: pos if some is None else new_positions(run, gms[i], pos, some) for i in fresh}
    stored = {i: union(gms[i], NOTHING, (), f, at[i]) for i, f in fresh.items()}
    length, specs = prompt.positions.length, {i: run.attention_spec(gms[i].first) for i in fresh}
    views = {i: seen_by_words(run, specs[i].rope, view, length) for i, view in stored.items()}
    views = {i: judged_layers(gms[i], view, length, specs[i]) for i, view in views.items()}
    probe = None if run.method.keep is None else run.method.keep.probe
    if probe is not None:
        fresh = with_probe(run, params, prompt, fresh, stored, probe, (NOTHING,) * len(gms))
    choosing = {i: view for i, view in views.items() if gms[i].keep is not None}
    found = group_scores(run, params, gms, choosing, fresh, length)
    tokens = prompt.positions.pos.shape[1]
    return {i: by_token(x, at[i], tokens) if x.shape[3] < tokens else x for i, x in found.items()}

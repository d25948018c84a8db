"""Probes: queries that attend to all slots of a prompt before any are selected."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.compress.capacity import longer
from kvjax.compress.group import GroupMethod
from kvjax.compress.segments import whole_slots
from kvjax.compress.select import ComputedTokens, union
from kvjax.grammar import Budget, Keep, Method, Store
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import View, over_layers
from kvjax.grammar.phase import BY_POSITION
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.observations.probe import SENSITIVITY
from kvjax.models.layers import Params
from kvjax.models.stacking import layers_of_groups
from kvjax.models.transformer import Positions
from kvjax.ops.attention.union import Keys
from kvjax.state.cache import NOTHING, Cache, GroupState, State
from kvjax.steps.prefilling.observe import observe
from kvjax.steps.prefilling.read import PrefillOutputs
from kvjax.steps.prefilling.sensitivity import read_with_sensitivity
from kvjax.steps.shared.rotate import rotated_keys, rotations_of
from kvjax.steps.shared.run import Run


def with_probe(
    run: Run,
    params: Params,
    prompt: PrefillOutputs,
    fresh: dict[int, ComputedTokens],
    views: dict[int, View],
    probe: Any,
    pasts: tuple[GroupState, ...],
) -> dict[int, ComputedTokens]:
    """`fresh` with what a probe observes of every uncompressed slot; `views` holds the slots as stored."""
    pos, length = prompt.positions
    given = prompt.question
    if given is None and not probe.ahead:
        given = probe.tokens(prompt.tokens, (pos >= 0).sum(-1, dtype=jnp.int32))
        if given is None:
            return fresh
    gms = run.groups(params)
    whole = {i: GroupState(tail=whole_slots(gms[i], view)) for i, view in views.items()}
    asked = probe.ahead if given is None else given[0].shape[1]
    states = {
        i: longer(gms[i], GroupState(state=State(dict(new))), asked)
        for i, new in enumerate(prompt.fresh)
        if isinstance(new, dict)
    }
    fixed = {i: pasts[i] for i, new in enumerate(prompt.fresh) if new is None}
    groups = tuple((whole | states | fixed).get(i, NOTHING) for i in range(len(gms)))
    bare, over = with_same_rotation(run), Cache(groups, length)
    tokens, lengths = given or _written(bare, params, prompt.logits, over, probe.ahead)
    gradients = ()
    if probe.sensitivity:
        reading, gradients = read_with_sensitivity(bare, params, tokens, lengths, over, probe.needs)
    else:
        reading = observe(bare, params, tokens, lengths, over, probe.needs)
    out = {}
    for i, f in fresh.items():
        new = reading.fresh[i]
        assert isinstance(new, ComputedTokens)
        mine = (layers_of_groups(params)[i], gms[i], views[i], new)
        keys = _keys_of_probe(run, *mine, reading.positions) if probe.keys else None
        observed = new.observed | ({SENSITIVITY: gradients[i]} if gradients else {})
        seen = {key_of(probe): probe.seen(new.masses[0] if new.masses else {}, observed, keys)}
        out[i] = f._replace(observed=f.observed | seen, readers=tuple(r | seen for r in f.readers))
    return out


def _written(
    run: Run, params: Params, logits: Float[Array, "B V"], over: Cache, many: int
) -> tuple[Int[Array, "B P"], Int[Array, "B"]]:
    """Generate tokens greedily after a prompt; return these, and their number."""
    rows = jnp.zeros(logits.shape[0], jnp.int32)

    def write(i: int | Array, tokens: Int[Array, "B P"], logits: Float[Array, "B V"]) -> Int[Array, "B P"]:
        return tokens.at[:, i].set(logits.argmax(-1).astype(jnp.int32))

    def more(i: int | Array, tokens: Int[Array, "B P"]) -> Int[Array, "B P"]:
        return write(i, tokens, observe(run, params, tokens, rows + i, over, frozenset()).logits)

    first = write(0, jnp.zeros((len(rows), many), jnp.int32), logits)
    return jax.lax.fori_loop(1, many, more, first), rows + many


def with_same_rotation(run: Run) -> Run:
    """Make a run that keeps everything, with keys stored as in `run`."""
    keep = None if run.phase == BY_POSITION else Keep(None, Budget(1.0), Uniform(), phase=run.phase)
    bare = Store(unrotated=True) if run.unrotated and keep is None else None
    return run._replace(method=Method(keep, bare), implementation=None)


def _keys_of_probe(
    run: Run, weights: Params, gm: GroupMethod, view: View, new: ComputedTokens, at: Positions
) -> Float[Array, "Lg B K P H"]:
    """Return a probe's own keys as its queries meet them, after a view's slots; weights: the group's."""
    rope, mine = run.attention_spec(gm.first).rope, at.pos[:, None]
    assert new.k is not None
    if met := run.met(gm.first):
        v = new.k if new.v is None else new.v
        return over_layers(
            lambda p, k, v: met(p, k, v, jnp.broadcast_to(mine, k.shape[:3]))[0], weights, new.k, v
        )

    def one(k: Float[Array, "B K P H"], pos: Int[Array, "B K S"]) -> Float[Array, "B K P H"]:
        (rotation,) = rotations_of(run, at.pos, [pos, mine])
        return rotated_keys(rope, Keys(k, k, mine), rotation, 1, at.length).k if rotation.keys else k

    return over_layers(one, new.k, view.pos)


def probed(run: Run, params: Params, prompt: PrefillOutputs, probe: Any) -> PrefillOutputs:
    """Read a prompt with a probe's scores, computed once so that many budgets can share them."""
    gms = run.groups(params)
    fresh = {i: f for i, f in enumerate(prompt.fresh) if isinstance(f, ComputedTokens)}
    views = {i: union(gms[i], NOTHING, (), f, prompt.positions.pos) for i, f in fresh.items()}
    fresh = with_probe(run, params, prompt, fresh, views, probe, (NOTHING,) * len(gms))
    return prompt._replace(fresh=tuple(fresh.get(i, f) for i, f in enumerate(prompt.fresh)))

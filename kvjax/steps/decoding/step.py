"""A decode step: append one token per row, attend, evict, flush."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.compress.capacity import free_by_group
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer, Memory, Projected, Step
from kvjax.models.transformer import decode_layers, unembed
from kvjax.state.axes import pinned, pinned_to
from kvjax.state.cache import Cache, GroupState
from kvjax.state.codes import with_arrays
from kvjax.steps.decoding.at_layer import AtLayer, StepInputs
from kvjax.steps.decoding.hooks import broken
from kvjax.steps.decoding.past import Past
from kvjax.steps.decoding.plan import step_plan
from kvjax.steps.decoding.prefetch import bring_first, bring_next
from kvjax.steps.decoding.step_end import StepOutputs
from kvjax.steps.shared.fitted_arrays import attach_arrays, groups_with_arrays
from kvjax.steps.shared.run import Run, alike, held


def step_fn(
    run: Run,
    params: Params,
    cache: Cache,
    token: Int[Array, "B"] | Float[Array, "B D"],
    append: Bool[Array, "B"],
) -> tuple[Float[Array, "B V"], Cache]:
    """Append one token per row (or a vector in its place), attend, evict.

    Rows with append=False store nothing: they read `token` again at the position of their last token, over
    the cache as it is. A row without a free slot stores nothing, and its logits are NaN.
    """
    x, new = step_hidden(run, params, cache, token, append)
    return pinned_to(unembed(params, x, run.config), run.on_mesh, "batch", "vocab"), new


def step_hidden(
    run: Run,
    params: Params,
    cache: Cache,
    token: Int[Array, "B"] | Float[Array, "B D"],
    append: Bool[Array, "B"],
) -> tuple[Float[Array, "B D"], Cache]:
    """`step_fn` up to the last norm: the hidden state after the layers, and the cache."""
    bare = run.groups(params)
    gms, plan = groups_with_arrays(bare, params, cache), step_plan(run, bare, cache.groups)
    full = append & (free_by_group(gms, cache).min(0) < 1)
    append = append & ~full
    at = jnp.where(append, cache.next, cache.next - 1)
    ids = token[:, None] if token.ndim == 1 else None
    shared = StepInputs(run, params, cache, gms, ids, at, at + 1, append)

    def attend(layer: Layer, x: Projected, state: GroupState):
        gm = gms[layer.group]
        past = Past(gm, layer.index, state.parts)
        here = AtLayer(shared, gm, layer, x, x.q, state, past, cache.pools)
        for hook in plan.layers[layer.group]:
            here = hook(here)
        assert here.out is not None
        return here.out, here.state, here.left

    def recur(layer: Layer, step: Step, state: GroupState):
        past = state.state
        assert past is not None
        out, new = step(past.layer_in_place(layer.index, layer.mixer.in_place), append[:, None])
        return out, GroupState(state=past.replaced(layer.index, new)), {}

    memory = Memory(
        at[:, None], attend, recur, held, implementation=run.without_gpu, takes=plan.takes,
        ahead=partial(bring_next, pools=cache.pools) if plan.far else None, on_mesh=run.on_mesh,
        alike=alike(gms), of_layers=cache.groups,
    )  # fmt: skip
    states = cache.groups if gms is bare else attach_arrays(cache.groups, gms)
    states = bring_first(states, cache.pools) if plan.far else states
    x, groups, seen, *_ = decode_layers(params, token[:, None], run.config, memory, states)
    end = StepOutputs(shared, groups, cache.pools, seen, x, full)
    for hook in plan.end:
        end = hook(end)
    groups = end.groups if gms is bare else with_arrays(end.groups, ())
    new = dataclasses.replace(
        cache, groups=groups, next=jnp.where(append, at + 1, cache.next), pools=end.pools
    )
    return broken(x[:, 0], end.lost), pinned(new, run.on_mesh)


step = jax.jit(step_fn, static_argnames=("run",), donate_argnames=("cache",))
step_keeping = jax.jit(step_fn, static_argnames=("run",))

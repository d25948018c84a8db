"""Restore tokens: learned tokens attend to a prompt before slots are evicted, and are then stored."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.compress.group import GroupMethod
from kvjax.compress.segments import whole_slots
from kvjax.compress.select import ComputedTokens
from kvjax.grammar.kinds import View
from kvjax.keep.observations.observe import UnrotatedKeys
from kvjax.keep.prompts.restore import RestoreTokens
from kvjax.models.layers import Params
from kvjax.state.cache import Cache, GroupState
from kvjax.steps.prefilling.lora import Marks
from kvjax.steps.prefilling.probe import with_same_rotation
from kvjax.steps.prefilling.read import PrefillOutputs, read_tokens
from kvjax.steps.prefilling.scored import as_stored
from kvjax.steps.shared.run import Run


def with_restored(
    run: Run,
    params: Params,
    prompt: PrefillOutputs,
    views: dict[int, View],
    scores: dict[int, Float[Array, "_ B K _"]],
) -> tuple[dict[int, View], dict[int, Float[Array, "_ B K _"]], Int[Array, "B"]]:
    """Return views with restore tokens' slots after the prompt's, their scores, and the length with them.

    The views hold slots as they are stored. Rows without new tokens get no restore tokens.
    """
    word: RestoreTokens = run.method.restore
    assert word.fitted is not None
    gms, (pos, length) = run.groups(params), prompt.positions
    many = jnp.where((pos >= 0).any(-1), word.tokens, 0).astype(jnp.int32)
    memory = params["fitted"][word.fitted.digest]["memory"].astype(params["norm"].dtype)
    x = jnp.broadcast_to(memory, (len(many), *memory.shape[1:]))
    marks = Marks(jnp.ones(x.shape[:2], jnp.float32), word.fitted.digest)
    over = Cache(tuple(GroupState(tail=whole_slots(gm, views[i])) for i, gm in enumerate(gms)), length)
    needs = frozenset({UnrotatedKeys(), *(trace for gm in gms for trace in gm.traces)})
    read = read_tokens(with_same_rotation(run), params, x, many, over, needs, marks=marks)
    stands, views, scores = read.positions.pos, dict(views), dict(scores)
    for i, gm in enumerate(gms):
        views[i] = _beside(run, gm, views[i], read.fresh[i], stands)
        most = jnp.where(stands >= 0, jnp.inf, -jnp.inf)[None, :, None]
        shape = (*scores[i].shape[:3], word.tokens)
        scores[i] = jnp.concatenate([scores[i], jnp.broadcast_to(most, shape)], axis=3)
    return views, scores, length + many


def _beside(run: Run, gm: GroupMethod, view: View, fresh: object, stands: Int[Array, "B M"]) -> View:
    """Append restore tokens' slots to a view, stored as the method stores keys and values."""
    assert isinstance(fresh, ComputedTokens) and fresh.k is not None and fresh.v is not None
    stored = as_stored(run, gm, fresh)
    k, v = stored.k, stored.v
    assert k is not None and v is not None
    pos = jnp.broadcast_to(stands[None, :, None], k.shape[:4])

    def join(old: Array, new: Array) -> Array:
        return jnp.concatenate([old, new], axis=3)

    bias = None if view.bias is None else join(view.bias, jnp.zeros(pos.shape, view.bias.dtype))
    traces = {name: join(old, fresh.traces[name]) for name, old in view.traces.items()}
    return View(join(view.k, k), join(view.v, v), join(view.pos, pos), bias, traces)

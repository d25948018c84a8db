"""Verification: one pass over many new tokens gives the logits and the cache that single steps would."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.compress.group import GroupMethod
from kvjax.models.layers import Params
from kvjax.state.cache import Cache, Slots
from kvjax.steps.prefilling.narrowing import unnarrowed
from kvjax.steps.prefilling.read import needs_of, read_tokens
from kvjax.steps.prefilling.settle import settle
from kvjax.steps.shared.run import Run


@partial(jax.jit, static_argnames=("run", "picking"), donate_argnames=("cache",))
def verify(
    run: Run,
    params: Params,
    cache: Cache,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    picking: bool = False,
) -> tuple[Float[Array, "B T V"], Cache]:
    """Return the logits at every new token, and the cache with these tokens in slots that it already has.

    The result equals that of single steps if no step changes what later tokens attend to: no slot is evicted
    except those outside a window, and none is encoded from the tail (`until_flush`). picking: every token
    attends to the slots that the method's read picks for it, not to all.
    """
    run = unnarrowed(run)
    needs = needs_of(run, params, compress=False)
    prompt = read_tokens(run, params, tokens, lengths, cache, needs, as_steps=True, picking=picking)
    bound = _longest_window(run.groups(params), cache)
    return prompt.logits, settle(
        run, params, prompt, cache, tokens=bound, room=0, compress=False, learn=False
    )


def _longest_window(gms: tuple[GroupMethod, ...], cache: Cache) -> int:
    """Find the most tokens for which windowed layers have slots; they get as many slots in addition."""
    tails = [group.tail for gm, group in zip(gms, cache.groups, strict=True) if gm.evicting]
    return max((tail.capacity - 1 for tail in tails if tail is not None), default=1)


@partial(jax.jit, static_argnums=0)
def until_flush(gms: tuple[GroupMethod, ...], cache: Cache) -> Int[Array, "B"]:
    """Count the tokens per row up to, and with, the one whose step flushes a granule of the tail."""
    least = jnp.full(cache.next.shape, 2**30, jnp.int32)
    for gm, group in zip(gms, cache.groups, strict=True):
        if gm.split:
            assert isinstance(group.tail, Slots)
            held = (group.tail.pos >= 0).sum(-1, dtype=jnp.int32).max((0, 2))
            least = jnp.minimum(least, gm.residual + gm.granule - held)
    return least

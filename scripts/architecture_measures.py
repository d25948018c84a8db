"""What scripts/architecture_table.py measures of a trained model: bytes of state, and how fast it decodes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from made_up_cache import noise, shapes

import kvjax
from kvjax import steps
from kvjax.cache import Cache, GroupState, Slots, State, nbytes
from kvjax.commands.sizes import abstract_params
from kvjax.grammar import Method
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import plan
from kvjax.steps import Run

# Steps that are timed, and the room that they need.
STEPS = 32


def measured(model: Path, contexts: Sequence[int]) -> dict[str, Any]:
    """Parameters, bytes of a row's state and decoded tokens per second, by the length of the context."""
    loaded = kvjax.load(model, dtype="float32")
    assert isinstance(loaded, Model)
    return {
        "parameters": sum(x.size for x in jax.tree.leaves(loaded.params)),
        "state_bytes": {str(n): state_bytes(loaded.config, n) for n in contexts},
        "decode_tokens_per_second": {str(n): round(decode_speed(loaded, n), 1) for n in contexts},
    }


def state_bytes(config: Config, tokens: int) -> int:
    """All that a cache of one row holds behind so many tokens, without room for more; in bfloat16."""
    params = abstract_params(config, "bfloat16")
    return nbytes(shapes(Run(config, Method()), params, 1, tokens, 0).groups)


def decode_speed(model: Model, tokens: int) -> float:
    """Tokens per second of one row behind so many tokens, in float32: the median step of a made-up cache."""
    run, params = Run(model.config, Method()), model.params
    assert len(params["layers"]) == len(plan(model.config))
    cache = after(shapes(run, params, 1, tokens, STEPS + 2), tokens)
    token, append, times = jnp.zeros(1, jnp.int32), jnp.ones(1, bool), []
    for _ in range(STEPS):
        began = time.perf_counter()
        logits, cache = steps.step(run, params, cache, token, append)
        logits.block_until_ready()
        times.append(time.perf_counter() - began)
    # The first step compiles.
    return 1 / float(np.median(times[1:]))


def after(like: Cache, tokens: int) -> Cache:
    """A cache of these shapes as `tokens` tokens leave it, with small random numbers in it."""
    key = jax.random.key(0)

    def slots(group: Slots) -> Slots:
        live = tokens if group.capacity > tokens else group.capacity - 1
        row = np.full(group.capacity, -1, np.int32)
        row[:live] = np.arange(tokens - live, tokens)
        filled = jax.tree.map(lambda x: noise(key, x, 0.1), group)
        return dataclasses.replace(filled, pos=jnp.broadcast_to(jnp.asarray(row), group.pos.shape))

    def part(name: str, x: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.full(x.shape, tokens if name == "count" else 0, x.dtype)
        return noise(key, x, 0.1)

    groups = []
    for group in like.groups:
        parts = [slots(s) for s in group.parts if isinstance(s, Slots)]
        filled = group.with_parts(parts)
        if group.state is not None:
            filled = GroupState(state=State({n: part(n, x) for n, x in group.state.data.items()}))  # type: ignore[arg-type]
        groups.append(filled)
    return Cache(tuple(groups), jnp.full(like.next.shape, tokens, jnp.int32))

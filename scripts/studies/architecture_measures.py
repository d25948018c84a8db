"""The measurements of architecture_table.py: state, recall, answers, and decode speed.

Speeds are per second of process time on one core, so other processes on that core do not count.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import steps
from kvjax.api import block_transformer
from kvjax.api.block_transformer import BlockConfig, BlockStep
from kvjax.eval.tasks.associative_recall import ROW_TOKENS, pairs_batch
from kvjax.grammar import Method
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.plan.cache_sizes import abstract_params
from kvjax.state.cache import Cache, GroupState, Slots, State, nbytes
from kvjax.steps import Run
from kvjax.train.data.sources import source_of, words_of
from kvjax.train.losses import next_token
from kvjax.train.settings import Data, Loop
from scripts.bench.made_up_cache import noise, shapes

# How many steps are timed, and the room that they need.
STEPS = 32
# How many bytes are read twice, and how many such texts there are.
TWICE, TEXTS = 120, 64
# How many questions of associative recall are asked, and a seed that no training uses.
QUESTIONS, HELD_OUT = 2048, 10_000


def measured(model: Path, contexts: Sequence[int]) -> dict[str, Any]:
    """Parameters, bytes of a row's state by context length, and bits per byte of a text read twice."""
    loaded = _loaded(model)
    return {
        "parameters": sum(x.size for x in jax.tree.leaves(loaded.params)),
        "state_bytes": {str(n): state_bytes(loaded.config, n) for n in contexts},
        "recall_bits": [round(x, 4) for x in recall(loaded)],
    }


def speeds(model: Path, contexts: Sequence[int]) -> dict[str, Any]:
    """Measure decoded tokens per second, by context length."""
    loaded = _loaded(model)
    return {"decode_tokens_per_second": {str(n): round(decode_speed(loaded, n), 1) for n in contexts}}


def _loaded(model: Path) -> Model:
    loaded = kvjax.load(model, dtype="float32")
    assert isinstance(loaded, Model)
    return loaded


def answered(model: Path, pairs: Sequence[int]) -> dict[str, float]:
    """Compute the share of associative-recall questions a model answers, by the number of pairs in a row.

    The rows are drawn with another seed than those of training.
    """
    loaded, found = _loaded(model), {}
    for count in pairs:
        rng = np.random.default_rng(HELD_OUT)
        tokens, weights = pairs_batch(rng, QUESTIONS // count, ROW_TOKENS * count)
        said = np.asarray(loaded(tokens[:, :-1])).argmax(-1)
        right = (said == tokens[:, 1:])[weights[:, 1:] > 0]
        found[str(count)] = round(float(right.mean()), 4)
    return found


def recall(model: Model) -> tuple[float, float]:
    """Bits per byte of held-out texts followed by a copy of themselves: of both halves."""
    words = words_of(Data())
    _, held = source_of(Data(), words, Loop(length=TWICE, evaluate_rows=TEXTS), segments=False)
    assert held is not None
    text = held.rows.tokens[:, :TWICE]
    tokens = jnp.asarray(np.concatenate([text, text], 1))
    logits = model(tokens[:, :-1])
    # The first byte of the second half cannot be predicted.
    place = np.arange(2 * TWICE)[None]
    found = []
    for of_reading in ((place > 0) & (place < TWICE), place > TWICE):
        weights = jnp.asarray(np.broadcast_to(of_reading, tokens.shape), jnp.float32)
        found.append(float(next_token(logits, tokens, weights) / weights.sum()) / float(np.log(2)))
    return found[0], found[1]


def state_bytes(config: Config | BlockConfig, tokens: int) -> int:
    """Bytes of a one-row cache after so many tokens, without room for more, in bfloat16."""
    params = abstract_params(config, "bfloat16")
    return nbytes(_cache_of(config, params, tokens, 0).groups)


def decode_speed(model: Model, tokens: int) -> float:
    """Tokens per second of one row after so many tokens, in float32: the median step on a random cache."""
    config, params = model.config, model.params
    like = _cache_of(config, params, tokens, STEPS + 2)
    cache = (
        _blocks_after(like, config, params, tokens)
        if isinstance(config, BlockConfig)
        else after(like, tokens)
    )
    token, append, times = jnp.zeros(1, jnp.int32), jnp.ones(1, bool), []
    step = jax.jit(_stepping(config), donate_argnums=1)
    for _ in range(STEPS):
        began = time.process_time()
        logits, cache = step(params, cache, token, append)
        logits.block_until_ready()
        times.append(time.process_time() - began)
    # The first step compiles.
    return 1 / float(np.median(times[1:]))


def _stepping(config: Config | BlockConfig) -> Callable[..., tuple[jax.Array, Cache]]:
    if isinstance(config, BlockConfig):
        both = BlockStep(config, Method())
        return lambda *given: both(*given)  # jit takes no tuples
    return partial(steps.step, Run(config, Method()))


def _cache_of(config: Config | BlockConfig, params: Any, tokens: int, room: int) -> Cache:
    """Compute the shapes of a one-row cache after so many tokens."""
    if isinstance(config, Config):
        return shapes(Run(config, Method()), params, 1, tokens, room)
    ids, lengths = jax.ShapeDtypeStruct((1, tokens), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    of = partial(block_transformer.prefill, config=config, method=Method(), room=room)
    return jax.eval_shape(of, params, ids, lengths)[1]


def _blocks_after(like: Cache, config: BlockConfig, params: Any, tokens: int) -> Cache:
    """`after` for both decoders of a Block Transformer: the blocks of the lower, one block of the upper."""
    below, (*inside, opened) = len(params["blocks"]["layers"]), like.groups
    parts = after(Cache(tuple(inside[:below]), like.next), tokens // config.length)
    above = after(Cache(tuple(inside[below:]), like.next), config.prefix + tokens % config.length)
    opened = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), opened)
    return Cache((*parts.groups, *above.groups, opened), jnp.full(like.next.shape, tokens, jnp.int32))


def after(like: Cache, tokens: int) -> Cache:
    """Make a cache of these shapes as if `tokens` tokens had been read, with small random numbers."""
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

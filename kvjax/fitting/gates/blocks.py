"""Fits what blocks of keys are said to get of a group's attention, to what they get in full attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.api.prefill import padded
from kvjax.base.errors import InputError
from kvjax.compress.select import ComputedTokens
from kvjax.fitting.loops.descent import Arrays, descended
from kvjax.fitting.loops.whole import check_whole
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted, ModelSizes
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Inputs, Observation
from kvjax.grammar.read_kinds import FittedBlocks
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.steps import Run, observe

# Queries of a text that are compared.
ASKS = 64


@dataclasses.dataclass(frozen=True)
class SpreadQueries(Observation):
    """`asks` rotated queries of every row, evenly spread over its tokens from `first` on."""

    asks: int
    first: int

    def __call__(self, inputs: Inputs) -> tuple[Float[Array, "B N W H"], Int[Array, "B W"]]:
        count = (inputs.pos >= 0).sum(-1, dtype=jnp.int32)[:, None]
        step = (jnp.arange(self.asks, dtype=jnp.int32) + 1)[None]
        at = self.first + (count - self.first) * step // self.asks - 1
        at = jnp.clip(at, 0, inputs.q.shape[2] - 1)
        q = jnp.take_along_axis(inputs.q, at[:, None, :, None], axis=2)
        return q, jnp.take_along_axis(inputs.pos, at, axis=1)


class Asked(NamedTuple):
    """Queries of a batch of texts with their positions, and the keys, of all layers."""

    q: Float[Array, "L B N W H"]
    at: Int[Array, "L B W"]
    k: Float[Array, "L B K T H"]


def fit_blocks(
    model: Model,
    batches: list[list[list[int]]],
    *,
    method: Method,
    rate: float = 0.003,
    epochs: int = 2,
    steps: int = 16,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the arrays of a read of blocks by the divergence of its shares from those of full attention.

    The loss is KL(p || s) over the blocks that a step picks from, those before the newest tokens and behind
    the first ones: p is the attention that a block's keys get from the heads of a group, s are the read's
    `shares`, both renormalised over these blocks. It is the mean over 64 queries of every text, summed over
    layers. Adam takes `steps` steps on every batch, in `epochs` passes over the texts.

    Raises InputError for texts that hold no two such blocks, and a model whose layers differ in what they
    keep.
    """
    check_whole(model, "blocks that a step reads")
    read = method.read
    assert isinstance(read, FittedBlocks)
    run = Run(model.config, Method())
    least = first_asked(read)
    rows = [[row for row in batch if len(row) >= least] for batch in batches]
    rows = [batch for batch in rows if batch]
    if not rows:
        raise InputError(
            f"a read of blocks of {read.granule} tokens is fitted to texts of at least {least} tokens, which "
            "hold two of them to choose from: give longer texts (--length), or a smaller page"
        )
    sizes = read.sizes(ModelSizes.of(model.config))
    arrays = {name: jnp.zeros(shape, jnp.float32) for name, (_, shape) in sizes.items()}
    asked = SpreadQueries(ASKS, least)

    def texts() -> Iterator[Asked]:
        for batch in progress([batch for _ in range(epochs) for batch in rows]):
            given = padded(model, batch, None)
            yield _read(run, asked, model.params, jnp.asarray(given.tokens), jnp.asarray(given.lengths))

    loss = partial(divergence, read, run.attention_spec(0).scale)
    found = descended(
        lambda arrays, batch, _: loss(arrays, batch), arrays, texts(), (), rate=rate, steps=steps
    )
    return Fitted(found, type(read).__name__, model.signature)


def first_asked(read: FittedBlocks) -> int:
    """Return the shortest text whose last token picks among two blocks."""
    return (-(-read.sinks // read.granule) + 2) * read.granule + read.newest + 1


def divergence(read: FittedBlocks, scale: float, arrays: Arrays, batch: Asked) -> Float[Array, ""]:
    """Compute the loss of `fit_blocks` on the queries of a batch, summed over layers."""
    q, at, k = batch
    layers, b, heads, _, h = k.shape
    k = k[..., : k.shape[3] // read.granule * read.granule, :]
    q = q.reshape(layers, b, heads, -1, *q.shape[3:]).astype(jnp.float32)
    s = jnp.einsum("lbkgth,lbksh->lbkgts", q, k.astype(jnp.float32)) * scale
    slot = jnp.arange(k.shape[3], dtype=jnp.int32).reshape(1, 1, 1, 1, 1, -1)
    s = jnp.where(slot <= at[:, :, None, None, :, None], s, -jnp.inf)
    told = jax.nn.softmax(s, -1).sum(3).reshape(layers, b, heads, at.shape[2], -1, read.granule).sum(-1)
    live = candidates(read, at, told.shape[-1])[:, :, None]
    told = jnp.where(live, told, 0.0)
    told = told / jnp.maximum(told.sum(-1, keepdims=True), 1e-30)
    said = read.shares(q, read.summarise(k, arrays), live, scale)
    each = (told * (jnp.log(jnp.maximum(told, 1e-30)) - said)).sum(-1)
    return each.mean((1, 2, 3)).sum()


def candidates(read: FittedBlocks, at: Int[Array, "*b T"], blocks: int) -> Bool[Array, "*b T P"]:
    """Find full blocks before the newest tokens from which tokens at these positions pick, without sinks."""
    number = jnp.arange(blocks, dtype=jnp.int32).reshape(*(1,) * at.ndim, -1)
    old = (number + 1) * read.granule <= at[..., None] + 1 - read.newest
    return old & (number >= -(-read.sinks // read.granule))


@partial(jax.jit, static_argnames=("run", "asked"))
def _read(
    run: Run, asked: SpreadQueries, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> Asked:
    prompt = observe(run, params, tokens, lengths, None, frozenset({asked}))
    fresh = [f for f in prompt.fresh if isinstance(f, ComputedTokens)]
    each = [(*f.observed[key_of(asked)], f.k) for f in fresh]
    return Asked(*(jnp.concatenate(x) for x in zip(*each, strict=True)))

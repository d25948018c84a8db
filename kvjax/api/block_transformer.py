"""Public functions of the Block Transformer: the pasts of its two decoders as one cache.

The cache has the layers of both decoders, those of the block decoder first, which have one slot per block;
those of the token decoder have at most one block of slots; then a state with the tokens of the incomplete
block. Everything else follows from the position `next` of a row's next token: how many complete blocks
there are, and how many tokens the open one has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import steps
from kvjax.api.memory import check_memory
from kvjax.api.prefill import (
    ROOM,
    bare_cache,
    check_cache,
    check_reach,
    check_room,
    labelled,
    method_of,
    padded,
)
from kvjax.api.rows import reset_rows
from kvjax.api.step import positions_left
from kvjax.api.types import Lengths, OneToken, TokenIds
from kvjax.base.checks import one_token, whole_text
from kvjax.base.errors import InputError
from kvjax.compat.model_fit import check_block_transformer, check_budget
from kvjax.compress.capacity import free_by_group
from kvjax.grammar import Method
from kvjax.models.block_transformer import (
    BlockConfig,
    block_inputs,
    embedded,
    forward,
    init,
    prefix_of,
)
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.state.cache import Cache, GroupState, State
from kvjax.steps import Run
from kvjax.steps.decoding.step import step_fn

__all__ = ["BlockConfig", "BlockTransformer", "Parts", "init", "parts"]

_forward = jax.jit(forward, static_argnames="config")


class Parts(NamedTuple):
    """A cache split into parts; positions count blocks in one, and the open block's inputs in the other."""

    blocks: Cache
    tokens: Cache
    open: Int[Array, "B L"]
    count: Int[Array, "B"]


def parts(params: Params, cache: Cache, config: BlockConfig) -> Parts:
    """Return both decoders' caches, and the tokens of the open block, `count` of them."""
    below = len(params["blocks"]["layers"])
    count = cache.next % config.length
    blocks = Cache(cache.groups[:below], cache.next // config.length, cache.pools)
    last = cache.groups[-1].state
    assert last is not None
    opened = last.layer(0)["open"]
    return Parts(blocks, Cache(cache.groups[below:-1], config.prefix + count), opened, count)


def _joined(blocks: Cache, tokens: Cache, opened: Int[Array, "B L"], at: Int[Array, "B"]) -> Cache:
    assert not tokens.pools, "the token decoder keeps all of its few slots"
    last = GroupState(state=State({"open": opened[None]}))
    return Cache((*blocks.groups, *tokens.groups, last), at, blocks.pools)


def _token_run(config: BlockConfig, method: Method) -> Run:
    """Build the token decoder's run, whose cache holds its whole block, encoded by the method's store."""
    return Run(config.tokens, Method(store=method.store))


@partial(jax.jit, static_argnames=("config", "method", "room"))
def prefill(
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    *,
    config: BlockConfig,
    method: Method,
    room: int,
) -> tuple[Float[Array, "B V"], Cache]:
    """Run the block decoder on a prompt's complete blocks, and the token decoder on the open one."""
    n, whole = config.length, -(-tokens.shape[1] // config.length)
    padded = jnp.pad(tokens, ((0, 0), (0, (whole + 1) * n - tokens.shape[1])))
    full, count = lengths // n, lengths % n
    said, blocks = steps.prefill(
        Run(config.blocks, method), params["blocks"], block_inputs(params, padded[:, : whole * n], config),
        full, None, tokens_bound=whole, room=-(-room // n), compress=True,
    )  # fmt: skip
    here = full[:, None] * n + jnp.arange(n, dtype=jnp.int32)[None]
    rest = jnp.where(here < lengths[:, None], jnp.take_along_axis(padded, here, axis=1), 0)
    prefix = jnp.where((full > 0)[:, None, None], prefix_of(params, said, config), params["start"][None])
    x = jnp.concatenate([prefix, embedded(params, rest[:, : n - 1], config)], 1)
    logits, inside = steps.prefill(
        _token_run(config, method), params["tokens"], x, config.prefix + count, None,
        tokens_bound=config.inside, room=0, compress=True,
    )  # fmt: skip
    return logits, _joined(blocks, inside, rest, lengths)


class BlockStep(NamedTuple):
    """A `Step` of both decoders; rows with append=False are unchanged, and their logits are meaningless."""

    config: BlockConfig
    method: Method

    def __call__(
        self, params: Params, cache: Cache, token: Int[Array, "B"], append: Bool[Array, "B"]
    ) -> tuple[Float[Array, "B V"], Cache]:
        return _stepped(self.config, self.method, params, cache, token, append)


def _stepped(
    config: BlockConfig,
    method: Method,
    params: Params,
    cache: Cache,
    token: Int[Array, "B"],
    append: Bool[Array, "B"],
) -> tuple[Float[Array, "B V"], Cache]:
    n, rows = config.length, token.shape[0]
    past = parts(params, cache, config)
    here = jnp.arange(n, dtype=jnp.int32)[None] == past.count[:, None]
    block = jnp.where(here & append[:, None], token[:, None], past.open)
    ends = append & (past.count == n - 1)

    def add(blocks: Cache) -> tuple[Array, Cache]:
        x = block_inputs(params, block, config)[:, 0]
        return step_fn(Run(config.blocks, method), params["blocks"], blocks, x, ends)

    # A loop of one iteration or none: XLA for GPUs copies everything that passes through a conditional.
    nothing = jnp.zeros((rows, config.blocks.vocab), jax.eval_shape(add, past.blocks)[0].dtype)
    turns = ends.any().astype(jnp.int32)
    said, blocks = jax.lax.fori_loop(0, turns, lambda _, state: add(state[1]), (nothing, past.blocks))
    # A row with a complete block begins the next one with its prefix, the others continue with their token.
    inputs = jnp.zeros((rows, config.prefix, config.tokens.d_model), params["start"].dtype)
    inputs = inputs.at[:, 0].set(embedded(params, token, config))
    inputs = jnp.where(ends[:, None, None], prefix_of(params, said, config), inputs)
    new = jnp.where(append, jnp.where(ends, config.prefix, 1), 0)
    logits, inside = steps.prefill(
        _token_run(config, method), params["tokens"], inputs, new,
        reset_rows(past.tokens, ends), tokens_bound=config.inside, room=0, compress=False,
    )  # fmt: skip
    opened, at = jnp.where(ends[:, None], 0, block), jnp.where(append, cache.next + 1, cache.next)
    return logits, _joined(blocks, inside, opened, at)


@partial(jax.jit, static_argnames="step", donate_argnames="cache")
def _step(
    step: BlockStep, params: Params, cache: Cache, token: Int[Array, "B"], append: Bool[Array, "B"]
) -> tuple[Float[Array, "B V"], Cache]:
    return step(params, cache, token, append)


@partial(jax.jit, static_argnames=("config", "method"))
def _reset(
    params: Params, cache: Cache, rows: Bool[Array, "B"], *, config: BlockConfig, method: Method
) -> Cache:
    """Empty rows, so that they begin with the first prefix."""
    past = parts(params, cache, config)
    start = jnp.broadcast_to(params["start"][None], (rows.shape[0], *params["start"].shape))
    _, inside = steps.prefill(
        _token_run(config, method), params["tokens"], start, jnp.where(rows, config.prefix, 0),
        reset_rows(past.tokens, rows), tokens_bound=config.inside, room=0, compress=False,
    )  # fmt: skip
    opened = jnp.where(rows[:, None], 0, past.open)
    return _joined(reset_rows(past.blocks, rows), inside, opened, jnp.where(rows, 0, cache.next))


@partial(jax.jit, static_argnames=("config", "method"))
def _free(params: Params, cache: Cache, *, config: BlockConfig, method: Method) -> Int[Array, "B"]:
    """Per row, how many more tokens fit: whole blocks, and an open one that is never completed."""
    past, run = parts(params, cache, config), Run(config.blocks, method)
    free = free_by_group(run.groups(params["blocks"]), past.blocks).min(0)
    blocks = jnp.minimum(free, 2**30 // config.length)
    return blocks * config.length + config.length - 1 - past.count


@dataclasses.dataclass(frozen=True, repr=False)
class BlockTransformer(Model):
    """A Block Transformer with its weights; calling it gives the logits [B, T, V] of every token.

    The authors' code pads the text on the left so that the first block has one before it; here the first
    prefix is learned (`params["start"]`). The method of a prefill compresses the block decoder's slots; its
    codecs also encode the token decoder's few slots. `kvjax.prefill`, `step` and `generate` call the methods
    below; `kvjax.fork` copies rows of its caches.

    >>> from kvjax.models.config import Config
    >>> width = dict(heads=2, kv_heads=1, head_dim=8, d_ff=16)
    >>> blocks = Config(vocab=32, d_model=16, layers=1, **width)
    >>> config = BlockConfig(blocks, Config(vocab=20, d_model=16, layers=1, **width))
    >>> model = BlockTransformer(config, init(config, jax.random.key(0)))
    >>> logits, cache = model.prefill([[1, 2, 3, 4, 5, 6]], room=4)
    >>> logits, cache = model.step(cache, [7])
    >>> logits.shape, cache.next.tolist(), parts(model.params, cache, config).blocks.next.tolist()
    ((1, 20), [7], [1])
    """

    config: BlockConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __call__(
        self, tokens: Int[Array | np.ndarray, "B T"] | Sequence[Sequence[int]]
    ) -> Float[Array, "B T V"]:
        config = self.config
        return _forward(self.params, whole_text(tokens, config.vocab, config.max_positions), config)

    def prefill(
        self,
        tokens: TokenIds,
        *,
        method: Method | str | None = None,
        lengths: Lengths | None = None,
        room: int = ROOM,
    ) -> tuple[Float[Array, "B V"], Cache]:
        """Logits [B, V] at each row's last token, and the cache with free slots for `room` more tokens.

        Arguments and errors are those of `kvjax.prefill`. Raises InputError, too, for methods that do not fit
        the block decoder or need tokens to repeat, and budgets of blocks smaller than a method's window.
        """
        room, chosen = check_room(self, room), method_of(self, method, None)
        check_memory(self, tokens, chosen, room)
        batch = padded(self, tokens, lengths)
        check_reach(self, int(batch.lengths.max()))
        check_block_transformer(chosen, self.config)
        check_budget(chosen, batch.lengths // self.config.length, "blocks")
        logits, cache = prefill(
            self.params, jnp.asarray(batch.tokens), jnp.asarray(batch.lengths),
            config=self.config, method=chosen, room=room,
        )  # fmt: skip
        return logits, labelled(cache, chosen, self)

    def step(self, cache: Cache, token: OneToken) -> tuple[Float[Array, "B V"], Cache]:
        """Read a token per row; consumes the cache. InputError if it is full or belongs to another model."""
        check_cache(self, cache)
        ids = jnp.asarray(one_token(token, cache.next.shape[0], self.config.vocab), jnp.int32)
        bare, spare = bare_cache(cache), cache.spare
        if spare < 1:
            free = _free(self.params, bare, config=self.config, method=_decoding(cache.method))
            spare = int(np.asarray(free).min())
            if spare < 1:
                raise InputError(
                    "the cache is full: give prefill(..., room=) the number of tokens you will add"
                )
            spare = min(spare, positions_left(self, cache))
        append = jnp.ones(ids.shape, bool)
        logits, new = _step(self.stepping(cache.method), self.params, bare, ids, append)
        return logits, dataclasses.replace(labelled(new, cache.method, self), spare=spare - 1)

    def stepping(self, method: Method | None) -> BlockStep:
        """Return a decode step without checks."""
        return BlockStep(self.config, _decoding(method))

    def reset(self, cache: Cache, rows: Bool[Array | np.ndarray, "B"]) -> Cache:
        """Empty the rows of the cache where `rows` is true; other rows are unchanged."""
        check_cache(self, cache)
        method = _decoding(cache.method)
        new = _reset(self.params, bare_cache(cache), jnp.asarray(rows), config=self.config, method=method)
        return labelled(new, cache.method or Method(), self)


@lru_cache(maxsize=1024)
def _decoding(method: Method | None) -> Method:
    """Return the part of a method that its steps share; cached, because steps look it up one by one."""
    return (method or Method()).decode_part()

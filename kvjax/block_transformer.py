"""The Block Transformer: one decoder over blocks of tokens, one over the tokens of a block.

Both are ordinary decoders of this package. A block of L tokens becomes one input of the *block decoder*, the
concatenation of L narrow embeddings; what the block decoder says after it, instead of logits, are the first
inputs of the *token decoder* for the next block, which sees nothing else but its own block. So a cache holds
one slot per block below and at most a block above.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import steps
from kvjax.cache import Cache
from kvjax.errors import InputError
from kvjax.fit import check_fit
from kvjax.grammar import Method
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.params import init as init_decoder
from kvjax.models.transformer import forward as decoder_forward
from kvjax.place.rows import fork, reset_rows
from kvjax.steps import Run


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Sizes of a Block Transformer (Ho et al., 2024, arXiv:2406.02657).

    blocks: the block decoder, whose vocabulary is what it says about the next block: `prefix` inputs of the
    token decoder's width. tokens: the token decoder, over the text's vocabulary. length: tokens per block.

    Raises ValueError where the two do not fit each other.
    """

    blocks: Config
    tokens: Config
    length: int = 4
    prefix: int = 2

    def __post_init__(self):
        if self.length < 1 or self.prefix < 1:
            raise ValueError(f"length and prefix must be >= 1, got {self.length} and {self.prefix}")
        if self.blocks.d_model % self.length:
            raise ValueError(
                f"a block's input of {self.blocks.d_model} channels is no concatenation of {self.length} "
                f"tokens: choose a d_model of the block decoder that {self.length} divides"
            )
        if self.blocks.vocab != self.prefix * self.tokens.d_model:
            raise ValueError(
                f"the block decoder says {self.blocks.vocab} numbers, but {self.prefix} inputs of the token "
                f"decoder are {self.prefix * self.tokens.d_model}: set its vocab to that"
            )


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["blocks", "tokens", "open", "count"],
    meta_fields=["method"],
    drop_fields=["spare"],
)
@dataclasses.dataclass(frozen=True)
class BlockCache:
    """The past of both decoders, and the tokens of the block that is not complete: `count` of them.

    method compresses the blocks' slots. spare: the host's note of how many more tokens fit.
    """

    blocks: Cache
    tokens: Cache
    open: Int[Array, "B L"]
    count: Int[Array, "B"]
    method: Method = Method()
    spare: int = 0


def init(config: BlockConfig, key: Array, dtype: Any = jnp.float32) -> Params:
    """Random parameters: both decoders', the narrow embedding of the blocks, and the first block's prefix."""
    keys = jax.random.split(key, 4)
    width = config.blocks.d_model // config.length
    narrow = jax.random.normal(keys[2], (config.tokens.vocab, width), dtype)
    start = jax.random.normal(keys[3], (config.prefix, config.tokens.d_model), dtype)
    blocks = init_decoder(config.blocks, keys[0], dtype)
    del blocks["embed"]  # its inputs come as vectors
    return {
        "embed": narrow * width**-0.5,
        "start": start * config.tokens.d_model**-0.5,
        "blocks": blocks,
        "tokens": init_decoder(config.tokens, keys[1], dtype),
    }


def forward(params: Params, tokens: Int[Array, "B T"], config: BlockConfig) -> Float[Array, "B T V"]:
    """Logits of every token without a cache: all blocks at once, then the inside of all blocks at once."""
    b, t = tokens.shape
    n, whole = config.length, -(-t // config.length)
    padded = jnp.pad(tokens, ((0, 0), (0, (whole + 1) * n - t)))
    said = decoder_forward(
        params["blocks"], _block_inputs(params, padded[:, : whole * n], config), config.blocks
    )
    said = said.reshape(b, whole, config.prefix, -1).astype(params["start"].dtype)
    start = jnp.broadcast_to(params["start"][None, None], (b, 1, *params["start"].shape))
    inside = _embedded(params, padded.reshape(b, whole + 1, n)[:, :, : n - 1], config)
    x = jnp.concatenate([jnp.concatenate([start, said], 1), inside], 2)
    x = x.reshape(b * (whole + 1), config.prefix + n - 1, -1)
    logits = decoder_forward(params["tokens"], x, config.tokens)[:, config.prefix - 1 :]
    # Entry i of a block is what is said of its token i: the logits of token t stand at t + 1.
    return logits.reshape(b, (whole + 1) * n, -1)[:, 1 : t + 1]


def _block_inputs(params: Params, tokens: Int[Array, "B T"], config: BlockConfig) -> Float[Array, "B M D"]:
    """One input per whole block: the narrow embeddings of its tokens side by side."""
    b, t = tokens.shape
    return params["embed"][tokens].reshape(b, t // config.length, -1)


def _embedded(params: Params, tokens: Int[Array, "*s"], config: BlockConfig) -> Float[Array, "*s D"]:
    table = params["tokens"]["embed"]
    return table[tokens] * jnp.asarray(config.tokens.embed_scale, table.dtype)


@partial(jax.jit, static_argnames=("config", "method", "room"))
def prefill(
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    *,
    config: BlockConfig,
    method: Method,
    room: int,
) -> tuple[Float[Array, "B V"], BlockCache]:
    """Both decoders over a prompt: the blocks that are complete below, the one that is not above."""
    n, whole = config.length, -(-tokens.shape[1] // config.length)
    padded = jnp.pad(tokens, ((0, 0), (0, (whole + 1) * n - tokens.shape[1])))
    full, count = lengths // n, lengths % n
    said, blocks = steps.prefill(
        Run(config.blocks, method), params["blocks"], _block_inputs(params, padded[:, : whole * n], config),
        full, None, tokens_bound=whole, room=-(-room // n), compress=True,
    )  # fmt: skip
    here = full[:, None] * n + jnp.arange(n, dtype=jnp.int32)[None]
    rest = jnp.where(here < lengths[:, None], jnp.take_along_axis(padded, here, axis=1), 0)
    prefix = jnp.where((full > 0)[:, None, None], _prefix(params, said, config), params["start"][None])
    x = jnp.concatenate([prefix, _embedded(params, rest[:, : n - 1], config)], 1)
    logits, inside = steps.prefill(
        _token_run(config, method), params["tokens"], x, config.prefix + count, None,
        tokens_bound=config.prefix + n - 1, room=0, compress=True,
    )  # fmt: skip
    return logits, BlockCache(blocks, inside, rest, count, method)


def _prefix(params: Params, said: Float[Array, "B S"], config: BlockConfig) -> Float[Array, "B P D"]:
    return said.reshape(said.shape[0], config.prefix, -1).astype(params["start"].dtype)


def _token_run(config: BlockConfig, method: Method) -> Run:
    """The token decoder keeps its whole block, stored as the method stores."""
    return Run(config.tokens, Method(store=method.store))


@partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _step(
    params: Params, cache: BlockCache, token: Int[Array, "B"], *, config: BlockConfig
) -> tuple[Float[Array, "B V"], BlockCache]:
    n, rows = config.length, token.shape[0]
    at = jnp.arange(n, dtype=jnp.int32)[None]
    block = jnp.where(at == cache.count[:, None], token[:, None], cache.open)
    ends = cache.count == n - 1
    blocks, run = cache.blocks, Run(config.blocks, cache.method)

    def add(blocks: Cache) -> tuple[Array, Cache]:
        return steps.prefill(
            run, params["blocks"], _block_inputs(params, block, config), ends.astype(jnp.int32), blocks,
            tokens_bound=1, room=0, compress=False,
        )  # fmt: skip

    def wait(blocks: Cache) -> tuple[Array, Cache]:
        return jnp.zeros((rows, config.blocks.vocab), jax.eval_shape(add, blocks)[0].dtype), blocks

    said, blocks = jax.lax.cond(ends.any(), add, wait, blocks)
    # A row whose block is complete begins the next one with its prefix, the others go on with their token.
    inputs = jnp.zeros((rows, config.prefix, config.tokens.d_model), params["start"].dtype)
    inputs = inputs.at[:, 0].set(_embedded(params, token, config))
    inputs = jnp.where(ends[:, None, None], _prefix(params, said, config), inputs)
    logits, inside = steps.prefill(
        _token_run(config, cache.method), params["tokens"], inputs, jnp.where(ends, config.prefix, 1),
        reset_rows(cache.tokens, ends), tokens_bound=config.prefix + n - 1, room=0, compress=False,
    )  # fmt: skip
    opened = jnp.where(ends[:, None], 0, block)
    return logits, BlockCache(blocks, inside, opened, jnp.where(ends, 0, cache.count + 1), cache.method)


@partial(jax.jit, static_argnames="config")
def _reset(params: Params, cache: BlockCache, rows: Bool[Array, "B"], *, config: BlockConfig) -> BlockCache:
    """Emptied rows begin with the first prefix."""
    start = jnp.broadcast_to(params["start"][None], (rows.shape[0], *params["start"].shape))
    bound = config.prefix + config.length - 1
    _, inside = steps.prefill(
        _token_run(config, cache.method), params["tokens"], start, jnp.where(rows, config.prefix, 0),
        reset_rows(cache.tokens, rows), tokens_bound=bound, room=0, compress=False,
    )  # fmt: skip
    opened, count = jnp.where(rows[:, None], 0, cache.open), jnp.where(rows, 0, cache.count)
    return BlockCache(reset_rows(cache.blocks, rows), inside, opened, count, cache.method)


@dataclasses.dataclass(frozen=True)
class BlockTransformer:
    """A Block Transformer with its weights; calling it gives the logits [B, T, V] of every token.

    The reference pads the text in front so that the first block has one before it; here the first prefix is
    learned (`params["start"]`). The method of a prefill compresses the block decoder's slots; what it does to
    bytes (codecs) it does to the token decoder's few slots too.

    >>> width = dict(heads=2, kv_heads=1, head_dim=8, d_ff=16)
    >>> blocks = Config(vocab=32, d_model=16, layers=1, **width)
    >>> config = BlockConfig(blocks, Config(vocab=20, d_model=16, layers=1, **width))
    >>> model = BlockTransformer(config, init(config, jax.random.key(0)))
    >>> logits, cache = model.prefill([[1, 2, 3, 4, 5, 6]], room=4)
    >>> logits, cache = model.step(cache, [7])
    >>> logits.shape, cache.blocks.next.tolist(), cache.count.tolist()
    ((1, 20), [1], [3])
    """

    config: BlockConfig
    params: Params

    def __call__(self, tokens: Int[Array | np.ndarray, "B T"]) -> Float[Array, "B T V"]:
        return jax.jit(forward, static_argnames="config")(
            self.params, jnp.asarray(tokens, jnp.int32), self.config
        )

    def prefill(
        self,
        tokens: Int[Array | np.ndarray, "B T"] | Sequence[Sequence[int]],
        *,
        method: Method | None = None,
        lengths: Any = None,
        room: int = 128,
    ) -> tuple[Float[Array, "B V"], BlockCache]:
        """Logits [B, V] at each row's last token, and the cache with room for `room` more tokens.

        tokens: [B, T] with right padding and `lengths` [B]. Raises InputError for tokens outside the
        vocabulary, empty prompts, and methods that do not fit the block decoder or need tokens to repeat.
        """
        ids = np.asarray(tokens)
        if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
            raise InputError(f"tokens must be integers [B, T], got {ids.dtype}{list(ids.shape)}")
        length = np.full(ids.shape[0], ids.shape[1]) if lengths is None else np.asarray(lengths)
        if length.shape != ids.shape[:1] or (length < 1).any() or (length > ids.shape[1]).any():
            raise InputError(f"lengths must be [B], from 1 to T = {ids.shape[1]}, got {length.tolist()}")
        if ids.min() < 0 or ids.max() >= self.config.tokens.vocab:
            raise InputError(
                f"token ids must lie in [0, {self.config.tokens.vocab}), got {ids.min()} to {ids.max()}"
            )
        method = method or Method()
        check_fit(method, self.config.blocks)
        if method.keep is not None and method.keep.probe is not None:
            raise InputError(f"{method.id} repeats the prompt's tokens, and blocks are none: use snapkv")
        logits, cache = prefill(
            self.params, jnp.asarray(ids, jnp.int32), jnp.asarray(length, jnp.int32),
            config=self.config, method=method, room=room,
        )  # fmt: skip
        return logits, dataclasses.replace(cache, spare=room)

    def step(
        self, cache: BlockCache, token: Int[Array | np.ndarray, "B"] | Sequence[int]
    ) -> tuple[Float[Array, "B V"], BlockCache]:
        """One token per row; the given cache is consumed. InputError when it has no room left."""
        ids = jnp.asarray(token, jnp.int32)
        if ids.shape != cache.count.shape:
            raise InputError(
                f"token must be [B] = {list(cache.count.shape)}, one id per row, got {list(ids.shape)}"
            )
        if cache.spare < 1:
            raise InputError("the cache is full: give prefill(..., room=) the number of tokens you will add")
        logits, new = _step(self.params, cache, ids, config=self.config)
        return logits, dataclasses.replace(new, spare=cache.spare - 1)

    def fork(self, cache: BlockCache, copies: int) -> BlockCache:
        """Every row `copies` times, next to each other."""
        opened, count = (jnp.repeat(x, copies, axis=0) for x in (cache.open, cache.count))
        blocks, tokens = fork(cache.blocks, copies), fork(cache.tokens, copies)
        return dataclasses.replace(cache, blocks=blocks, tokens=tokens, open=opened, count=count)

    def reset(self, cache: BlockCache, rows: Bool[Array | np.ndarray, "B"]) -> BlockCache:
        """The cache with the rows where `rows` is true emptied; the others are untouched."""
        new = _reset(self.params, cache, jnp.asarray(rows), config=self.config)
        return dataclasses.replace(new, spare=cache.spare)

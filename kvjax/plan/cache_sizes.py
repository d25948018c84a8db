"""Bytes of caches before any exists: shapes traced from the real prefill, given only a config."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax import steps
from kvjax.api.block_transformer import prefill as prefill_blocks
from kvjax.api.chunks import bucket
from kvjax.base.errors import InputError
from kvjax.compat.model_fit import check_block_transformer, check_fit, config_of
from kvjax.compress.unread import unread_bytes
from kvjax.grammar import Method
from kvjax.grammar.calls import hiding_of, with_probe, with_token_ids
from kvjax.grammar.fitted import with_fitted
from kvjax.grammar.read_kinds import Reusing
from kvjax.models.block_transformer import BlockConfig, layout_of
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.state.cache import Cache, nbytes
from kvjax.steps import Run


def sizes_of(
    config: Config | BlockConfig, dtype: DTypeLike, tokens: int, methods: list[Method]
) -> CacheSizes | BlockTransformerSizes:
    """Compute the sizes of a model's caches, of one decoder or two."""
    if isinstance(config, BlockConfig):
        return BlockTransformerSizes(config, dtype, tokens)
    return CacheSizes(config, dtype, tokens, methods)


class CacheSizes:
    """Shapes of the caches of `rows` rows after a prompt of `tokens` tokens, traced once for all `methods`.

    A method whose layers read only some tokens of a prompt, are merged, or differ within a stack, is traced
    separately, with unstacked layers; one that rewrites weights is traced with the new weights.

    >>> config = Config(vocab=32, d_model=16, layers=2, heads=2, kv_heads=1, head_dim=8, d_ff=32)
    >>> sizes = CacheSizes(config, "float32", 64, [Method()])
    >>> sizes.nbytes(Method())  # 2 layers x 64 slots x (8 + 8 + 1) x 4 B, and `next`
    8708
    """

    def __init__(self, config: Config, dtype: DTypeLike, tokens: int, methods: list[Method], rows: int = 1):
        self.config, self.tokens, self.rows = config, bucket(tokens), rows
        # Stacked layers trace in the time of one layer. The bytes are the same, up to a page for each list
        # where layers in pages keep different numbers of slots.
        self.params = abstract_params(config, dtype)
        methods = [with_any_ids(m) for m in methods]
        shared = [m for m in methods if m.make is None and not self._by_itself(m)]
        needs = (steps.needs_of(Run(config, m), self.params) for m in shared if _fits(m, config))
        observe = partial(steps.observe, Run(config, Method()), cache=None, needs=frozenset().union(*needs))
        self.prompt = jax.eval_shape(observe, with_fitted(self.params, *shared), *self._given())

    def _given(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of tokens and lengths."""
        shapes = ((self.rows, self.tokens), (self.rows,))
        return [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]

    def cache(self, method: Method, room: int = 0) -> Cache:
        """Return the cache's shapes with free slots for `room` more tokens.

        Raises ValueError or InputError if the method cannot run on this model.
        """
        method = with_any_ids(method)
        check_fit(method, self.config)
        if method.make is not None:
            sizes, plain = self._made(method)
            return sizes.cache(plain, room)
        run, sizes = Run(self.config, method), dict(tokens_bound=self.tokens, room=room, compress=True)
        if self._by_itself(method):
            call = partial(steps.prefill, run, cache=None, **sizes)
            return jax.eval_shape(call, with_fitted(self._apart(), method), *self._given())[1]
        settle = partial(steps.settle, run, cache=None, tokens=self.tokens, room=room, compress=True)
        return jax.eval_shape(settle, with_fitted(self.params, method), self.prompt)

    def nbytes(self, method: Method, room: int = 0) -> int:
        """Bytes of that cache, with everything counted."""
        return nbytes(self.cache(method, room))

    def read_bytes(self, method: Method) -> int:
        """Bytes of the cache that one step reads."""
        method = with_any_ids(method)
        if method.make is not None:
            sizes, plain = self._made(method)
            return sizes.read_bytes(plain)
        params, read = self._apart() if self._by_itself(method) else self.params, []
        groups = Run(self.config, method).groups(params)

        def count(cache: Cache) -> None:
            pairs = zip(groups, cache.groups, strict=True)
            unread = (unread_bytes(gm, group, cache.pools) for gm, group in pairs)
            read.append(nbytes(cache) - sum(unread))

        jax.eval_shape(count, self.cache(method))
        return read[0]

    def _made(self, method: Method) -> tuple[CacheSizes, Method]:
        """Compute the sizes of the model that a method rewrites, and the rest of the method."""
        made, dtype = config_of(method, self.config), self.params["norm"].dtype
        plain = dataclasses.replace(method, make=None)
        return CacheSizes(made, dtype, self.tokens, [plain], self.rows), plain

    def _apart(self) -> Params:
        """Unstack the layers of the parameters."""
        return abstract_params(self.config, self.params["norm"].dtype, stacked=False)

    def _by_itself(self, method: Method) -> bool:
        """Whether a method needs its own trace: it reads prompts differently, or not over stacked layers."""
        narrows = method.reread is not None or (method.keep is not None and method.keep.narrow is not None)
        narrows = narrows or any(hiding_of(one.keep) is not None for one in method.sentences)
        picks = any(isinstance(one.read, Reusing) for one in method.sentences)
        if narrows or picks or method.stack is not None:
            return True
        try:
            Run(self.config, method).groups(self.params)
        except ValueError:  # it exempts some layers of a stack
            return True
        return False


def with_any_ids(method: Method) -> Method:
    """Set token id 0 in the method for all that a tokenizer would encode: instructions, tokens by text.

    Sizes of caches do not depend on the ids.
    """
    method = with_token_ids(method, lambda characters: (0,))
    keep = method.keep
    if keep is None or keep.probe is None or keep.probe.prefix is not None:
        return method
    return dataclasses.replace(method, keep=with_probe(keep, dataclasses.replace(keep.probe, prefix=(0,))))


def _fits(method: Method, config: Config) -> bool:
    try:
        check_fit(method, config)
    except InputError:
        return False
    return True


class BlockTransformerSizes:
    """`CacheSizes` of a Block Transformer: the same numbers, from a trace per method.

    >>> sizes = dict(layers=1, heads=2, kv_heads=1, head_dim=8, d_ff=32)
    >>> blocks, tokens = Config(vocab=32, d_model=16, **sizes), Config(vocab=20, d_model=16, **sizes)
    >>> sizes = BlockTransformerSizes(BlockConfig(blocks, tokens), "float32", 64)
    >>> sizes.nbytes(Method())  # 16 slots + 5, 4 ids, next
    1448
    """

    def __init__(self, config: BlockConfig, dtype: DTypeLike, tokens: int):
        self.config, self.tokens = config, bucket(tokens)
        self.params = abstract_params(config, dtype)

    def cache(self, method: Method, room: int = 0) -> Cache:
        """As `CacheSizes.cache`."""
        method = with_any_ids(method)
        check_block_transformer(method, self.config)
        ids, length = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, self.tokens), (1,)))
        call = partial(prefill_blocks, config=self.config, method=method, room=room)
        return jax.eval_shape(call, self.params, ids, length)[1]

    def nbytes(self, method: Method, room: int = 0) -> int:
        """As `CacheSizes.nbytes`."""
        return nbytes(self.cache(method, room))


def abstract_params(config: Config | BlockConfig, dtype: DTypeLike, stacked: bool = True) -> Params:
    """Shapes of a model's parameters, its layers stacked."""
    layout = layout_of(config)
    tree = layout.shapes(config, layout.plan(config, stacked=stacked))
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)),
        tree,
        is_leaf=lambda x: isinstance(x, tuple) and bool(x) and isinstance(x[0], int),
    )

"""The Block Transformer's weights: a decoder over blocks of tokens, and one over the tokens of a block.

Both are ordinary decoders. A block of L tokens becomes one input of the *block decoder*, the concatenation of
L narrow embeddings. Instead of logits, the block decoder's output for a block is the first inputs of the
*token decoder* for the next block; that decoder attends within its own block alone. Their caches are in
  `kvjax/api/block_transformer.py`.
"""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.base.ranges import Count, check_fields
from kvjax.models import params as decoder
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.params import Group
from kvjax.models.transformer import forward as decoder_forward


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Sizes of a Block Transformer (Ho et al., 2024, arXiv:2406.02657).

    blocks: the block decoder, whose output has `prefix` inputs of the token decoder's width for the next
    block in place of logits. tokens: the token decoder, over the text's vocabulary. length: tokens per block.

    Raises ValueError if the two do not fit each other.
    """

    blocks: Config
    tokens: Config
    length: Count = 4
    prefix: Count = 2

    def __post_init__(self):
        check_fields(self)
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
        if self.blocks.tied:
            raise ValueError("the block decoder has no embedding to tie its output to: set its tied=False")
        for name in ("blocks", "tokens"):
            _check_inputs(name, getattr(self, name))
        if self.inside > self.tokens.max_positions:
            raise ValueError(
                f"a block takes {self.inside} positions of the token decoder, which has "
                f"{self.tokens.max_positions}: raise its max_positions, or shorten length or prefix"
            )

    @property
    def vocab(self) -> int:
        return self.tokens.vocab

    @property
    def max_positions(self) -> int:
        """The tokens of as many blocks as the block decoder has positions."""
        return self.blocks.max_positions * self.length

    @property
    def inside(self) -> int:
        """The most inputs of the token decoder in one block: the prefix, and all tokens but the last."""
        return self.prefix + self.length - 1


def _check_inputs(name: str, config: Config) -> None:
    """Raise ValueError for layers that need inputs which a decoder of vectors does not have."""
    for i in range(config.layers):
        slots = mixer_of(config, i).slots(config)
        if slots is not None and (slots.ids or slots.fixed):
            what = "token ids" if slots.ids else "a context"
            raise ValueError(
                f"layer {i} of the {name} decoder reads {what}, but it is given vectors alone: "
                "choose another mixer"
            )


# --- parameters --------------------------------------------------------------------------------------


class Groups(NamedTuple):
    """How the layers of both decoders are stacked."""

    blocks: tuple[Group, ...]
    tokens: tuple[Group, ...]


def layout_of(config: Config | BlockConfig) -> ModuleType:
    """Return the module whose plan, check_groups, shapes and regroup apply to a config's parameters."""
    return decoder if isinstance(config, Config) else sys.modules[__name__]


def plan(config: BlockConfig, stacked: bool | None = None) -> Groups:
    """How the layers of each decoder are stacked, by `kvjax.models.params.plan` without patterns."""
    both = (decoder.plan(one, stacked, patterns=False) for one in (config.blocks, config.tokens))
    return Groups(*both)


def check_groups(config: BlockConfig, groups: Groups | tuple[Group, ...]) -> Groups:
    """Check and return `groups`; ValueError if they do not fit one of the decoders."""
    if not isinstance(groups, Groups):
        raise ValueError(f"groups must be Groups(blocks, tokens), a stack for each decoder, got {groups}")
    decoder.check_groups(config.blocks, groups.blocks)
    decoder.check_groups(config.tokens, groups.tokens)
    if any(group.stride > 1 for each in groups for group in each):
        raise ValueError(f"the decoders of a Block Transformer are stacked in runs, got a pattern: {groups}")
    return groups


def shapes(config: BlockConfig, groups: Groups | None = None) -> Params:
    """Return the tree of parameter shapes: both decoders', the narrow embedding, the first block's prefix."""
    groups = groups or plan(config)
    blocks = decoder.shapes(config.blocks, groups.blocks)
    del blocks["embed"]  # its inputs are vectors
    return {
        "embed": (config.vocab, config.blocks.d_model // config.length),
        "start": (config.prefix, config.tokens.d_model),
        "blocks": blocks,
        "tokens": decoder.shapes(config.tokens, groups.tokens),
    }


def init(config: BlockConfig, key: Array, dtype: Any = jnp.float32, groups: Groups | None = None) -> Params:
    """Random parameters: both decoders' as theirs, the other two with variance 1 / width."""
    keys, groups = jax.random.split(key, 4), check_groups(config, groups or plan(config))
    tree = shapes(config, groups)
    narrow, start = (
        jax.random.normal(keys[i], tree[name], dtype) * tree[name][1] ** -0.5
        for i, name in ((2, "embed"), (3, "start"))
    )
    blocks = decoder.init(config.blocks, keys[0], dtype, groups.blocks)
    del blocks["embed"]
    tokens = decoder.init(config.tokens, keys[1], dtype, groups.tokens)
    return {"embed": narrow, "start": start, "blocks": blocks, "tokens": tokens}


def regroup(params: Params, groups: Groups) -> Params:
    """Stack the layers of the same parameters as `groups` says."""
    both = {name: decoder.regroup(params[name], getattr(groups, name)) for name in Groups._fields}
    return {**params, **both}


# --- the equation ------------------------------------------------------------------------------------


def forward(params: Params, tokens: Int[Array, "B T"], config: BlockConfig) -> Float[Array, "B T V"]:
    """Logits of every token without a cache: first all blocks at once, then the insides of all blocks."""
    b, t = tokens.shape
    n, whole = config.length, -(-t // config.length)
    padded = jnp.pad(tokens, ((0, 0), (0, (whole + 1) * n - t)))
    said = decoder_forward(
        params["blocks"], block_inputs(params, padded[:, : whole * n], config), config.blocks
    )
    said = said.reshape(b, whole, config.prefix, -1).astype(params["start"].dtype)
    start = jnp.broadcast_to(params["start"][None, None], (b, 1, *params["start"].shape))
    inside = embedded(params, padded.reshape(b, whole + 1, n)[:, :, : n - 1], config)
    x = jnp.concatenate([jnp.concatenate([start, said], 1), inside], 2)
    x = x.reshape(b * (whole + 1), config.inside, -1)
    logits = decoder_forward(params["tokens"], x, config.tokens)[:, config.prefix - 1 :]
    # Entry i of a block predicts its token i, so the logits of token t are at t + 1.
    return logits.reshape(b, (whole + 1) * n, -1)[:, 1 : t + 1]


def block_inputs(params: Params, tokens: Int[Array, "B T"], config: BlockConfig) -> Float[Array, "B M D"]:
    """One input per whole block: the narrow embeddings of its tokens, concatenated."""
    b, t = tokens.shape
    return params["embed"][tokens].reshape(b, t // config.length, -1)


def embedded(params: Params, tokens: Int[Array, "*s"], config: BlockConfig) -> Float[Array, "*s D"]:
    """Compute the token decoder's input vectors of tokens."""
    table = params["tokens"]["embed"]
    return table[tokens] * jnp.asarray(config.tokens.embed_scale, table.dtype)


def prefix_of(params: Params, said: Float[Array, "B S"], config: BlockConfig) -> Float[Array, "B P D"]:
    """Compute the token decoder's first inputs of a block, from the block decoder's previous output."""
    return said.reshape(said.shape[0], config.prefix, -1).astype(params["start"].dtype)

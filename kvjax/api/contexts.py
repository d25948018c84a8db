"""Contexts: encoded once by an encoder, held in the cache, and attended to by a decoder's cross-attention."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import steps
from kvjax.api.prefill import ROOM, check_room, labelled, method_of, padded
from kvjax.api.prepare import made
from kvjax.api.rows import reset_rows
from kvjax.api.types import Lengths, TokenIds
from kvjax.base.checks import whole_number
from kvjax.base.errors import InputError
from kvjax.compat.layout_class import mesh_for
from kvjax.compress.segments import build
from kvjax.grammar import Method
from kvjax.grammar.kinds import View
from kvjax.models import encoder as encoders
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.model import Model, check_single
from kvjax.ops.attention.union import Keys
from kvjax.pure import bind
from kvjax.state.cache import Cache
from kvjax.steps import Run

_encode = jax.jit(encoders.encode, static_argnames=("config", "chunk"))


def encode_context(
    model: Model,
    encoder: Model,
    tokens: TokenIds,
    *,
    lengths: Lengths | None = None,
    chunk: int | None = None,
    method: Method | str | None = None,
    room: int = ROOM,
) -> Cache:
    """Encode a context for a decoder that attends to it by cross-attention.

    Args:
        model: the decoder.
        encoder: the model that reads the context, as wide as the decoder's cross-attention expects.
        tokens: token ids [B, T] in the encoder's vocabulary, or a list of lists; a row may be empty.
        lengths: tokens of each row [B], if rows are padded.
        chunk: encodes every `chunk` tokens separately (`kvjax.models.encoder.encode`).
        method: the one that `prefill`, `step` and `generate` follow on this cache; codecs that encode token
            by token encode the context too, and no keep evicts any of it.
        room: free slots to allocate for further tokens.

    Returns:
        A cache that holds the context and nothing else: the decoder's next token has position 0.

    Raises:
        InputError: if the decoder has no layer that holds a context, or one of another width, for tokens
            outside the encoder's vocabulary, and for chunks beyond its last position.

    >>> from kvjax.models.config import Config
    >>> from kvjax.models.mixers.attention import Attention
    >>> from kvjax.models.mixers.cross_attention import CrossAttention
    >>> from kvjax.models.params import init
    >>> plain = Config(vocab=32, d_model=16, layers=2, heads=2, kv_heads=1, head_dim=8, d_ff=32)
    >>> config = dataclasses.replace(plain, mixers=(Attention(), CrossAttention(width=16)))
    >>> encoder, model = (Model(c, init(c, jax.random.key(0))) for c in (plain, config))
    >>> cache = encode_context(model, encoder, [[1, 2, 3], [4]])
    >>> cache.next.tolist(), cache.groups[1].tail.k.shape
    ([0, 0], (1, 2, 1, 16, 16))
    """
    for one in (model, encoder):
        check_single(one, "give encode_context a decoder with a CrossAttention and an encoder")
    layer_of(model.config, encoder.config.d_model)
    batch = padded(encoder, tokens, lengths, least=0)
    longest = int(batch.lengths.max())
    if chunk is not None:
        chunk = whole_number("chunk", chunk, 1, "tokens encoded at a time")
    if min(chunk or longest, longest) > encoder.config.max_positions:
        raise InputError(
            f"the encoder would read {min(chunk or longest, longest)} tokens at once, its last position is "
            f"{encoder.config.max_positions}: encode in chunks of at most that many with chunk="
        )
    held = _encode(
        encoder.params, jnp.asarray(batch.tokens), encoder.config, jnp.asarray(batch.lengths), chunk
    )
    return context_cache(model, held, method=method, room=room)


def context_cache(model: Model, held: Keys, *, method: Method | str | None = None, room: int = ROOM) -> Cache:
    """`encode_context` from encoder states that exist already, as `kvjax.models.encoder.encode` returns them.

    Raises InputError if the decoder has no layer that holds a context, or one of another width.
    """
    layer_of(model.config, held.k.shape[-1])
    room = check_room(model, room)
    chosen = method_of(model, method, None)
    model = made(model, chosen)
    run = Run(model.config, bind(chosen, model), on_mesh=mesh_for(chosen, model.on_mesh))
    return labelled(hold(run, model.params, held, room), chosen, model)


def layer_of(config: Config, width: int) -> int:
    """Find the layer that holds the context; InputError unless there is just one, for states of `width`."""
    words = [mixer_of(config, i) for i in range(config.layers)]
    owners = [i for i, m in enumerate(words) if "slots" not in m.takes and (s := m.slots(config)) and s.fixed]
    if len(owners) != 1:
        raise InputError(
            f"{len(owners)} layers of this model hold a context, expected one: a CrossAttention without a "
            "source, which the others name as theirs"
        )
    expected = words[owners[0]].slots_of(config).key
    if expected != width:
        raise InputError(
            f"the context has {width} channels per token, layer {owners[0]} reads {expected}: use an encoder "
            "of that width"
        )
    return owners[0]


def hold(run: Run, params: Params, held: Keys, room: int) -> Cache:
    """Build an empty cache with a capacity of `room` tokens whose context layer holds the given states."""
    rows, layer = held.k.shape[0], layer_of(run.config, held.k.shape[-1])
    empty = empty_cache(run, params, rows, room)
    gms = run.groups(params)
    at = [gm.first for gm in gms].index(layer)
    k = held.k.astype(params["embed"].dtype)[None]
    assert held.pos is not None
    view = View(k, k, held.pos[None], None, {})
    groups = list(empty.groups)
    groups[at] = build(gms[at], view, None, k.shape[3], 0)
    return dataclasses.replace(empty, groups=tuple(groups))


def empty_cache(run: Run, params: Params, rows: int, room: int) -> Cache:
    """Build the cache of rows that have read no token: a prefill's shapes, emptied."""
    # The shapes come from a prefill of one token, which takes one of the slots.
    call = partial(steps.prefill, run, tokens_bound=1, room=max(room - 1, 0), compress=False)
    ids, length = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, 1), (rows,)))
    _, shapes = jax.eval_shape(call, params, ids, length, None)
    zeros = jax.tree.map(lambda x: jnp.asarray(np.zeros(x.shape, x.dtype)), shapes)
    return reset_rows(zeros, np.ones(rows, bool))

"""Prompts that are stored as memory tokens: chunk by chunk, attending to the memory of earlier chunks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.compress.group import GroupMethod
from kvjax.compress.segments import whole_slots
from kvjax.compress.select import ComputedTokens, union
from kvjax.grammar import Method
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import View
from kvjax.keep.observations.observe import UnrotatedKeys
from kvjax.keep.prompts.memory_tokens import MemoryTokens
from kvjax.models.attending import rotated
from kvjax.models.layers import Params
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.stacking import groups_in
from kvjax.models.transformer import Positions
from kvjax.state.cache import Cache, GroupState
from kvjax.steps.prefilling.lora import Marks
from kvjax.steps.prefilling.read import PrefillOutputs, read_tokens
from kvjax.steps.shared.fitted_arrays import attach_arrays, groups_with_arrays
from kvjax.steps.shared.run import Run


class _Chunk(NamedTuple):
    """A chunk of a prompt while it is read.

    number: how many chunks were before it. tokens: how many tokens a row has in it. start: the position of
    the first token of a row's turn.
    """

    number: Int[Array, ""]
    tokens: Int[Array, "B"]
    start: Int[Array, "B"]


def remembered(
    run: Run, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, "B"], cache: Cache | None
) -> PrefillOutputs:
    """Compute a prompt's `MemoryTokens` slots, and the logits of its last token, which sees nothing else."""
    word: MemoryTokens = run.method.reread
    assert word.fitted is not None
    digest = word.fitted.digest
    t, on = tokens.shape[1], run.on_mesh
    bare = run._replace(method=Method(), on_mesh=None if on is None else on.with_whole_tokens())
    gms = groups_with_arrays(run.groups(params), params)
    start = jnp.zeros_like(lengths) if cache is None else cache.next
    text, size, chunks = jnp.maximum(lengths - 1, 0), word.chunk(t), word.chunks(t)
    slots = word.slots(chunks)
    before = tuple(_held(run, gm, params, cache, i, len(lengths)) for i, gm in enumerate(gms))
    views = tuple(_with_room(view, slots) for view in before)

    def over(views: tuple[View, ...], held: Array | int) -> Cache:
        pairs = zip(gms, views, strict=True)
        return Cache(tuple(GroupState(tail=whole_slots(gm, v)) for gm, v in pairs), start + held)

    padded = jnp.pad(tokens, ((0, 0), (0, chunks * size - min(chunks * size, t))))

    def read(views: tuple[View, ...], number: Int[Array, ""]) -> tuple[tuple[View, ...], None]:
        part = jax.lax.dynamic_slice_in_dim(padded, number * size, size, axis=1)
        one = _Chunk(number, jnp.clip(text - number * size, 0, size), start)
        x, mine = _with_memory(run, params, part, one.tokens)
        many = one.tokens + word.of(one.tokens)
        first = word.before(number)
        marks = Marks(mine.astype(jnp.float32), digest, *_mutual(word, mine, one, start + first))
        found = read_tokens(
            bare, params, x, many, over(views, first), frozenset({UnrotatedKeys()}), marks=marks
        )
        pairs = zip(gms, views, _with_slots(found), strict=True)
        return tuple(_taken_up(run, gm, view, fresh, one, slots) for gm, view, fresh in pairs), None

    views, _ = jax.lax.scan(read, views, jnp.arange(chunks, dtype=jnp.int32))
    live = jnp.minimum(lengths, 1)
    held = word.count(lengths) - live
    last = jnp.take_along_axis(tokens, text[:, None], axis=1)
    after = word.after(text)
    found = read_tokens(bare, params, last, live, over(views, after), frozenset())
    index = jnp.arange(slots + 1, dtype=jnp.int32)[None]
    # The last token comes right after the memory of its row.
    source = jnp.where(index < held[:, None], index, slots)
    stands = jnp.concatenate([_stands(word, text, size, slots), after[:, None]], axis=1)
    pos = start[:, None] + jnp.take_along_axis(stands, source, axis=1)
    pos = jnp.where(index < (held + live)[:, None], pos, -1)
    fresh = tuple(_joined(view, f, slots, source) for view, f in zip(views, _with_slots(found), strict=True))
    own = (index == held[:, None]) & (live > 0)[:, None]
    # The slots that were read are of memory tokens, except for the one of the prompt's last token.
    place = jnp.arange(t if word.mutual else slots + 1, dtype=jnp.int32)[None]
    return found._replace(
        fresh=fresh,
        positions=Positions(pos, start + after + live),
        tokens=jnp.where(own, last, 0),
        source=jnp.where((place == after[:, None]) & (live > 0)[:, None], text[:, None], -1),
    )


def _stands(word: MemoryTokens, text: Int[Array, "B"], size: int, slots: int) -> Int[Array, "B _"]:
    """Compute the positions in their turn of all memory tokens, for chunks of `size` tokens of a text."""
    each = jnp.arange(slots // word.tokens, dtype=jnp.int32)
    found = jax.vmap(lambda i: word.stands(i, jnp.clip(text - i * size, 0, size)), out_axes=1)(each)
    return found.reshape(len(text), slots)


def _with_slots(prompt: PrefillOutputs) -> list[ComputedTokens]:
    """Return what the groups computed, each of which has slots."""
    return [fresh for fresh in prompt.fresh if isinstance(fresh, ComputedTokens)]


def _held(run: Run, gm: GroupMethod, params: Params, cache: Cache | None, i: int, rows: int) -> View:
    """Return the slots that a group holds already."""
    shape = mixer_of(run.config, gm.first).slots_of(run.config)
    layers, dtype = groups_in(params)[i].size, params["norm"].dtype
    k, v = (jnp.zeros((layers, rows, shape.heads, 0, width), dtype) for width in (shape.key, shape.value))
    none = ComputedTokens(k, v, {}, (), {})
    if cache is None:
        return View(k, v, jnp.zeros(k.shape[:4], jnp.int32), None, {})
    (past,) = attach_arrays((cache.groups[i],), (gm,))
    return union(gm, past, cache.pools, none, jnp.zeros((rows, 0), jnp.int32))


def _with_room(view: View, slots: int) -> View:
    """Append `slots` empty slots to a view."""
    wide = [(0, 0), (0, 0), (0, 0), (0, slots)]
    k, v = (jnp.pad(x, [*wide, (0, 0)]) for x in (view.k, view.v))
    return view._replace(k=k, v=v, pos=jnp.pad(view.pos, wide, constant_values=-1))


def _with_memory(
    run: Run, params: Params, ids: Int[Array, "B C"], count: Int[Array, "B"]
) -> tuple[Float[Array, "B _ D"], Bool[Array, "B _"]]:
    """Embed a chunk with memory tokens after each row's tokens, and mark these in a mask."""
    word: MemoryTokens = run.method.reread
    assert word.fitted is not None
    embed, many = params["embed"], word.tokens
    memory = params["fitted"][word.fitted.digest]["memory"][0].astype(embed.dtype)
    x = embed[ids] * jnp.asarray(run.config.embed_scale, embed.dtype)
    at = jnp.arange(ids.shape[1] + many)[None] - count[:, None]
    mine = (at >= 0) & (at < word.of(count)[:, None])
    x = jnp.pad(x, ((0, 0), (0, many), (0, 0)))
    return jnp.where(mine[..., None], memory[jnp.clip(at, 0, many - 1)], x), mine


def _mutual(
    word: MemoryTokens, mine: Bool[Array, "B C"], one: _Chunk, first: Int[Array, "B"]
) -> tuple[Int[Array, "B C"] | None, Int[Array, "B C"] | None]:
    """Return the last visible positions and rotations of a chunk's tokens, if memory is mutual."""
    if not word.mutual:
        return None, None
    many, at = one.tokens + word.of(one.tokens), jnp.arange(mine.shape[1], dtype=jnp.int32)[None]
    stands = one.start[:, None] + word.stands(one.number, one.tokens)
    after = jnp.clip(at - one.tokens[:, None], 0, word.tokens - 1)
    each = (
        jnp.where(mine, x, first[:, None] + at)
        for x in (first[:, None] + many[:, None] - 1, jnp.take_along_axis(stands, after, axis=1))
    )
    sees, rotated_at = (jnp.where(at < many[:, None], x, -1) for x in each)
    return sees, rotated_at


def _taken_up(run: Run, gm: GroupMethod, view: View, fresh: ComputedTokens, one: _Chunk, slots: int) -> View:
    """Add the memory of one more chunk, rotated to its positions, to a group's slots."""
    word: MemoryTokens = run.method.reread
    many, rope = word.tokens, run.attention_spec(gm.first).rope
    first = jnp.zeros_like(one.number) if word.mean else one.number * many
    stand = one.start[:, None] + word.stands(one.number, one.tokens)
    index = (one.tokens[:, None] + jnp.arange(many, dtype=jnp.int32)[None])[None, :, None, :, None]
    assert fresh.v is not None
    raw, v = (
        jnp.take_along_axis(x, index, axis=3) for x in (fresh.observed[key_of(UnrotatedKeys())], fresh.v)
    )
    k = jax.vmap(lambda x: rotated(rope, x, stand, stand[:, -1] + 1))(raw)
    there = (jnp.arange(many)[None] < word.of(one.tokens)[:, None])[None, :, None]
    at = view.k.shape[3] - slots + first
    old = [jax.lax.dynamic_slice_in_dim(x, at, many, axis=3) for x in (view.k, view.v, view.pos)]
    if word.mean:
        weight = 1 / (one.number + 1).astype(k.dtype)
        k, v = (a + weight * (b - a) for a, b in zip(old, (k, v), strict=False))
    pos = jnp.broadcast_to(stand[None, :, None], old[2].shape)
    new = [
        jnp.where(there if x.ndim == 4 else there[..., None], x, a)
        for a, x in zip(old, (k, v, pos), strict=True)
    ]
    wide = [
        jax.lax.dynamic_update_slice_in_dim(x, y.astype(x.dtype), at, axis=3)
        for x, y in zip((view.k, view.v, view.pos), new, strict=True)
    ]
    return view._replace(k=wide[0], v=wide[1], pos=wide[2])


def _joined(view: View, last: ComputedTokens, slots: int, source: Int[Array, "B _"]) -> ComputedTokens:
    """Join the memory of a prompt and its last token, without gaps in any row."""
    index, held = source[None, :, None, :, None], view.k.shape[3] - slots

    def join(a: Array, b: Array | None) -> Array:
        assert b is not None
        return jnp.take_along_axis(jnp.concatenate([a[:, :, :, held:], b], axis=3), index, axis=3)

    return ComputedTokens(join(view.k, last.k), join(view.v, last.v), {}, (), {})

"""Texts far longer than memory: read chunk by chunk, with older keys and values in files (`LongText`)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import islice
from operator import length_hint
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Float, Int

from kvjax.base.checks import whole_number
from kvjax.base.errors import InputError
from kvjax.models.attending import rotated
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixer import GroupState, Layer, Left, Memory, Projected
from kvjax.models.mixers.attention import Attention, mixer_of
from kvjax.models.model import Model, check_single
from kvjax.models.params import plan, regroup
from kvjax.models.transformer import decode_layers, unembed
from kvjax.ops.attention.union import Keys, attend, merge
from kvjax.ops.base.dtypes import wide
from kvjax.place.block_file import BlockFile, check_free
from kvjax.state.cache import NOTHING


class NewestTokens(NamedTuple):
    """The newest tokens of every layer, in order: unrotated keys, values, and logits that keys received."""

    k: Float[Array, "L K M H"]
    v: Float[Array, "L K M V"]
    asked: Float[Array, "L K M"]


class LongTextSizes(NamedTuple):
    """Tokens: of a block, of the window, of the first ones, of a chunk; keys: representatives of a block.

    blocks: how many older blocks a chunk reads.
    """

    block: int
    newest: int
    sinks: int
    keys: int
    blocks: int
    chunk: int

    @property
    def room(self) -> int:
        """The tokens that are in memory at most."""
        return self.newest + 2 * self.chunk

    @property
    def first(self) -> int:
        """The blocks of the first tokens."""
        return -(-self.sinks // self.block)


class LongText:
    """Reads a text of any length and keeps its newest tokens in memory: InfLLM (arXiv:2402.04617) over files.

    Chunks of `chunk` tokens attend to the first `sinks` tokens, to the `newest` ones (and up to two chunks
    more) and, in every layer and KV head, to the `blocks` older blocks that match best: those with the
    largest dot product of one of their `keys` representative keys and the sum of the chunk's queries of one
    head. Representatives are the keys of a block with the largest logits from the tokens after them in the
    window. All older tokens have one distance, `newest`, so positions stay in the range in which the model
    was trained. Deviation: the paper ranks blocks for all heads of a layer together, by sums over heads and
    representatives, which hide the one head that looks something up.

    Memory does not grow with the text; files grow by the keys and values of each token, in float32. One text,
    greedy answers, layers of plain attention without windows.

    Args:
        model: a model of one decoder.
        folder: an existing folder for the files; those of an earlier text are overwritten.
        block: tokens of a block, of which the others are multiples.
        newest, sinks, chunk: numbers of tokens.
        keys: representatives of a block.
        blocks: how many older blocks a chunk reads.
        text_blocks: how many a chunk of the text reads, if fewer than one of a question. Ranking takes longer
            with every chunk; with 0, it is done for questions alone.

    Raises:
        InputError: if a size does not fit, the folder cannot be written, or the model has other layers.

    >>> import tempfile, kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> ids = model.tokenizer.encode("<bos> <set> brave otter 17 4 52 <.>").ids + [156] * 200
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with kvjax.LongText(model, folder, block=16, newest=64, sinks=0, chunk=32) as text:
    ...         text.read(ids)
    ...         answer = text.answer(model.tokenizer.encode("<get> brave otter").ids, 3)
    >>> model.tokenizer.decode(answer)
    '17 4 52'
    """

    def __init__(
        self, model: Model, folder: str | Path, *, block: int = 64, newest: int = 512, sinks: int = 64,
        keys: int = 4, blocks: int = 16, chunk: int = 256, text_blocks: int | None = None,
    ) -> None:  # fmt: skip
        check_single(model, "a long text is read by one decoder")
        self.sizes = _checked(block, newest, sinks, keys, blocks, chunk)
        _check_layers(model.config)
        if not Path(folder).is_dir():
            raise InputError(f"{folder} is no folder: make it first, on a disk with room for the text")
        config, s = model.config, self.sizes
        if s.room > config.max_positions:
            raise InputError(
                f"newest={newest} tokens and two chunks are {s.room}, and {model.name} has "
                f"{config.max_positions} positions: choose fewer"
            )
        slots = mixer_of(config, 0).slots_of(config)
        self.model, self.read_tokens, self._count = model, 0, 0
        self._params = regroup(model.params, plan(config, stacked=False))
        self._files = [
            BlockFile(Path(folder), f"layer{i}", slots.heads, slots.key, slots.value, s.block, s.keys)
            for i in range(config.layers)
        ]
        dtype = model.params["norm"].dtype
        k, v = (
            jnp.zeros((config.layers, slots.heads, s.room, width), dtype)
            for width in (slots.key, slots.value)
        )
        self._near = NewestTokens(k, v, jnp.zeros(k.shape[:3], jnp.float32))
        fewer = s.blocks if text_blocks is None else whole_number("text_blocks", text_blocks, 0, "blocks")
        self._of_text, self._of_questions = (
            jax.jit(partial(_read, config=config, sizes=x, fetch=partial(self._fetch, x)))
            for x in (s._replace(blocks=fewer), s)
        )

    def __enter__(self) -> LongText:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def read(self, tokens: Iterable[int]) -> None:
        """Read further tokens of the text, from any iterable.

        Raises InputError for ids that do not exist, and, before anything is read, where the disk cannot hold
        the tokens; those of a generator are not known, and fail when the disk is full.
        """
        s, stored = self.sizes, self._files[0].count * self.sizes.block
        leaving = self.read_tokens + length_hint(tokens) - s.newest - s.chunk - stored
        check_free(self._files, max(0, leaving))
        stream = iter(tokens)
        while chunk := [*islice(stream, self.sizes.chunk)]:
            self._near, self._count, _ = self._pass(chunk, self._near, self._count, leave=True)
            self.read_tokens += len(chunk)

    def answer(self, prompt: Iterable[int], max_new_tokens: int) -> list[int]:
        """Answer a prompt with the most likely tokens; neither becomes part of the text.

        Raises InputError if prompt and answer are longer than two chunks, for wrong ids, and after `close`. A
        stop id ends it early.
        """
        asked, most = [*prompt], whole_number("max_new_tokens", max_new_tokens, 1, "tokens")
        if not asked:
            raise InputError("the prompt is empty, expected some token ids: ask a question")
        if len(asked) + most > 2 * self.sizes.chunk:
            raise InputError(
                f"the prompt has {len(asked)} tokens and the answer {most}, expected at most "
                f"{2 * self.sizes.chunk} in all, which is two chunks: give a larger chunk"
            )
        while self._count + len(asked) + most > self.sizes.room:
            self._near, self._count = self._left(self._near, self._count)
        near, count, out, logits = self._near, self._count, [], jnp.zeros(())
        for at in range(0, len(asked), self.sizes.chunk):
            near, count, logits = self._pass(asked[at : at + self.sizes.chunk], near, count)
        while True:
            out.append(int(jnp.argmax(logits)))
            if len(out) == most or out[-1] in self.model.stop_ids:
                return out
            near, count, logits = self._pass(out[-1:], near, count)

    def _pass(
        self, chunk: list[int], near: NewestTokens, count: int, leave: bool = False
    ) -> tuple[NewestTokens, int, Float[Array, "V"]]:
        """Read at most a chunk; return (near, count, logits of its last token)."""
        if self._files[0].closed:
            raise InputError("this LongText was closed, and its files with it: read the text with a new one")
        ids, vocab = np.asarray(chunk), self.model.config.vocab
        if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocab:
            raise InputError(f"tokens of a text are whole numbers of 0 to {vocab - 1}, got {chunk[:8]} ...")
        while leave and count + len(chunk) > self.sizes.room:
            near, count = self._left(near, count)
        width = 1 if len(chunk) == 1 else self.sizes.chunk
        tokens = np.zeros((1, width), np.int32)
        tokens[0, : len(chunk)] = ids
        program = self._of_text if leave else self._of_questions
        near, logits = program(self._params, tokens, np.int32(len(chunk)), near, np.int32(count))
        return near, count + len(chunk), logits

    def _left(self, near: NewestTokens, count: int) -> tuple[NewestTokens, int]:
        """Write the oldest chunk to the files."""
        s = self.sizes
        old, near = _shifted(near, s.chunk)
        k, v, asked = (np.asarray(x, np.float32) for x in old)
        for layer, file in enumerate(self._files):
            pages = np.concatenate([k[layer], v[layer]], -1)
            pages = pages.reshape(len(pages), -1, s.block, file.shape[2])
            best = np.argsort(-asked[layer].reshape(*pages.shape[:3]), -1, kind="stable")[..., : s.keys]
            chosen = np.take_along_axis(pages[..., : file.key], best[..., None], 2)
            file.append(pages.swapaxes(0, 1), chosen.swapaxes(0, 1))
        return near, count - s.chunk

    def _fetch(self, s: LongTextSizes, layer: Any, query: Any) -> tuple[np.ndarray, np.ndarray]:
        """Per KV head, the blocks that match queries; and 0 for slots that exist, -1 for others."""
        file = self._files[int(layer)]
        numbers = file.best(np.asarray(query, np.float32), s.first, s.blocks)
        heads, tokens, channels = file.shape
        out = np.zeros((heads, (s.first + s.blocks) * tokens, channels), np.float32)
        many = numbers.shape[1] * tokens
        out[:, :many] = file.read(numbers).reshape(heads, many, channels)
        return out, np.where(np.arange(out.shape[1]) < many, 0, -1).astype(np.int32)


def _checked(block: int, newest: int, sinks: int, keys: int, blocks: int, chunk: int) -> LongTextSizes:
    given = dict(block=block, newest=newest, sinks=sinks, keys=keys, blocks=blocks, chunk=chunk)
    for name, value in given.items():
        whole_number(name, value, int(name != "sinks"), "blocks" if name == "blocks" else "tokens")
    if chunk % block or newest % chunk:
        raise InputError(
            f"block={block}, chunk={chunk} and newest={newest}: expected a chunk of whole blocks and a "
            "window of whole chunks"
        )
    if keys > block:
        raise InputError(f"keys={keys} representatives, expected at most the {block} tokens of a block")
    return LongTextSizes(**given)


def _check_layers(config: Config) -> None:
    for i in range(config.layers):
        mixer = mixer_of(config, i)
        if type(mixer) is not Attention or mixer.takes or mixer.clip is not None or mixer.chunked:
            raise InputError(f"layer {i} is {mixer}: a long text needs layers of plain attention")
        if config.window(i) is not None or config.attention_softcap or config.rope.by_length:
            raise InputError(
                f"layer {i} has a window, a softcap or a rotation by length: a long text needs layers without"
            )
        if mixer.slots_of(config) != mixer_of(config, 0).slots_of(config):
            raise InputError(f"layer {i} stores other slots than layer 0: a long text needs equal layers")


@partial(jax.jit, static_argnames="tokens")
def _shifted(near: NewestTokens, tokens: int) -> tuple[NewestTokens, NewestTokens]:
    """Return (the oldest tokens, the others moved to the front)."""
    old = jax.tree.map(lambda x: x[:, :, :tokens], near)
    rest = jax.tree.map(
        lambda x: jnp.pad(x[:, :, tokens:], [(0, 0), (0, 0), (0, tokens)] + [(0, 0)] * (x.ndim - 3)), near
    )
    return old, rest


def _read(
    params: Params, tokens: Int[Array, "1 T"], length: Int[Array, ""], near: NewestTokens,
    count: Int[Array, ""], *, config: Config, sizes: LongTextSizes, fetch: Any,
) -> tuple[NewestTokens, Float[Array, "V"]]:  # fmt: skip
    """One chunk: (near with its tokens, logits of its last token)."""
    t, room = tokens.shape[1], near.k.shape[2]
    new = jnp.arange(t, dtype=jnp.int32)[None]
    pos = jnp.where(new < length, count + new, -1)
    at = jnp.arange(room, dtype=jnp.int32)[None]
    past = jnp.where(at < count, at, -1)
    far = jnp.full((1, t), sizes.newest, jnp.int32)
    whole = jnp.full((1,), room, jnp.int32)

    def attended(layer: Layer, x: Projected, state: GroupState) -> tuple[Array, GroupState, Left]:
        i = layer.group
        assert x.k is not None and x.v is not None
        turn = partial(rotated, layer.rope, length=whole)
        k, v = near.k[i][None], near.v[i][None]
        q, k_new = (turn(y, pos=jnp.maximum(pos, 0)) for y in (x.q, x.k))
        k_past = turn(k, pos=at)
        sets = [Keys(k_past, v, past[:, None]), Keys(k_new, x.v, pos[:, None])]
        extra = [] if x.extra is None else [x.extra]
        local = attend(q, [*extra, *sets], pos, scale=layer.scale)[:2]
        older = turn(x.q, pos=far)
        blocks, there = _fetched(fetch, i, jnp.where(pos >= 0, 1, 0), older, near, sizes)
        k_far, v_far = jnp.split(blocks[None], [k.shape[-1]], -1)
        keys = Keys(k_far.astype(k.dtype), v_far.astype(v.dtype), there[None, None])
        distant = attend(older, keys, jnp.where(pos >= 0, 0, -1), scale=layer.scale)[:2]
        asked = _asked(q, k_past, k_new, pos)
        return merge([local, distant])[0], state, {"collected": (x.k[0], x.v[0], *asked)}

    memory = Memory(pos, attended, _no_state, lambda layer, state: [])
    ran = decode_layers(params, tokens, config, memory, (NOTHING,) * config.layers)
    k, v, old, fresh = (jnp.stack([one[j][0] for one in ran.collected]) for j in range(4))

    def put(to: Array, x: Array) -> Array:
        # Padding is written past the end, and dropped.
        where = jnp.where(new[0] < length, count + new[0], room)
        return to.at[:, :, where].set(x.astype(to.dtype), mode="drop")

    near = NewestTokens(put(near.k, k), put(near.v, v), put(near.asked + old, fresh))
    last = jnp.take_along_axis(ran.x, (length - 1)[None, None, None], 1)[:, 0]
    return near, unembed(params, last, config)[0]


def _no_state(layer: Layer, step: Any, state: GroupState) -> tuple[Array, GroupState, Left]:
    raise AssertionError("layers of attention have no recurrent state")


def _fetched(
    fetch: Any,
    layer: int,
    real: Int[Array, "1 T"],
    q: Float[Array, "1 N T H"],
    near: NewestTokens,
    sizes: LongTextSizes,
) -> tuple[Float[Array, "K S F"], Int[Array, "S"]]:
    """Fetch the files' blocks that a chunk's queries match best, with 0 for slots that exist, else -1."""
    heads, slots = near.k.shape[1], (sizes.first + sizes.blocks) * sizes.block
    each = jnp.where(real[0, :, None] > 0, q[0].astype(wide(q)), 0).sum(1)
    query = each.reshape(heads, -1, q.shape[-1])
    shape = heads, slots, near.k.shape[3] + near.v.shape[3]
    results = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((slots,), jnp.int32)
    # Files change between chunks, so a result must not be kept from an earlier call.
    return io_callback(fetch, results, layer, query, ordered=False)


def _asked(
    q: Float[Array, "1 N T H"],
    past: Float[Array, "1 K M H"],
    new: Float[Array, "1 K T H"],
    pos: Int[Array, "1 T"],
) -> tuple[Float[Array, "K M"], Float[Array, "K T"]]:
    """Logits of the chunk's queries with each earlier key, and with each own key before them, in sums."""
    heads, kind = past.shape[1], wide(q)
    real = (pos >= 0)[0, None, :, None]
    together = jnp.where(real, q[0].reshape(heads, -1, *q.shape[2:]).astype(kind).sum(1), 0)
    old = jnp.einsum("kh,kmh->km", together.sum(1), past[0].astype(kind))
    later = jnp.cumsum(together[:, ::-1], 1)[:, ::-1] - together
    return old, (later * new[0].astype(kind)).sum(-1)

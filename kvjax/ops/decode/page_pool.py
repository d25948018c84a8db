"""Pages of keys and values in one pool, with all numbers of their tokens, so that one copy moves a page.

A page is a block of rows of 32-bit words: the keys of its tokens, their values, and after
them numbers per token (positions, scales, biases) or per channel of the page.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvjax.pallas_kernels.scalars import split

PER_TOKEN = ("pos", "bias", "key_scale", "key_zero", "value_scale", "value_zero")
PER_CHANNEL = ("channel_scale", "channel_zero")
BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "float8_e5m2": 8, "float8_e4m3fn": 8, "int4": 4, "uint2": 2}
SUBLANES = 8


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["words"],
    meta_fields=["page", "payload", "names", "groups", "packed"],
)
@dataclasses.dataclass(frozen=True)
class PagePool:
    """Pages of all layers, [L, P, R, W] words: rows of keys, rows of values, then the numbers `names`.

    page: tokens per page. payload: the type of keys and values. W is the head's width or, zero-padded, a
    multiple of 128; packed: a row holds a key followed by its value, each W / 2 wide, so that heads of 64
    fill rows of 128. Numbers per token: "pos" (its position; below 0 for an empty slot), "bias" (added to the
    logit), "key_scale", "key_zero", "value_scale", "value_zero": a decoded number is scale * code + zero.
    Numbers per channel of the keys in each of a page's `groups`, equal runs of tokens: "channel_scale",
    "channel_zero", as in KIVI (Liu et al., 2024, arXiv:2402.02750). Values of empty slots must be finite up
    to a KV head's length; slots after it are never read.

    >>> k = jnp.ones((1, 3, 128, 128), jnp.int8)
    >>> scale = jnp.full((1, 3, 128), 0.5)
    >>> pool = make_pool(k, k, key_scale=scale, value_scale=scale)
    >>> pool.words.shape, float(pool.number("key_scale")[0, 2, 7])
    ((1, 3, 72, 128), 0.5)
    """

    words: Int[Array, "L P R W"]
    page: int
    payload: str
    names: tuple[str, ...] = ()
    groups: int = 1
    packed: bool = False

    @property
    def rows(self) -> int:
        """How many rows of words a page's keys take; its values take as many."""
        return self.page * BITS[self.payload] // 32

    @property
    def value_row(self) -> int:
        """The first row of a page's values."""
        return 0 if self.packed else self.rows

    @property
    def width(self) -> int:
        """The number of channels of a key."""
        return self.words.shape[3] // (2 if self.packed else 1)

    @property
    def keys(self) -> Shaped[Array, "L P page H"]:
        """The keys; codes of 2 bits are returned as uint8."""
        return from_words(self.words[:, :, : self.rows, : self.width], self.payload)

    @property
    def values(self) -> Shaped[Array, "L P page H"]:
        """The values; codes of 2 bits are returned as uint8."""
        rows = self.words[:, :, self.value_row : self.value_row + self.rows]
        return from_words(rows[..., self.words.shape[3] - self.width :], self.payload)

    def word_of(self, slot: Int[Array, "*b"]) -> tuple[Int[Array, "*b"], Int[Array, "*b"]]:
        """(row among the rows of keys, index of the lowest bit) of a page's token, from 0."""
        bits = BITS[self.payload]
        if self.payload == "uint2":
            # Two planes of 4-bit numbers: the second half of a page is in the higher bits.
            half = self.page // 2
            plane, slot = split(slot, half)
            row, piece = split(slot, 8)
            return row, (piece * 2 + plane) * bits
        row, piece = split(slot, 32 // bits)
        return row, piece * bits

    def number_row(self, name: str) -> int:
        """Return the first row of a page's numbers `name`."""
        before, width = self.names[: self.names.index(name)], self.words.shape[3]
        return self.value_row + self.rows + sum(_height(n, self.page, width, self.groups) for n in before)

    def number(self, name: str) -> Float[Array, "L P page"] | Float[Array, "L P groups H"]:
        """Return the numbers `name` of every token of every page, or of every channel of its groups."""
        layers, pages, _, width = self.words.shape
        at = self.number_row(name)
        rows = self.words[:, :, at : at + _height(name, self.page, width, self.groups)]
        if name in PER_CHANNEL:
            found = rows[..., : self.width]
        else:
            found = rows.reshape(layers, pages, -1)[..., : self.page]
        return jax.lax.bitcast_convert_type(found, jnp.float32)


def make_pool(
    k: Shaped[Array, "L P page H"],
    v: Shaped[Array, "L P page H"],
    *,
    packed: bool = False,
    **numbers: Float[Array, "L P _"] | Float[Array, "L P _ H"],
) -> PagePool:
    """Make a pool of these pages, with `numbers` by the names of `PagePool`.

    Numbers of channels are [L, P, groups, H], or [L, P, H] for one group per page. Raises ValueError for
    unknown names, unsupported types, shapes that differ, and pages whose tokens do not fill whole words or
    whole groups.
    """
    payload, page, width = k.dtype.name, *k.shape[2:]
    if payload not in BITS or v.dtype != k.dtype:
        raise ValueError(f"pages are of one of {', '.join(BITS)}, got {k.dtype} and {v.dtype}")
    unknown = set(numbers) - {*PER_TOKEN, *PER_CHANNEL}
    if unknown:
        names = ", ".join((*PER_TOKEN, *PER_CHANNEL))
        raise ValueError(f"numbers are among {names}, got {', '.join(sorted(unknown))}")
    numbers = {n: x[:, :, None] if n in PER_CHANNEL and x.ndim == 3 else x for n, x in numbers.items()}
    groups = next((x.shape[2] for n, x in numbers.items() if n in PER_CHANNEL), 1)
    for name, x in ({"v": v} | numbers).items():
        trailing = (groups, width) if name in PER_CHANNEL else (page,)
        want = k.shape if name == "v" else (*k.shape[:2], *trailing)
        if x.shape != want:
            raise ValueError(f"{name} must be {list(want)} beside keys {list(k.shape)}, got {list(x.shape)}")
    whole = math.lcm(32 // BITS[payload], groups)
    if page % whole:
        parted = f" in {groups} groups" if groups > 1 else ""
        raise ValueError(f"pages of {page} tokens in {payload}{parted}: expected a multiple of {whole}")
    parts = [to_words(x) for x in (k, v)]
    parts = [jnp.concatenate(parts, 3)] if packed else parts
    total = parts[0].shape[3]
    for x in numbers.values():
        pad = -x.shape[-1] % total
        row = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
        row = jnp.pad(row, ((0, 0),) * (x.ndim - 1) + ((0, pad),))
        parts.append(row.reshape(*k.shape[:2], -1, total))
    words = jnp.concatenate(parts, 2)
    words = jnp.pad(words, ((0, 0), (0, 0), (0, -words.shape[2] % SUBLANES), (0, 0)))
    return PagePool(words, page, payload, tuple(numbers), groups, packed)


def page_rows(
    payload: str, page: int, width: int, names: tuple[str, ...] = (), groups: int = 1, packed: bool = False
) -> int:
    """How many rows of words a page has; width: of its rows.

    >>> page_rows("int8", 128, 128, ("key_scale", "value_scale")), page_rows("bfloat16", 16, 128)
    (72, 16)
    """
    rows = (1 if packed else 2) * page * BITS[payload] // 32
    rows += sum(_height(n, page, width, groups) for n in names)
    return -(-rows // SUBLANES) * SUBLANES


def _height(name: str, page: int, width: int, groups: int) -> int:
    return groups if name in PER_CHANNEL else -(-page // width)


def to_words(x: Shaped[Array, "L P page W"]) -> Int[Array, "L P R W"]:
    """Pack neighbouring tokens into words. Codes of 2 bits are two planes of 4-bit numbers."""
    layers, pages, _, width = x.shape
    size = BITS[x.dtype.name]
    if size == 32:
        return jax.lax.bitcast_convert_type(x, jnp.int32)
    if size == 2:
        low, high = jnp.split(x.astype(jnp.uint8), 2, axis=2)
        return to_words((low | high << jnp.uint8(2)).astype(jnp.int4))
    pieces = x.reshape(layers, pages, -1, 32 // size, width)
    return jax.lax.bitcast_convert_type(jnp.swapaxes(pieces, 3, 4), jnp.int32)


def from_words(words: Int[Array, "L P R W"], payload: str) -> Shaped[Array, "L P page W"]:
    """Invert `to_words`."""
    if payload == "float32":
        return jax.lax.bitcast_convert_type(words, jnp.float32)
    if payload == "uint2":
        both = from_words(words, "int4").astype(jnp.uint8)
        return jnp.concatenate([both & jnp.uint8(3), (both >> jnp.uint8(2)) & jnp.uint8(3)], axis=2)
    layers, pages, _, width = words.shape
    pieces = jnp.swapaxes(jax.lax.bitcast_convert_type(words, jnp.dtype(payload)), 3, 4)
    return pieces.reshape(layers, pages, -1, width)

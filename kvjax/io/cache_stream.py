"""Caches sent in coded chunks, which are decoded while others arrive."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.base.checks import finite_number
from kvjax.base.errors import InputError
from kvjax.grammar.fitted import Fitted
from kvjax.hosts.arrays import is_shared
from kvjax.io.cache_file import as_tuples, damage
from kvjax.io.cache_tree import restore_tree
from kvjax.io.chunks import Choice, KeyValueChunk
from kvjax.io.coded_cache import WithFilled, check_model, coded_parts, filling, on_device
from kvjax.methods.parse import from_spec
from kvjax.methods.saved import saved_spec
from kvjax.models.model import Model
from kvjax.state.cache import Cache, check_alive

_MAGIC = b"kvjs"


def send_cache(
    cache: Cache, coder: Fitted, *, tokens: int = 256, quality: int | Choice = 0
) -> Iterator[bytes]:
    """Encode a cache as messages: a description, then keys and values of some tokens each.

    Args:
        cache: a cache of all tokens, in plain arrays.
        coder: what `kvjax.fit_coder` gave for its model.
        tokens: of a chunk.
        quality: of CacheGen's coder, 0 the best; or a function that chooses one for every chunk, from its
            bytes in each quality and how many chunks are left: `kvjax.quality_in_time(seconds, rate)`.

    Returns:
        Messages, each coded when it is asked for; `kvjax.receive_cache` takes them.

    Raises:
        InputError: for a cache that holds no plain keys and values of all tokens, a coder of a model of other
            sizes (`receive_cache` refuses one of other weights), and for chunks or qualities that do not
            exist.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> coder = kvjax.fit_coder(model, [list(range(3, 90))], ratio=4, newest=8)
    >>> _, cache = kvjax.prefill(model, [list(range(5, 65))])
    >>> sent = list(send_cache(cache, coder, tokens=16))
    >>> len(sent), kvjax.receive_cache(model, sent, coder).next.tolist()
    (6, [60])
    """
    check_alive(cache)
    if is_shared(cache):
        raise InputError(
            "this cache is held by several processes, expected one that a process holds: save it"
        )
    return _sent(cache, coder, *coded_parts(cache, coder, tokens, quality))


def _sent(
    cache: Cache, coder: Fitted, tree: Any, tensors: dict[str, Any], chunks: Iterator[bytes]
) -> Iterator[bytes]:
    plain = {name: np.asarray(x) for name, x in tensors.items()}
    head = {
        "kvjax": kvjax.__version__, "model": cache.model, "coder": coder.digest, "tree": tree,
        "method": None if cache.method is None else saved_spec(cache.method),
        "arrays": {name: [x.dtype.name, list(x.shape), x.tobytes().hex()] for name, x in plain.items()},
    }  # fmt: skip
    text = zlib.compress(json.dumps(head).encode(), 9)
    yield _MAGIC + zlib.crc32(text).to_bytes(4, "little") + text
    yield from chunks


def receive_cache(
    model: Model,
    messages: Iterable[bytes],
    coder: Fitted,
    *,
    arrived: Callable[[KeyValueChunk], Any] | None = None,
) -> Cache:
    """Decode the messages of `send_cache` one by one, as they arrive.

    Args:
        model: the model of the cache.
        messages: an iterable, such as a generator over a socket; the first message comes first, the others in
            any order.
        coder: the coder with which they were sent.
        arrived: called with every decoded chunk, before the next message is asked for.

    Returns:
        The cache, ready for `kvjax.step`.

    Raises:
        InputError: for messages that are cut, damaged, missing or of another model or coder.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> coder = kvjax.fit_coder(model, [list(range(3, 90))], ratio=4, newest=8)
    >>> _, cache = kvjax.prefill(model, [list(range(5, 65))])
    >>> first = []
    >>> note = lambda chunk: first.append(chunk.start)
    >>> back = receive_cache(model, send_cache(cache, coder), coder, arrived=note)
    >>> first
    [0, 4, 52]
    """
    check_model(coder, model)
    found = iter(messages)
    head = _head(next(found, b""))
    if head["coder"] != coder.digest:
        raise InputError(
            f"the cache was sent with the coder {head['coder']}, this one is {coder.digest}: give that one"
        )
    with damage("the first message"):
        plain = _InMessage(head["arrays"])
        method = None if head["method"] is None else from_spec(as_tuples(head["method"]))
        saved = restore_tree(head["tree"], method, head["model"])
        goal = filling(saved, plain, coder)
    for message in found:
        chunk = goal.add(message)
        if arrived is not None:
            arrived(chunk)
    goal.check_whole()
    return on_device(saved, WithFilled(plain, goal.arrays))


class _InMessage:
    """The arrays of a first message."""

    def __init__(self, arrays: dict[str, Any]):
        self.arrays = {
            name: np.frombuffer(bytes.fromhex(data), jnp.dtype(dtype)).reshape(shape)
            for name, (dtype, shape, data) in arrays.items()
        }

    def read(self, name: str, dtype: Any, shape: Sequence[int], index: tuple[slice, ...]) -> np.ndarray:
        """Read the piece `index` of an array, a copy."""
        return np.array(self.arrays[name].view(dtype).reshape(shape)[index])


def _head(message: bytes) -> dict[str, Any]:
    text = message[8:]
    if message[:4] != _MAGIC or zlib.crc32(text).to_bytes(4, "little") != message[4:8]:
        raise InputError(
            f"the first message, of {len(message)} bytes, does not describe a cache, expected the first "
            "one of kvjax.send_cache: send the cache again"
        )
    with damage("the first message"):
        return json.loads(zlib.decompress(text))


def quality_in_time(seconds: float | int, rate: float | int) -> Choice:
    """Choose for every chunk the best quality in which all that are left would arrive in time.

    That is CacheGen's adaptation (arXiv:2310.07240, section 5.3), for a given bandwidth: if chunks that are
    left take as many bytes as this one.

    Args:
        seconds: in which the cache is to arrive.
        rate: bytes per second.

    Returns:
        A function for `send_cache(..., quality=)`, to be used for one cache.

    Raises:
        InputError: for times and rates that are not positive and finite.

    >>> choose = quality_in_time(2.0, 100.0)
    >>> [choose([80, 40, 20], left) for left in (4, 3, 2, 1)]
    [1, 1, 1, 0]
    """
    for name, value in (("seconds", seconds), ("rate", rate)):
        finite_number(name, value, 0.0, open_low=True)
    left = seconds * rate

    def choose(sizes: list[int], chunks: int) -> int:
        nonlocal left
        fits = [q for q, size in enumerate(sizes) if size * chunks <= left]
        found = fits[0] if fits else len(sizes) - 1
        left -= sizes[found]
        return found

    return choose

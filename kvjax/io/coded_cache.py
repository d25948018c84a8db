"""Keys and values of a cache as chunks of a fitted coder, in place of their arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from kvjax.base.checks import whole_number
from kvjax.base.errors import InputError
from kvjax.grammar.fitted import Fitted
from kvjax.io import frequency_coder, transform_coder
from kvjax.io.cache_arrays import Readable
from kvjax.io.cache_tree import describe_cache
from kvjax.io.chunks import Choice, Coder, Filling, dense_parts, messages
from kvjax.io.entropy_coding import library
from kvjax.io.frequency_coder import FrequencyCoder
from kvjax.io.transform_coder import TransformCoder
from kvjax.models.model import Model
from kvjax.state.cache import Cache

# Tokens of a chunk of a file.
TOKENS = 256


class WithFilled:
    """Arrays of a file or a message, and keys and values that chunks filled."""

    def __init__(self, plain: Readable, filled: dict[str, np.ndarray]):
        self.plain, self.filled = plain, filled

    def read(self, name: str, dtype: Any, shape: Sequence[int], index: tuple[slice, ...]) -> np.ndarray:
        """Read the piece `index` of an array, a copy."""
        if name in self.filled:
            return np.array(self.filled[name][index])
        return self.plain.read(name, dtype, shape, index)


def coder_of(fitted: Any) -> Coder:
    """Return what codes with these arrays. InputError for anything but what `kvjax.fit_coder` gave."""
    if not isinstance(fitted, Fitted) or fitted.word not in (transform_coder.WORD, frequency_coder.WORD):
        raise InputError(f"coder is {fitted!r:.60}, expected what kvjax.fit_coder gave")
    if fitted.word == frequency_coder.WORD:
        library()
    return _made(fitted)


@lru_cache(maxsize=4)
def _made(fitted: Fitted) -> Coder:
    return TransformCoder(fitted) if fitted.word == transform_coder.WORD else FrequencyCoder(fitted)


def check_model(fitted: Fitted, model: Model) -> None:
    """Raise InputError for a coder of another model."""
    if fitted.model not in ("", model.signature):
        raise InputError(
            f"the coder was fitted to another model (of the signature {fitted.model}, this model's is "
            f"{model.signature}): fit one with kvjax.fit_coder(model, texts)"
        )


def coded_parts(
    cache: Cache, fitted: Fitted, tokens: int = TOKENS, quality: int | Choice = 0
) -> tuple[dict[str, Any], dict[str, Any], Iterator[bytes]]:
    """Describe a cache; return that, its arrays without keys and values, and these as chunks.

    Raises InputError for a cache that holds no plain keys and values of all tokens, and for chunks or
    qualities that do not exist.
    """
    coder = coder_of(fitted)
    whole_number("tokens", tokens, 1, "tokens of a chunk")
    if not callable(quality):
        whole_number("quality", quality, 0, "steps below the best", coder.qualities - 1)
    tensors: dict[str, Any] = {}
    tree = describe_cache(cache, tensors)
    for name, _ in dense_parts(cache):
        for part in "kv":
            del tensors[f"{name}.{part}"]
    return tree, tensors, messages(cache, coder, tokens, quality)


def filling(saved: Cache, plain: Readable, fitted: Fitted) -> Filling:
    """Return what the chunks of a cache fill. saved: the cache with a `Saved` for every array."""
    pos = []
    for _, part in dense_parts(saved):
        where: Any = part.pos
        pos.append(plain.read(where.name, where.dtype, where.shape, (slice(None),) * 4))
    return Filling(saved, pos, coder_of(fitted))


def filled(saved: Cache, plain: Readable, fitted: Fitted, chunks: Iterable[bytes]) -> WithFilled:
    """Return all arrays of a cache, from its chunks. InputError if some are damaged or missing."""
    found = filling(saved, plain, fitted)
    for chunk in chunks:
        found.add(chunk)
    found.check_whole()
    return WithFilled(plain, found.arrays)


def on_device(saved: Cache, arrays: Any) -> Cache:
    """Move the cache to the default device."""
    return jax.tree.map(lambda x: x.read(arrays, None), saved)

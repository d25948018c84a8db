"""The tree of a cache as JSON, and the cache that such JSON describes.

Nodes are named by their class. The result is checked against the classes' annotations, so that a file that
does not describe a cache is refused before any of its arrays is read.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from functools import cache as remembered
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.base.errors import InputError
from kvjax.grammar.keys import key_of, name_of
from kvjax.io.cache_arrays import Readable, placed_array
from kvjax.io.saved_words import SavedWords, check_names, words_of
from kvjax.ops.base.memory import in_host, to_host
from kvjax.state.cache import Cache, GroupState, Near, Paged, Pages, Slots, State
from kvjax.state.codes import Codec, Codes

_NODES = {node.__name__: node for node in (GroupState, Slots, Near, Paged, Pages, Codes, State)}


@dataclasses.dataclass(frozen=True)
class Saved:
    """An array of a file: its name there, its type, and whether it was in host memory."""

    name: str
    dtype: Any
    shape: tuple[int, ...]
    far: bool

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def read(self, arrays: Readable, where: Any) -> jax.Array:
        out = placed_array(arrays, self.name, self.dtype, self.shape, where)
        return to_host(out) if self.far else out


def describe(x: Any, name: str, tensors: dict[str, Any]) -> Any:
    """JSON that describes x; its arrays go to `tensors`, named by their place in the tree."""
    if x is None:
        return None
    if isinstance(x, tuple):
        return [describe(y, f"{name}.{i}", tensors) for i, y in enumerate(x)]
    if isinstance(x, dict):
        return {"dict": {str(key): describe(y, f"{name}.{key}", tensors) for key, y in x.items()}}
    if isinstance(x, jax.Array | np.ndarray):
        tensors[name] = x
        far = {"memory": "host"} if in_host(x) else {}
        return {"array": x.dtype.name, "shape": list(x.shape)} | far
    assert type(x) in _NODES.values(), f"{type(x).__name__} at {name} is no part of a cache"
    out: dict[str, Any] = {"node": type(x).__name__}
    for field in dataclasses.fields(x):
        value = getattr(x, field.name)
        if not field.metadata.get("static"):
            out[field.name] = describe(value, f"{name}.{field.name}", tensors)
        else:
            out[field.name] = {"codec": name_of(value)} if isinstance(value, Codec) else value
    return out


def describe_cache(cache: Cache, tensors: dict[str, Any]) -> dict[str, Any]:
    """JSON that describes a cache without its labels; its arrays go to `tensors`."""
    check_names(words_of(cache.method) | {*codecs_of(cache.method)})
    tree = {name: describe(getattr(cache, name), name, tensors) for name in ("groups", "next", "pools")}
    return tree | ({"strides": list(cache.strides)} if cache.strides else {})


def restore_tree(tree: Any, method: Any, model: str) -> Cache:
    """Restore the cache that `describe` described field by field, with a `Saved` for every array.

    Raises InputError if it was stored by other codecs than the method's, and TypeError, KeyError or
    ValueError if it does not describe a cache.
    """
    codecs = {*codecs_of(method), *_codecs_of_pairs(method)}
    words = _Words(SavedWords(words_of(method)), SavedWords(codecs), tuple(codecs))
    found = {name: _restore(tree[name], name, words) for name in ("groups", "next", "pools")}
    for name, hint in _hints(Cache).items():
        if name in found and not _is(found[name], hint):
            raise TypeError(f"{name} is no {_called(hint)}")
    if not found["groups"] or any(group.state is None and not group.parts for group in found["groups"]):
        raise ValueError("a group of layers holds nothing")
    strides = tuple(tree.get("strides", ()))
    if strides and (len(strides) != len(found["groups"]) or not _are_strides(strides)):
        raise ValueError(f"{strides} are no strides of {len(found['groups'])} groups of layers")
    return Cache(**found, method=method, model=model, strides=strides)


def _are_strides(strides: tuple[Any, ...]) -> bool:
    """Whether every pattern has as many groups side by side as its stride says."""
    if not strides:
        return True
    first = strides[0]
    if type(first) is not int or first < 1 or strides[:first] != (first,) * first:
        return False
    return _are_strides(strides[first:])


@dataclasses.dataclass(frozen=True)
class _Words:
    """The words of a method and its codecs, found by their texts in files."""

    named: SavedWords
    codecs: SavedWords
    all_codecs: tuple[Codec, ...]

    def key(self, text: str) -> str:
        """Return the key of a dict that a file names by `text`: of a word, or of a plain name."""
        if "(" not in text:
            return text
        if (word := self.named.find(text)) is None:
            raise InputError(
                f"its slots or rows carry numbers of {text}, of which the method here has none: load it with "
                "the kvjax (or method file) that saved it, or prefill again"
            )
        return key_of(word)

    def codec(self, text: str) -> Codec:
        if (codec := self.codecs.find(text)) is None:
            stores = ", ".join(map(name_of, self.all_codecs)) or "no codec"
            raise InputError(
                f"the codes were written by {text}, but the method here stores with {stores}: load it with "
                "the kvjax (or method file) that saved it, or prefill again"
            )
        return codec


def _restore(node: Any, name: str, words: _Words) -> Any:
    if node is None:
        return None
    if isinstance(node, list):
        return tuple(_restore(y, f"{name}.{i}", words) for i, y in enumerate(node))
    if not isinstance(node, dict):
        raise TypeError(f"{name} is {node!r}")
    if "dict" in node:
        parts = node["dict"].items()
        return {words.key(key): _restore(y, f"{name}.{key}", words) for key, y in parts}
    if "array" in node:
        return Saved(name, _dtype(node["array"]), _shape(node["shape"]), node.get("memory") == "host")
    kind = _NODES[node["node"]]
    fields = {}
    for field in dataclasses.fields(kind):
        absent = {"dict": {}} if field.default_factory is dict else field.default
        value = node[field.name] if absent is dataclasses.MISSING else node.get(field.name, absent)
        if not field.metadata.get("static"):
            value = _restore(value, f"{name}.{field.name}", words)
        elif isinstance(value, dict):
            value = words.codec(value["codec"])
        if not _is(value, hint := _hints(kind)[field.name]):
            raise TypeError(f"{name}.{field.name} is no {_called(hint)}")
        fields[field.name] = value
    return kind(**fields)


def _dtype(name: Any) -> np.dtype:
    found = jnp.dtype(name)
    if not (jnp.issubdtype(found, jnp.number) or found == np.bool_):
        raise TypeError(f"{name!r} is no type of a cache's arrays")
    return found


def _shape(sizes: Any) -> tuple[int, ...]:
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{sizes!r} is no shape")
    return tuple(sizes)


@remembered
def _hints(kind: type) -> dict[str, Any]:
    """Return the annotations of a class's fields."""
    return typing.get_type_hints(kind)


def _called(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint))


def _is(value: Any, hint: Any) -> bool:
    """Whether a restored value matches a field's annotation; of arrays only axes and types are checked."""
    kind, parts = typing.get_origin(hint), typing.get_args(hint)
    if kind in (types.UnionType, typing.Union):
        return any(_is(value, part) for part in parts)
    if kind is tuple:
        return isinstance(value, tuple) and all(_is(x, parts[0]) for x in value)
    if kind is dict:
        return isinstance(value, dict) and all(_is(x, parts[1]) for x in value.values())
    if hasattr(hint, "dim_str"):
        axes, types_ = hint.dim_str.split(), hint.dtypes
        return isinstance(value, Saved) and value.ndim == len(axes) and value.dtype.name in types_
    if hint is Any:  # a tree of arrays
        below = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
        return isinstance(value, Saved | dict | tuple | None) and all(_is(x, Any) for x in below)
    if hint is Array:
        return isinstance(value, Saved)
    return type(value) is int if hint is int else isinstance(value, hint)


def codecs_of(word: Any) -> Iterator[Codec]:
    """Return every codec in a method."""
    if isinstance(word, Codec):
        yield word
        yield from word.each
    elif dataclasses.is_dataclass(word):
        for field in dataclasses.fields(word):
            yield from codecs_of(getattr(word, field.name))
    elif isinstance(word, tuple):
        for part in word:
            yield from codecs_of(part)


def _codecs_of_pairs(method: Any) -> Iterator[Codec]:
    """Yield the codecs that a method's stack word derives from those of its store."""
    if method is not None and method.stack is not None:
        store = method.store
        for codec in (None, None) if store is None else (store.keys, store.values):
            yield from method.stack.codecs(codec)

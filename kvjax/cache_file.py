"""A cache as one file: safetensors, with what the arrays mean as JSON in its header.

Where several processes hold a cache, its arrays lie in parts beside the file (`cache_arrays.py`). The header
names the tree (segment kinds, fields, codecs), the method that filled the cache and the model it belongs to;
no code is stored. A method of a user's own file is imported from there when the cache is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError

import kvjax
from kvjax.axes import map_axes
from kvjax.cache import Cache, GroupState, Near, Paged, Pages, Slots, State, check_alive
from kvjax.cache_arrays import Arrays, placed_array, write_arrays, write_parts
from kvjax.codes import Codec, Codes
from kvjax.errors import InputError
from kvjax.fitted import fitted_words
from kvjax.grammar import Method
from kvjax.hosts.arrays import is_shared
from kvjax.layout import mesh_for
from kvjax.mesh.on_mesh import OnMesh
from kvjax.methods.parse import from_spec
from kvjax.models.files import open_safetensors
from kvjax.models.model import Model
from kvjax.ops.base.memory import in_host, to_host
from kvjax.place.common import apart

KIND = "kvjax cache"
# 2: codes of 8 bits are bytes, and words of fewer bits lie next to each other (`kvjax.store.affine`).
# 4: the model's fingerprint covers all its weights (`kvjax.models.fingerprint`), so those of before fit none.
# 5: what a group of layers holds has names (`GroupState`).
FORMAT = 5
_NODES = {node.__name__: node for node in (GroupState, Slots, Near, Paged, Pages, Codes, State)}


class CacheFile(NamedTuple):
    """The header of a saved cache: who wrote it, the model's fingerprint, the method's spec, the tree.

    fitted: the digests of the arrays that the method was fitted with. parts: the files that hold the arrays,
    none where the file itself does.
    """

    kvjax: str
    model: str
    spec: tuple[Any, ...] | None
    tree: dict[str, Any]
    fitted: list[str]
    parts: list[str]


def save_cache(path: str | os.PathLike[str], cache: Cache) -> None:
    """Writes a cache to one file, which appears whole or not at all; an older file at `path` is replaced.

    Every array keeps its dtype and bits. A cache of several hosts is saved by all of them, to a folder that
    they share: each writes what it holds to a part beside the file. Raises InputError where the file cannot
    be written, where the method cannot be built again from its spec, or where the cache was consumed by a
    step.

    >>> import kvjax, tempfile
    >>> model = kvjax.load("recall-tiny")
    >>> _, cache = kvjax.prefill(model, [[1, 2, 3]], method="int8")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_cache(f"{folder}/three.cache", cache)
    ...     load_cache(f"{folder}/three.cache").method.id
    'int8'
    """
    check_alive(cache)
    cache = apart(cache)
    tensors: dict[str, Any] = {}
    tree = {name: _describe(getattr(cache, name), name, tensors) for name in ("groups", "next", "pools")}
    metadata = {
        "kind": KIND,
        "format": str(FORMAT),
        "kvjax": kvjax.__version__,
        "model": cache.model,
        "method": json.dumps(_checked_spec(cache.method)),
        "fitted": json.dumps(_digests(cache.method)),
        "tree": json.dumps(tree),
    }
    write = write_parts if is_shared(tensors) else write_arrays
    write(Path(path), tensors, metadata)


def load_cache(path: str | os.PathLike[str], model: Model | None = None) -> Cache:
    """The cache that `save_cache` wrote, ready for kvjax.prefill, step and generate.

    It lies on the default device, or on the mesh of `model`, whatever mesh it was saved from: every host then
    reads what its devices hold. Its tree structure equals the saved one, so programs compiled for that one
    serve it. A method of a user's
    own file is imported from there: load such caches only together with a file that you trust.

    Raises InputError where the file is missing, truncated, no cache or of a newer kvjax, or where its method
    cannot be built or now stores its codes in another way.
    """
    head = read_cache_header(path)
    try:
        method = None if head.spec is None else from_spec(head.spec)
    except ValueError as error:
        raise InputError(f"{path} was filled by a method that cannot be built: {error}") from error
    if _digests(method) != head.fitted:
        raise InputError(
            f"{path} was filled with other fitted arrays ({', '.join(head.fitted)}) than the file of its "
            f"method holds now ({', '.join(_digests(method))}): give back that file, or prefill again"
        )
    codecs = {repr(codec): codec for codec in (*_codecs(method), *_codecs_of_pairs(method))}
    with _damage(path):
        tree = {name: _restore(node, name, codecs) for name, node in head.tree.items()}
        saved = Cache(**tree, method=method, model=head.model)
        return _read(Arrays(Path(path), head.parts), saved, None if model is None else model.on_mesh)


def _read(arrays: Arrays, saved: Cache, on: OnMesh | None) -> Cache:
    """The arrays of which `saved` holds the descriptions, on a mesh or on the default device."""
    if on is None:
        return jax.tree.map(lambda x: x.read(arrays, None), saved)
    if (there := mesh_for(saved.method or Method(), on)) is None:
        return _read(arrays, saved, None)
    where = map_axes(lambda axes, x: there.sharding(axes, x.shape), saved, there)
    read = jax.tree.map(lambda x, at: x.read(arrays, at), saved, where)
    return dataclasses.replace(read, on_mesh=there)


def read_cache_header(path: str | os.PathLike[str]) -> CacheFile:
    """What a saved cache says about itself; no array is read and no method built.

    Raises InputError where the file is missing, truncated, no cache, or of a newer kvjax.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise InputError(f"{path} {what}, expected a file that kvjax.save_cache wrote: check the path")
    try:
        metadata = open_safetensors(path).metadata() or {}
    except InputError as error:
        raise InputError(f"{error}; expected a whole file that kvjax.save_cache wrote") from error
    if metadata.get("kind") != KIND:
        raise InputError(
            f"{path} is a safetensors file but no cache, expected one that kvjax.save_cache wrote: "
            "is it a model? Load that with kvjax.load(its directory)"
        )
    with _damage(path):
        if int(metadata["format"]) > FORMAT:
            raise InputError(
                f"{path} has cache format {metadata['format']} (written by kvjax {metadata['kvjax']}), "
                f"expected at most {FORMAT}, which kvjax {kvjax.__version__} reads: update kvjax"
            )
        if int(metadata["format"]) < FORMAT:
            raise InputError(
                f"{path} has cache format {metadata['format']} (written by kvjax {metadata['kvjax']}), which "
                f"an older kvjax wrote in another layout, expected format {FORMAT}: prefill again"
            )
        spec = _tuples(json.loads(metadata["method"]))
        tree, fitted = json.loads(metadata["tree"]), json.loads(metadata["fitted"])
        parts = json.loads(metadata.get("parts", "[]"))
        return CacheFile(metadata["kvjax"], metadata["model"], spec, tree, fitted, parts)


# --- the tree ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Saved:
    """An array of a file: its name there, its type, and whether it lay in host memory."""

    name: str
    dtype: Any
    shape: tuple[int, ...]
    far: bool

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def read(self, arrays: Arrays, where: Any) -> jax.Array:
        out = placed_array(arrays, self.name, self.dtype, self.shape, where)
        return to_host(out) if self.far else out


def _describe(x: Any, name: str, tensors: dict[str, Any]) -> Any:
    """JSON that says what x is; its arrays go to `tensors` under their place in the tree."""
    if x is None:
        return None
    if isinstance(x, tuple):
        return [_describe(y, f"{name}.{i}", tensors) for i, y in enumerate(x)]
    if isinstance(x, dict):
        return {"dict": {key: _describe(y, f"{name}.{key}", tensors) for key, y in x.items()}}
    if isinstance(x, jax.Array | np.ndarray):
        tensors[name] = x
        far = {"memory": "host"} if in_host(x) else {}
        return {"array": x.dtype.name, "shape": list(x.shape)} | far
    assert type(x) in _NODES.values(), f"{type(x).__name__} at {name} is no part of a cache"
    out: dict[str, Any] = {"node": type(x).__name__}
    for field in dataclasses.fields(x):
        value = getattr(x, field.name)
        if not field.metadata.get("static"):
            out[field.name] = _describe(value, f"{name}.{field.name}", tensors)
        else:
            out[field.name] = {"codec": repr(value)} if isinstance(value, Codec) else value
    return out


def _restore(node: Any, name: str, codecs: dict[str, Codec]) -> Any:
    """What `_describe` described, with a `_Saved` for every array."""
    if node is None:
        return None
    if isinstance(node, list):
        return tuple(_restore(y, f"{name}.{i}", codecs) for i, y in enumerate(node))
    if "dict" in node:
        return {key: _restore(y, f"{name}.{key}", codecs) for key, y in node["dict"].items()}
    if "array" in node:
        dtype, shape = jnp.dtype(node["array"]), tuple(node["shape"])
        return _Saved(name, dtype, shape, node.get("memory") == "host")
    kind = _NODES[node["node"]]
    fields = {}
    for field in dataclasses.fields(kind):
        absent = {"dict": {}} if field.default_factory is dict else field.default
        value = node[field.name] if absent is dataclasses.MISSING else node.get(field.name, absent)
        if not field.metadata.get("static"):
            value = _restore(value, f"{name}.{field.name}", codecs)
        elif isinstance(value, dict):
            value = _codec(value["codec"], codecs)
        fields[field.name] = value
    return kind(**fields)


def _codec(name: str, codecs: dict[str, Codec]) -> Codec:
    if name not in codecs:
        raise InputError(
            f"the codes were written by {name}, but the method here stores with "
            f"{', '.join(codecs) or 'no codec'}: load it with the kvjax (or method file) that saved it, or "
            "prefill again"
        )
    return codecs[name]


def _codecs(word: Any) -> Iterator[Codec]:
    """Every codec in a sentence."""
    if isinstance(word, Codec):
        yield word
    elif dataclasses.is_dataclass(word):
        for field in dataclasses.fields(word):
            yield from _codecs(getattr(word, field.name))
    elif isinstance(word, tuple):
        for part in word:
            yield from _codecs(part)


def _codecs_of_pairs(method: Any) -> Iterator[Codec]:
    """Those that a sentence's stack word makes of its store's."""
    if method is not None and method.stack is not None:
        store = method.store
        for codec in (None, None) if store is None else (store.keys, store.values):
            yield from method.stack.codecs(codec)


# --- the method --------------------------------------------------------------------------------------


def _digests(method: Any) -> list[str]:
    return sorted({word.fitted.digest for word in fitted_words(method) if word.fitted is not None})


def _checked_spec(method: Any) -> tuple[Any, ...] | None:
    """The method's spec, once it is sure that it leads back to the same method."""
    if method is None:
        return None
    try:
        same = (
            from_spec(method.spec) == method and _tuples(json.loads(json.dumps(method.spec))) == method.spec
        )
    except (ValueError, TypeError) as error:
        raise InputError(f"this cache cannot be saved: {error}") from error
    if not same:
        raise InputError(
            f"this cache cannot be saved: {method.spec} builds another method than the one that filled it. "
            "Fill it with a method as kvjax.method, kvjax.chain or kvjax.methods.user.from_file return it"
        )
    return method.spec


def _tuples(x: Any) -> Any:
    """JSON's lists as the tuples they were."""
    return tuple(_tuples(y) for y in x) if isinstance(x, list) else x


@contextlib.contextmanager
def _damage(path: str | os.PathLike[str]) -> Iterator[None]:
    """Says in one line that a header or its tensors do not fit together."""
    try:
        yield
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise InputError(
            f"{path} is damaged ({type(error).__name__}: {error}), expected what kvjax.save_cache wrote: "
            "save it again"
        ) from error

"""A cache as one file: safetensors, with what the arrays mean as JSON in its header.

The header names the tree (segment kinds, fields, codecs), the method that filled the cache and the model it
belongs to; no code is stored. A method of a user's own file is imported from there when the cache is loaded.
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
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import kvjax
from kvjax.cache import Cache, Codec, Codes, GroupState, Near, Paged, Pages, Slots, State, check_alive
from kvjax.errors import InputError
from kvjax.fitted import fitted_words
from kvjax.methods.parse import from_spec
from kvjax.models.files import open_safetensors
from kvjax.ops.base.memory import in_host, to_host
from kvjax.place.common import apart

KIND = "kvjax cache"
# 2: codes of 8 bits are bytes, and words of fewer bits lie next to each other (`kvjax.store.affine`).
# 4: the model's fingerprint covers all its weights (`kvjax.models.fingerprint`), so those of before fit none.
# 5: what a group of layers holds has names (`GroupState`).
FORMAT = 5
_NODES = {node.__name__: node for node in (GroupState, Slots, Near, Paged, Pages, Codes, State)}
# What safetensors' numpy side reads back; other dtypes are written as their bytes.
_PLAIN = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "float32")


class CacheFile(NamedTuple):
    """The header of a saved cache: who wrote it, the model's fingerprint, the method's spec, the tree.

    fitted: the digests of the arrays that the method was fitted with.
    """

    kvjax: str
    model: str
    spec: tuple[Any, ...] | None
    tree: dict[str, Any]
    fitted: list[str]


def save_cache(path: str | os.PathLike[str], cache: Cache) -> None:
    """Writes a cache to one file, which appears whole or not at all; an older file at `path` is replaced.

    Every array keeps its dtype and bits. Raises InputError where the file cannot be written, where the method
    cannot be built again from its spec, or where the cache was consumed by a step.

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
    tensors: dict[str, np.ndarray] = {}
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
    with _atomic(Path(path)) as temporary:
        save_file(tensors, temporary, metadata)


def load_cache(path: str | os.PathLike[str]) -> Cache:
    """The cache that `save_cache` wrote, on the default device, ready for kvjax.prefill, step and generate.

    Its tree structure equals the saved one, so programs compiled for that one serve it. A method of a user's
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
    with safe_open(path, framework="np") as file, _damage(path):
        tree = {name: _restore(node, name, file, codecs) for name, node in head.tree.items()}
        return Cache(**tree, method=method, model=head.model)


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
        return CacheFile(metadata["kvjax"], metadata["model"], spec, tree, fitted)


# --- the tree ----------------------------------------------------------------------------------------


def _describe(x: Any, name: str, tensors: dict[str, np.ndarray]) -> Any:
    """JSON that says what x is; its arrays go to `tensors` under their place in the tree."""
    if x is None:
        return None
    if isinstance(x, tuple):
        return [_describe(y, f"{name}.{i}", tensors) for i, y in enumerate(x)]
    if isinstance(x, dict):
        return {"dict": {key: _describe(y, f"{name}.{key}", tensors) for key, y in x.items()}}
    if isinstance(x, jax.Array | np.ndarray):
        value = np.ascontiguousarray(x)
        plain = value.dtype.name in _PLAIN
        tensors[name] = value if plain else value.reshape(-1).view(np.uint8)
        far = {"memory": "host"} if in_host(x) else {}
        return {"array": value.dtype.name, "shape": list(value.shape)} | far
    assert type(x) in _NODES.values(), f"{type(x).__name__} at {name} is no part of a cache"
    out: dict[str, Any] = {"node": type(x).__name__}
    for field in dataclasses.fields(x):
        value = getattr(x, field.name)
        if not field.metadata.get("static"):
            out[field.name] = _describe(value, f"{name}.{field.name}", tensors)
        else:
            out[field.name] = {"codec": repr(value)} if isinstance(value, Codec) else value
    return out


def _restore(node: Any, name: str, file: Any, codecs: dict[str, Codec]) -> Any:
    """What `_describe` described."""
    if node is None:
        return None
    if isinstance(node, list):
        return tuple(_restore(y, f"{name}.{i}", file, codecs) for i, y in enumerate(node))
    if "dict" in node:
        return {key: _restore(y, f"{name}.{key}", file, codecs) for key, y in node["dict"].items()}
    if "array" in node:
        value = file.get_tensor(name).view(jnp.dtype(node["array"])).reshape(node["shape"])
        # A copy: steps donate it, and the file's memory is not theirs.
        return to_host(jnp.array(value)) if node.get("memory") == "host" else jnp.array(value)
    kind = _NODES[node["node"]]
    fields = {}
    for field in dataclasses.fields(kind):
        absent = {"dict": {}} if field.default_factory is dict else field.default
        value = node[field.name] if absent is dataclasses.MISSING else node.get(field.name, absent)
        if not field.metadata.get("static"):
            value = _restore(value, f"{name}.{field.name}", file, codecs)
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


# --- the file ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _atomic(path: Path) -> Iterator[Path]:
    """A temporary name that becomes `path` once its content is on disk, or vanishes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"{path} cannot be written ({why}), expected a file in a writable directory: choose another path"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


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

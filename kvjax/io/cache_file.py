"""Saved caches: a safetensors file with a JSON description of the arrays in its header.

If several processes hold a cache, its arrays are in parts beside the file (`cache_arrays.py`). The header
has the tree (`cache_tree.py`), the method that filled the cache and the model it belongs to. No code
is stored, and no code that a header names is run: for a user's own method, the user gives its file
or function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError

import kvjax
from kvjax.base.atomic_files import check_kind
from kvjax.base.errors import InputError
from kvjax.compat.layout_class import mesh_for
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted, fitted_words
from kvjax.hosts.arrays import is_shared
from kvjax.io.cache_arrays import Readable, SavedArrays, check_parts, check_seal, write_arrays, write_parts
from kvjax.io.cache_tree import describe_cache, restore_tree
from kvjax.io.coded_cache import check_model, coded_parts, filled
from kvjax.io.entropy_coding import check_coder
from kvjax.mesh.on_mesh import OnMesh
from kvjax.methods.parse import from_spec
from kvjax.methods.saved import saved_spec
from kvjax.methods.user import Own, from_given, only_given
from kvjax.models.files import open_safetensors
from kvjax.models.model import Model
from kvjax.place.common import apart
from kvjax.state.axes import map_axes
from kvjax.state.cache import Cache, check_alive

KIND = "kvjax cache"
# Versions: 2: codes of 8 bits are bytes, and words of fewer bits are adjacent (`kvjax.store.affine`). 4: the
# model's fingerprint covers all its weights (`kvjax.models.fingerprint`), so older ones never match. 5: parts
# of a group of layers have names (`GroupState`). 6: digests of all arrays and of the header. 7: a KV head in
# pages stores its first page.
FORMAT = 7
# 8: some arrays are entropy-coded (`kvjax.io.entropy_coding`).
CODED = 8
# 9: keys and values are chunks of a fitted coder (`kvjax.io.coded_cache`).
CHUNKED = 9
# 10: kinds of layers take turns in some groups (`Cache.strides`), which older versions would take for runs.
STRIDED = 10


# The names of chunks, before their numbers.
_CHUNK = "chunk."


class CacheFile(NamedTuple):
    """The header of a saved cache: kvjax' version, the model's fingerprint, the method's spec, the tree.

    fitted: the digests of the method's fitted arrays. parts: the files that hold the arrays, none if the file
    itself does. chat: the conversation that the cache holds, as JSON; empty for none. coder: the digest of
    the fitted coder of its `chunks` chunks; empty for none.
    """

    kvjax: str
    model: str
    spec: tuple[Any, ...] | None
    tree: dict[str, Any]
    fitted: list[str]
    parts: list[str]
    chat: str = ""
    coder: str = ""
    chunks: int = 0


def save_cache(path: str | os.PathLike[str], cache: Cache, *, coder: str | Fitted | None = None) -> None:
    """Write a cache to one file, atomically.

    Every array keeps its dtype and bits. A cache of several hosts is saved by all of them, to a folder that
    they share: each writes its arrays to a part beside the file.

    Args:
        path: of the file; an older cache there is replaced.
        cache: a live cache.
        coder: "range" compresses arrays by the frequencies of their bytes or half bytes in a channel or a
            layer (`pip install 'kvjax[coder]'`); `load_cache` gives the same bits. A coder of
            `kvjax.fit_coder` codes keys and values with loss; `load_cache` needs it, too.

    Raises:
        InputError: if `path` holds something else or cannot be written, the method cannot be built again from
            text, a step consumed the cache, and for a coder that does not exist, is not installed or was
            fitted to another model.

    >>> import kvjax, tempfile
    >>> model = kvjax.load("recall-tiny")
    >>> _, cache = kvjax.prefill(model, [[1, 2, 3]], method="int8")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_cache(f"{folder}/three.cache", cache)
    ...     load_cache(f"{folder}/three.cache").method.id
    'int8'
    """
    write_cache(path, cache, coder=coder)


def write_cache(
    path: str | os.PathLike[str], cache: Cache, *, coder: str | Fitted | None = None, **more: str
) -> None:
    """`save_cache`, with further texts in the header."""
    if not isinstance(coder, Fitted):
        check_coder(coder)
    check_alive(cache)
    check_kind(path, KIND)
    cache = apart(cache)
    if isinstance(coder, Fitted):
        _write_chunks(Path(path), cache, coder, more)
        return
    tensors: dict[str, Any] = {}
    tree = describe_cache(cache, tensors)
    form = STRIDED if cache.strides else FORMAT if coder is None else CODED
    metadata = _metadata(cache, tree) | {"format": str(form)} | more
    write = write_parts if is_shared(tensors) else write_arrays
    write(Path(path), tensors, metadata, coder)


def _write_chunks(path: Path, cache: Cache, coder: Fitted, more: dict[str, str]) -> None:
    """Write a cache whose keys and values are chunks of a fitted coder."""
    tree, tensors, chunks = coded_parts(cache, coder)
    if is_shared(cache):
        raise InputError(
            "a fitted coder takes the cache of one process, and several hold this one: give coder='range'"
        )
    found = {f"{_CHUNK}{i}": np.frombuffer(chunk, np.uint8) for i, chunk in enumerate(chunks)}
    more = {"format": str(CHUNKED), "coder": coder.digest, "chunks": str(len(found)), **more}
    write_arrays(path, tensors | found, _metadata(cache, tree) | more)


def _metadata(cache: Cache, tree: Any) -> dict[str, str]:
    """Build the header of a file, without its format."""
    return {
        "kind": KIND,
        "kvjax": kvjax.__version__,
        "model": cache.model,
        "method": json.dumps(None if cache.method is None else saved_spec(cache.method)),
        "fitted": json.dumps(_digests(cache.method)),
        "tree": json.dumps(tree),
    }


def load_cache(
    path: str | os.PathLike[str],
    model: Model | None = None,
    *,
    methods: Own | Sequence[Own] = (),
    coder: Fitted | None = None,
) -> Cache:
    """Read a cache that `save_cache` wrote.

    Its tree structure equals the saved one, so programs compiled for that one run on it.

    Args:
        path: of the file.
        model: if given, the cache is placed on the model's mesh, whatever mesh it was saved from: every host
            reads what its devices hold. Else it is placed on the default device.
        methods: the Python file or the function of the user's own method that filled the cache, or several of
            them. The file that the cache names is not imported by itself.
        coder: the fitted coder with which the cache was saved, if it was.

    Returns:
        The cache, ready for `kvjax.prefill`, `step` and `generate`.

    Raises:
        InputError: if the file is missing, truncated, damaged, not a cache or from another version, if its
            method cannot be built or now stores its codes in another way, or if `coder` is not its coder.

    >>> import kvjax, tempfile
    >>> _, cache = kvjax.prefill(kvjax.load("recall-tiny"), [[1, 2, 3]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_cache(f"{folder}/three.cache", cache)
    ...     load_cache(f"{folder}/three.cache").next.tolist()
    [3]
    """
    head = read_cache_header(path)
    if head.coder != ("" if coder is None else coder.digest):
        was = f"with the coder {head.coder}" if head.coder else "without a fitted coder"
        raise InputError(
            f"{path} was saved {was}, got {coder!r:.60}: give coder= as it was given to save_cache"
        )
    if coder is not None and model is not None:
        check_model(coder, model)
    with damage(path):
        method = _method(path, head, methods)
        saved = restore_tree(head.tree, method, head.model)
        file = SavedArrays(Path(path), head.parts)
        arrays: Readable = file
        if coder is not None:
            names = (f"{_CHUNK}{i}" for i in range(head.chunks))
            arrays = filled(saved, file, coder, (file.whole(name).tobytes() for name in names))
        return _read(arrays, saved, None if model is None else model.on_mesh)


def _method(path: str | os.PathLike[str], head: CacheFile, methods: Own | Sequence[Own]) -> Method | None:
    """Build the method that filled a cache, by its header and the user's methods."""
    given = [methods] if isinstance(methods, str | os.PathLike) or callable(methods) else [*methods]
    try:
        with only_given(given):
            method = None if head.spec is None else from_spec(head.spec, partial(from_given, given))
    except ValueError as error:
        raise InputError(f"{path} was filled by a method that cannot be built: {error}") from error
    if _digests(method) != head.fitted:
        raise InputError(
            f"{path} was filled with other fitted arrays ({', '.join(head.fitted)}) than the file of its "
            f"method holds now ({', '.join(_digests(method))}): give back that file, or prefill again"
        )
    return method


def _read(arrays: Readable, saved: Cache, on: OnMesh | None) -> Cache:
    """Read the arrays that `saved` describes, to a mesh or to the default device."""
    if on is None:
        return jax.tree.map(lambda x: x.read(arrays, None), saved)
    if (there := mesh_for(saved.method or Method(), on)) is None:
        return _read(arrays, saved, None)
    where = map_axes(lambda axes, x: there.sharding(axes, x.shape), saved, there)
    read = jax.tree.map(lambda x, at: x.read(arrays, at), saved, where)
    return dataclasses.replace(read, on_mesh=there)


def read_cache_header(path: str | os.PathLike[str]) -> CacheFile:
    """Read the header of a saved cache, without reading any array or building its method.

    Raises InputError if the file is missing, truncated, no cache, or of a newer kvjax.
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
    with damage(path):
        if int(metadata["format"]) > STRIDED:
            raise InputError(
                f"{path} has cache format {metadata['format']} (written by kvjax {metadata['kvjax']}), "
                f"expected at most {STRIDED}, which kvjax {kvjax.__version__} reads: update kvjax"
            )
        if int(metadata["format"]) < FORMAT:
            raise InputError(
                f"{path} has cache format {metadata['format']} (written by kvjax {metadata['kvjax']}), which "
                f"an older kvjax wrote in another layout, expected format {FORMAT}: prefill again"
            )
        check_seal(path, metadata)
        spec = as_tuples(json.loads(metadata["method"]))
        tree, fitted = json.loads(metadata["tree"]), json.loads(metadata["fitted"])
        if not isinstance(tree, dict) or not isinstance(spec, tuple | None) or spec == ():
            raise TypeError("tree or method is none")
        if not isinstance(fitted, list) or not all(isinstance(one, str) for one in fitted):
            raise TypeError("fitted names no digests")
        parts = check_parts(path, json.loads(metadata.get("parts", "[]")))
        more = metadata.get("chat", ""), metadata.get("coder", ""), int(metadata.get("chunks", 0))
        return CacheFile(metadata["kvjax"], metadata["model"], spec, tree, fitted, parts, *more)


# --- the method --------------------------------------------------------------------------------------


def _digests(method: Any) -> list[str]:
    return sorted({word.fitted.digest for word in fitted_words(method) if word.fitted is not None})


def as_tuples(x: Any) -> Any:
    """JSON's lists converted back to tuples."""
    return tuple(as_tuples(y) for y in x) if isinstance(x, list) else x


@contextlib.contextmanager
def damage(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of a damaged header or tensors into one line."""
    try:
        yield
    except InputError:
        raise
    except SafetensorError as error:
        raise InputError(f"{path} is damaged ({error}), expected what kvjax.save_cache wrote") from error
    except RecursionError as error:
        raise InputError(f"{path} nests its header too deeply to be what kvjax.save_cache wrote") from error
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, MemoryError, OSError) as error:
        raise InputError(
            f"{path} is damaged ({type(error).__name__}: {str(error)[:200]}), expected what kvjax.save_cache "
            "wrote: save it again"
        ) from error

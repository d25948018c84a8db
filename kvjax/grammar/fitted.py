"""Fitted arrays: what a word of a method has been fitted to in one model, layer by layer."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from kvjax.base.atomic_files import check_kind, in_short, write_atomic
from kvjax.base.errors import InputError
from kvjax.base.kind import Kind
from kvjax.grammar.keys import key_of
from kvjax.state.codes import Encoding

KIND = "kvjax fitted arrays"
# Arrays shipped with kvjax, one folder per model, by the method that they are for.
SHIPPED = Path(__file__).parents[1] / "fits"


@dataclasses.dataclass(frozen=True, eq=False)
class Fitted:
    """Arrays [layers, ...] by name, for one word and one model; equal if every bit is equal.

    Args:
        arrays: [layers, ...] by name; a single row applies to all layers.
        word: the name of the class that they are for.
        model: the signature of the model; "" is any.
        file: the user's file that they are from.
        settings: the fields of the word, as text, on which the meaning of the arrays depends;
            none in files of earlier versions.

    >>> Fitted({"bias": np.zeros((1, 2))}, "Gate", "") == Fitted({"bias": np.zeros((1, 2))}, "Gate", "")
    True
    """

    arrays: Mapping[str, Shaped[np.ndarray, "L *_"]]
    word: str
    model: str
    file: str = ""
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    digest: str = dataclasses.field(init=False)

    def __post_init__(self):
        found = hashlib.sha256(f"{self.word} {self.model}".encode())
        for name, x in sorted(self.arrays.items()):
            found.update(f"{name} {x.dtype} {x.shape}".encode() + np.ascontiguousarray(x).tobytes())
        if self.settings:
            found.update(json.dumps(dict(self.settings), sort_keys=True).encode())
        object.__setattr__(self, "digest", found.hexdigest()[:16])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fitted) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Fitted({self.digest!r})"


class FittedWord(Kind):
    """The base class of words with arrays that are fitted to a model, layer by layer.

    `fitted`: the arrays; None before they are fitted. `by`: the method by whose name `kvjax fit` fits them.
    `fit_first`: whether the word cannot run without them. `of_kv_heads`: whether they are of KV heads, so
    that they say nothing about query heads.

    >>> import kvjax
    >>> sorted({word.by for word in fitted_words(kvjax.method("kvzap"))})
    ['kvzap']
    """

    fitted: Fitted | None
    by: str
    fit_first: bool = True
    of_kv_heads: bool = False

    @abstractmethod
    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the arrays do not match a model of these sizes."""
        raise NotImplementedError


class FittedEncoding(FittedWord):
    """The base class of words that encode by arrays fitted to the keys, or to the values, of a model.

    `of`: of which of both; a method may have a word for each, which share their arrays.
    """

    of: Literal["key", "value"]


def fitted_words(word: Any) -> Iterator[FittedWord]:
    """Return every word of a method that can be fitted to a model."""
    if dataclasses.is_dataclass(word) and not isinstance(word, type):
        if isinstance(word, FittedWord):
            yield word
        for field in dataclasses.fields(word):
            yield from fitted_words(getattr(word, field.name))
        # A score names its observations and traces in these properties.
        for name in ("needs", "traces"):
            for part in sorted(getattr(word, name, ()), key=key_of):
                yield from fitted_words(part)
    elif isinstance(word, tuple):
        for part in word:
            yield from fitted_words(part)


def learns(word: Any) -> frozenset[Any]:
    """Return the observations of a row's own prompts that a codec, or a tuple of codecs, needs."""
    found = word.learns if isinstance(word, Encoding) else frozenset()
    if isinstance(word, tuple):
        return found.union(*map(learns, word))
    if dataclasses.is_dataclass(word):
        return found.union(*(learns(getattr(word, f.name)) for f in dataclasses.fields(word)))
    return found


def sees_below(word: Any) -> bool:
    """Whether a codec, or one of a tuple, uses the layer below."""
    if isinstance(word, tuple):
        return any(map(sees_below, word))
    if isinstance(word, Encoding) and word.sees_below:
        return True
    fields = dataclasses.fields(word) if dataclasses.is_dataclass(word) else ()
    return any(sees_below(getattr(word, f.name)) for f in fields)


def lacks_fit(word: FittedWord) -> bool:
    """Whether a word lacks fitted arrays without which it cannot run."""
    return word.fitted is None and word.fit_first


def is_fitted(method: Any) -> bool:
    """Whether every word of a method that needs fitted arrays has them."""
    return not any(lacks_fit(word) for word in fitted_words(method))


def spelled(spec: tuple[Any, ...], id: str) -> str:
    """Write a method with its hyper-parameters as text, in the form that commands read.

    spec: as of `kvjax.grammar.Method`.

    >>> spelled(("gisting", (("tokens", 16),)), "gisting")
    'gisting:tokens=16'
    """
    match spec:
        case (str(), ("chain", *parts)):
            return next((found for part in parts if (found := spelled(part, id)) != id), id)
        case (str() as name, tuple() as hyper) if name == id:
            given = ",".join(f"{name}={value}" for name, value in hyper if value is not None)
            return shlex.quote(f"{id}:{given}") if given else id
    return id


class ModelSizes(NamedTuple):
    """The sizes that the arrays of a word must match; heads are query heads, head_dim their channels."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> ModelSizes:
        """Read the sizes from a model's config."""
        return cls(config.layers, config.d_model, config.heads, config.kv_heads, config.head_dim)


def check_sizes(word: Any, called: str, axes: str, name: str, sizes: tuple[int, ...]) -> None:
    """Raise InputError if the first axes of a word's array `name` do not have these sizes."""
    arrays = word.fitted.arrays
    found = arrays[name].shape[: len(sizes)] if name in arrays else ()
    if found != sizes:
        raise InputError(
            f"it was fitted to another model: the ({axes}) of its {called} are {found}, this model's "
            f"are {sizes}: run `kvjax fit {word.by}` on this model"
        )


def with_fitted(params: dict[str, Any], *methods: Any) -> dict[str, Any]:
    """Add the fitted arrays of the methods' words to a model's parameters, by digest."""
    found: dict[str, dict[str, Array]] = {}
    for method in methods:
        found |= {} if method is None else _arrays(method)
    return params | {"fitted": found} if found else params


@lru_cache(maxsize=256)
def _arrays(method: Any) -> dict[str, dict[str, Array]]:
    """Move fitted arrays to the device once per method, because a step needs them at every token."""
    # A make has used its arrays before any program runs.
    acting = dataclasses.replace(method, make=None)
    words = [word.fitted for word in fitted_words(acting) if word.fitted is not None]
    with jax.ensure_compile_time_eval():  # otherwise a program being traced would leave its tracers here
        return {fitted.digest: {n: jnp.asarray(x) for n, x in fitted.arrays.items()} for fitted in words}


def of_layer(params: dict[str, Any], number: int | np.integer | Array) -> dict[str, dict[str, Array]]:
    """Return the fitted arrays of one layer, by digest and name."""
    return jax.tree.map(lambda x: x[number if x.shape[0] > 1 else 0], params.get("fitted", {}))


def save_fitted(path: str | Path, fitted: Fitted) -> None:
    """Write fitted arrays to a safetensors file, atomically.

    Args:
        path: of the file; an older one of fitted arrays is replaced.
        fitted: what `kvjax.fit` gave.

    Raises:
        InputError: if `path` holds something else or cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_fitted(f"{folder}/gate.safetensors", as_fitted("recall-tiny/locret"))
    ...     load_fitted(f"{folder}/gate.safetensors").word
    'RetainingHead'
    """
    check_kind(path, KIND)
    metadata = {"kind": KIND, "word": fitted.word, "model": fitted.model}
    metadata |= {"settings": json.dumps(dict(fitted.settings))} if fitted.settings else {}
    arrays = {name: np.ascontiguousarray(x) for name, x in fitted.arrays.items()}
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, save(arrays, metadata))
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}): choose another path") from error


def load_fitted(path: str | Path) -> Fitted:
    """Read fitted arrays that `save_fitted` or `kvjax fit` wrote.

    Args:
        path: of the file.

    Returns:
        The arrays, for a method's `fitted=`.

    Raises:
        InputError: if the file is missing, damaged or something else, or holds NaN.

    >>> load_fitted(SHIPPED / "recall-tiny" / "locret.safetensors").word
    'RetainingHead'
    """
    if not Path(path).is_file():
        raise InputError(f"{path} does not exist, expected what `kvjax fit --out {path}` writes: run that")
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, TypeError) as error:
        raise InputError(f"{path} is damaged ({in_short(error)}): write it again with `kvjax fit`") from error
    if metadata.get("kind") != KIND or not {"word", "model"} <= metadata.keys() or not arrays:
        raise InputError(f"{path} holds no fitted arrays, expected what `kvjax fit` writes: check the path")
    for name, x in arrays.items():
        if x.dtype.kind in "fV" and np.isnan(x.astype(np.float32)).any():
            raise InputError(f"{path}: its array {name} holds values that are no numbers: fit again")
    try:
        settings = {str(name): str(text) for name, text in json.loads(metadata.get("settings", "{}")).items()}
    except (ValueError, AttributeError) as error:
        raise InputError(f"{path} is damaged (its settings): write it again with `kvjax fit`") from error
    return Fitted(arrays, metadata["word"], metadata["model"], str(path), settings)


def as_fitted(given: str | Fitted | None) -> Fitted | None:
    """Read what a method's hyper-parameter `fitted` names.

    Args:
        given: arrays, a file that holds them, or a name such as "recall-tiny/locret" of arrays shipped with
            kvjax (a file of that name takes precedence).

    Returns:
        The arrays; None for None.

    Raises:
        InputError: if there is no such file, or it holds something else.

    >>> as_fitted("recall-tiny/locret").word
    'RetainingHead'
    """
    if not isinstance(given, str):
        return given
    shipped = SHIPPED / f"{given}.safetensors"
    return _shipped(shipped) if not Path(given).exists() and shipped.is_file() else load_fitted(given)


@cache
def _shipped(path: Path) -> Fitted:
    """Shipped arrays are stored in half precision to be small, and used in the precision of the fit."""
    found = load_fitted(path)
    whole = {n: x.astype(np.float32) if x.dtype == np.float16 else x for n, x in found.arrays.items()}
    return Fitted(whole, found.word, found.model, settings=found.settings)


@cache
def shipped_for(signature: str) -> dict[str, str]:
    """Return the names of arrays shipped for models with this signature, by the methods that they are for."""
    found = {file.stem: f"{file.parent.name}/{file.stem}" for file in sorted(SHIPPED.glob("*/*.safetensors"))}
    return {by: name for by, name in found.items() if _model_of(SHIPPED / f"{name}.safetensors") == signature}


def _model_of(path: Path) -> str:
    with safe_open(path, framework="np") as file:
        return (file.metadata() or {})["model"]

"""Checks of arguments in public functions: whole numbers, token ids, lengths, keys.

Each check says in one sentence what was given, what was expected and what to do. What depends on more than
the sizes of a model or a cache is checked elsewhere.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax.base.errors import InputError


def whole_number(name: str, value: Any, least: int, what: str, most: int = 2**31 - 1) -> int:
    """`value` as an int in [least, most]; `what` says what it counts.

    >>> whole_number("room", np.int64(8), 0, "tokens")
    8
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise InputError(
            f"{name} is {value!r}, expected a whole number: how many {what}, for example "
            f"{name}={max(least, 1)}"
        )
    if not least <= value <= most:
        bound = f"at least {least}" if value < least else f"at most {most}"
        raise InputError(f"{name} is {value}, expected {bound}: how many {what}")
    return int(value)


def is_whole(value: Any, least: int = 1, most: int | None = None) -> bool:
    """Whether a value is a whole number in [least, most], and neither a bool nor a float such as 2.0.

    >>> is_whole(8), is_whole(np.int64(8)), is_whole(0), is_whole(True), is_whole(2.0), is_whole(9, 1, 8)
    (True, True, False, False, False, False)
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        return False
    return least <= int(value) and (most is None or int(value) <= most)


def finite_number(name: str, value: Any, low: float, high: float = math.inf, open_low: bool = False) -> None:
    """InputError unless `value` is a finite number in [low, high], or in (low, high] where `open_low`."""
    number = isinstance(value, float | int | np.floating | np.integer) and not isinstance(value, bool)
    if not (
        number and math.isfinite(value) and (low < value if open_low else low <= value) and value <= high
    ):
        left = f"> {low:g}" if open_low else f">= {low:g}"
        right = "" if high == math.inf else f" and <= {high:g}"
        raise InputError(f"{name} is {value!r}, expected a finite number {left}{right}")


def check_text(text: Any, what: str = "the text") -> None:
    r"""Raise InputError unless `text` is a string of whole characters, which UTF-8 can write.

    >>> check_text("a\ud800")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    kvjax.InputError: the text has half a character (\ud800) at 1, expected Unicode: ...
    """
    if not isinstance(text, str):
        raise InputError(f"{what} is {_short(text)}, expected a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start]).strip("'")
        raise InputError(
            f"{what} has half a character ({half}) at {error.start}, expected Unicode: decode it again from "
            'its bytes, or with errors="replace"'
        ) from None


# --- token ids ---------------------------------------------------------------------------------------


def is_rows(tokens: Any) -> bool:
    """Whether tokens are a list of rows of their own lengths, rather than an array."""
    return (
        isinstance(tokens, list | tuple)
        and len(tokens) > 0
        and (isinstance(tokens[0], list | tuple) or getattr(tokens[0], "ndim", 0) == 1)
    )


def ragged_rows(tokens: Any) -> list[np.ndarray]:
    """Return the rows of a list of lists or of one-dimensional arrays, each as integers."""
    rows = []
    for i, given in enumerate(tokens):
        row = _array(given)
        if row is None or row.ndim != 1:
            raise InputError(f"row {i} of the tokens is {_short(given)}, expected a list of token ids")
        _check_integers(f"row {i} of the tokens", row, given)
        rows.append(row.astype(np.int64))
    return rows


def id_array(name: str, given: Any) -> np.ndarray:
    """`given` as an array of integers on the host, without rounding."""
    array = _array(given)
    if array is None:
        raise InputError(
            f"{name} is {_short(given)}, expected whole numbers in rows of one length: pad rows to an "
            "array [B, T]"
        )
    _check_integers(name, array, given)
    return array


def check_in_vocabulary(ids: np.ndarray, vocab: int) -> None:
    """Raise InputError if an id is outside [0, vocab)."""
    # Two reductions are cheaper than a mask, and every step of a host loop runs this.
    if ids.size and (ids.min() < 0 or ids.max() >= vocab):
        wrong = ids[(ids < 0) | (ids >= vocab)][0]
        raise InputError(
            f"token id {wrong} is outside the vocabulary [0, {vocab}): "
            "were the tokens made with this model's tokenizer?"
        )


def whole_text(tokens: Any, vocab: int, positions: int | float) -> Any:
    """Token ids [B, T] for a call without a cache, as int32; tracers are checked for dtype and shape alone.

    InputError for ids that are not whole numbers or outside the vocabulary, and for too long texts.
    """
    # Arrays that are partly on other hosts cannot be read here.
    held = isinstance(tokens, jax.Array) and (isinstance(tokens, Tracer) or not tokens.is_fully_addressable)
    ids: Any = tokens if held else id_array("tokens", tokens)
    _check_integers("tokens", ids, tokens)
    if ids.ndim != 2:
        raise InputError(
            f"tokens have shape {list(ids.shape)}, expected [B, T]: wrap a single text as [[...]]"
        )
    if ids.shape[1] > positions:
        raise InputError(
            f"the text has {ids.shape[1]} tokens, this model's last position is {positions}: shorten the "
            "text, or use a model with a longer context"
        )
    if not held:
        check_in_vocabulary(ids, vocab)
    return jnp.asarray(tokens if isinstance(tokens, jax.Array) else ids, jnp.int32)


def one_token(token: Any, rows: int, vocab: int) -> Any:
    """One token id per row: arrays on a device unchanged, anything else as int32 on the host.

    The ids are checked on the host only: reading ids from a device would make every step wait.
    """
    device = isinstance(token, jax.Array)
    ids: Any = token if device else id_array("token", token)
    if ids.shape != (rows,):
        raise InputError(f"token must be [B] = [{rows}], one id per row, got {list(ids.shape)}")
    if ids.dtype.kind not in "iu":
        _check_integers("token", ids, token)
    if device:
        return ids
    check_in_vocabulary(ids, vocab)
    return ids.astype(np.int32)


def stop_ids(stop: Any) -> list[int]:
    """Return the ids that end a row, from a list of them."""
    ids = _array(stop)
    if ids is None or ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        hint = f"stop=[{stop}]" if isinstance(stop, int | np.integer) else "stop=[2]"
        raise InputError(f"stop is {_short(stop)}, expected a list of token ids: write {hint}")
    if ids.size and not (-(2**31) <= ids.min() and ids.max() < 2**31):
        raise InputError(f"stop is {_short(stop)}, expected ids of the vocabulary: ask its tokenizer")
    return ids.tolist()


def callables(name: str, given: Any) -> tuple[Any, ...]:
    """Check that an option is a list of functions, and return them as a tuple."""
    found = tuple(given) if isinstance(given, list | tuple) else (None,)
    if not all(map(callable, found)):
        raise InputError(f"{name} is {_short(given)}, expected a list of functions: write {name}=[first]")
    return found


def listed(**options: Any) -> None:
    """Raise InputError for an option that is a single text or number instead of a list or None."""
    for name, given in options.items():
        if given is not None and (isinstance(given, str | bytes) or not hasattr(given, "__iter__")):
            raise InputError(f"{name} is {given!r}, expected a list: write {name}=[{given!r}]")


def prng_key(key: Any) -> Any:
    """One PRNG key, new style or old."""
    new = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    old = isinstance(key, jax.Array | np.ndarray) and key.dtype == np.uint32
    if not (new and key.ndim == 0 or old and key.ndim == 1):
        what = f"{len(key)} keys" if new else repr(key)
        hint = f"jax.random.key({key})" if isinstance(key, int) else "jax.random.key(0)"
        raise InputError(f"key is {what}, expected one PRNG key: write key={hint}")
    return key


def _array(given: Any) -> np.ndarray | None:
    """`given` as an array; None if numpy cannot convert it, such as rows of several lengths."""
    try:
        return np.asarray(given)
    except (ValueError, TypeError, OverflowError):
        return None


def _check_integers(name: str, array: Any, given: Any) -> None:
    if array.size and array.dtype.kind not in "iu":
        kind, todo = "(token ids)", "encode text with the model's tokenizer, and round no ids"
        if name == "lengths":
            kind, todo = "(tokens per row)", "count every row's tokens without its padding"
        if (long := _beyond(given)) is not None:
            raise InputError(f"{name} must be integers {kind} of 64 bits, got {_short(long)}: {todo}")
        raise InputError(f"{name} must be integers {kind}, got {_short(given)} of {array.dtype}: {todo}")


def _beyond(given: Any) -> int | None:
    """Return the first whole number of nested lists that 64 bits cannot hold."""
    if isinstance(given, list | tuple):
        return next((found for one in given if (found := _beyond(one)) is not None), None)
    return given if isinstance(given, int) and not -(2**63) <= given < 2**63 else None


def _short(given: Any) -> str:
    text = repr(given).replace("\n", " ")
    return text if len(text) <= 60 else f"{text[:57]}..."

"""Coders of files and streams, fitted to a model's keys and values of a few texts (KVTC, CacheGen)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from kvjax.base.checks import finite_number, whole_number
from kvjax.base.errors import InputError
from kvjax.fitting.loops.keys_values import KeysAndValues, read_keys_values
from kvjax.fitting.statistics.levels import only_slots
from kvjax.grammar.fitted import Fitted
from kvjax.io import frequency_coder, transform_coder
from kvjax.io.frequency_coder import symbols
from kvjax.io.transform_coder import BITS, GROUPS, UNIT, allotted, dequantised, quantised, rows_of, turned
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.model import Model, check_single

# Tokens on which bits are tried.
TRIED = 256
# CacheGen's whole numbers in the lower layers and in the others, by quality; of keys the lower 10 of 32
# layers, of values the lower 2 of 32.
LEVELS, LOWER = ((15, 7), (7, 3), (3, 1)), {"key": 10 / 32, "value": 2 / 32}


def fit_coder(
    model: Model,
    texts: Sequence[Sequence[int]],
    kind: str = "kvtc",
    *,
    ratio: float | int = 8.0,
    sinks: int = 4,
    newest: int = 128,
    batch: int = 4,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit a lossy coder of a model's caches, for files and streams.

    "kvtc" (arXiv:2511.01815): principal components of all layers, each in bits found by dynamic programming.
    "cachegen" (arXiv:2310.07240): whole numbers in several qualities, coded by their frequencies here.

    Args:
        model: whose layers are all plain attention with slots of their own.
        texts: rows of token ids.
        kind: "kvtc" or "cachegen".
        ratio: of "kvtc": how many times fewer bits than 16 a coded number takes, before entropy coding.
        sinks: of "kvtc": how many first tokens stay as they are.
        newest: of "kvtc": how many of the newest tokens stay as they are.
        batch: texts that are read together.
        progress: wraps the loop over batches.

    Returns:
        The coder, for `save_cache(..., coder=)`, `load_cache`, `send_cache` and `receive_cache`, which
        `save_fitted` writes.

    Raises:
        InputError: for another model or kind, texts of fewer tokens than 16, and a ratio or counts that do
            not exist.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> coder = kvjax.fit_coder(model, [list(range(3, 90))], ratio=4)
    >>> coder.word, coder.arrays["sizes"].tolist()
    ('TransformCoder', [[4, 2, 32]])
    """
    check_single(model, "a coder is fitted to one decoder's layers")
    model = model.in_runs()
    only_slots(model, "coders")
    if kind not in ("kvtc", "cachegen"):
        raise InputError(f"kind is {kind!r}, expected 'kvtc' or 'cachegen'")
    finite_number("ratio", ratio, 1.0)
    for name, count in (("sinks", sinks), ("newest", newest)):
        whole_number(name, count, 0, "tokens that stay as they are")
    rows = [list(row) for row in texts if len(row)]
    if sum(map(len, rows)) < UNIT:
        raise InputError(f"the texts have {sum(map(len, rows))} tokens, expected at least {UNIT}: give more")
    batches = [rows[i : i + batch] for i in range(0, len(rows), batch)]
    read = read_keys_values(model, batches, progress)
    layers, heads, _, width = read.k.shape
    sizes = {"sizes": np.array([[layers, heads, width]])}
    if kind == "cachegen":
        return Fitted(_frequencies(read) | sizes, frequency_coder.WORD, model.signature)
    turns = _turns(model)
    known = {"turns": turns, "whole": np.array([[sinks, newest]])} | sizes
    each = np.split(read.k, np.cumsum([len(row) for row in rows])[:-1], 2)
    keys = np.concatenate([turned(x, turns, 0, -1) for x in each], 2)
    for of, x in (("key", keys), ("value", read.v)):
        mean, basis, groups = components(rows_of(x).astype(np.float64), ratio)
        known |= {f"{of} mean": mean[None], f"{of} basis": basis[None], f"{of} groups": groups[None]}
    return Fitted(known, transform_coder.WORD, model.signature)


def components(
    rows: Float[np.ndarray, "T W"], ratio: float | int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the mean of rows, their main components as columns, and (size, bits) of groups of these."""
    mean = rows.mean(0)
    left = rows - mean
    _, size, vectors = np.linalg.svd(left, full_matrices=False)
    count = min(len(size), rows.shape[1]) // UNIT * UNIT
    if not count:
        raise InputError(
            f"rows of {rows.shape[1]} channels in {len(rows)} tokens have fewer than {UNIT} main components: "
            "give more texts, or use coder='range'"
        )
    basis = vectors[:count].T
    y = (left @ basis).astype(np.float32)
    tried = y[np.linspace(0, len(y) - 1, min(TRIED, len(y))).astype(int)]
    units = tried.reshape(len(tried), -1, UNIT)
    errors = {(n, b): _errors(tried, n, b) for n in GROUPS if n * UNIT <= count for b in BITS}
    found = allotted(errors, np.square(units).sum((0, 2)), int(rows.shape[1] / ratio))
    groups = np.array([(size * UNIT, bits) for size, bits in found])
    return mean.astype(np.float32), basis.astype(np.float32), groups


def _errors(y: Float[np.ndarray, "T R"], size: int, bits: int) -> Float[np.ndarray, "n"]:
    """Compute the squared error of a group of `size` units that begins at each unit."""
    out = []
    for at in range(0, y.shape[1] - size * UNIT + 1, UNIT):
        part = y[:, at : at + size * UNIT]
        out.append(np.square(dequantised(*quantised(part, bits)) - part).sum())
    return np.array(out)


def _turns(model: Model) -> Float[np.ndarray, "L h"]:
    """Compute the angle of every pair of channels per position, for each layer."""
    config, found = model.config, []
    for layer in range(config.layers):
        rope = mixer_of(config, layer).rope(config, layer)
        if rope.by_length or rope.start or rope.copies > 1:
            raise InputError(
                f"layer {layer} rotates keys by {rope!r}, expected frequencies that do not depend on a text: "
                "use kind='cachegen'"
            )
        found.append(np.asarray(rope.frequencies(config.head_dim), np.float64))
    if len({len(x) for x in found}) > 1:
        raise InputError("layers rotate different numbers of channels, expected one: use kind='cachegen'")
    return np.stack(found)


def _frequencies(read: KeysAndValues) -> dict[str, np.ndarray]:
    """How often every symbol occurs in each layer, quality and channel."""
    out: dict[str, np.ndarray] = {}
    for of, x in (("key", read.k), ("value", read.v)):
        layers, heads, _, width = x.shape
        lower = round(LOWER[of] * layers) or 1
        most = np.array([[high if i < lower else low for high, low in LEVELS] for i in range(layers)])
        counts = np.zeros((layers, len(LEVELS), heads * width, 2 * most.max() + 1), np.int32)
        for i, q in np.ndindex(layers, len(LEVELS)):
            _, lines = symbols(x[i], int(most[i, q]))
            for c, line in enumerate(lines):
                counts[i, q, c] = np.bincount(line, minlength=counts.shape[-1])
        out |= {f"{of} most": most, f"{of} counts": counts}
    return out

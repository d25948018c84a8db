"""Calls of words: their results have the right shapes, which is checked while tracing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Array, Float, Int

if TYPE_CHECKING:
    from kvjax.grammar import Keep
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import CarryingMerge, Hiding, Preferring, SlotObservation, View


def shaped(word: Any, what: str, got: Any, axes: str, sizes: tuple[int, ...], dtype: Any = None) -> Any:
    """Check `got`, a word's result, while tracing, and return it; ValueError for another shape or type.

    Arrays of other shapes could broadcast, so that one slot would get the result of another.
    """
    kind = "" if dtype is None else f" {np.dtype(dtype).name}"
    shape, own = getattr(got, "shape", None), getattr(got, "dtype", None)
    if shape != sizes or (dtype is not None and own != dtype):
        found = type(got).__name__ if shape is None else f"{own} of shape {list(shape)}"
        raise ValueError(f"{word!r} gave {what}: {found}, expected{kind} {axes} = {list(sizes)}")
    return got


def scored(score: Any, view: View, seen: Any) -> Any:
    """Compute the scores of a view's slots."""
    return shaped(score, "scores", score(view, seen), "[B, K, S]", view.pos.shape)


def protected(pattern: Any, pos: Any, length: Any, n: Any) -> Any:
    """Which slots a pattern protects."""
    return shaped(pattern, "a mask", pattern(pos, length, n), "[B, K, S]", pos.shape, np.bool_)


def spared(view: View, seen: Any) -> Any:
    """Find the slots [B, K, S] of a view that some pattern of the keep protects."""
    masks = [protected(pattern, view.pos, seen.length, seen.n) for pattern in seen.protect]
    return reduce(or_, masks, np.zeros(view.pos.shape, bool)) & (view.pos >= 0)


def written(merge: Any) -> tuple[str, ...]:
    """Name what a merge changes in the slots that stay; empty without a merge."""
    return () if merge is None else merge.writes


def merges_unrotated(keep: Any) -> bool:
    """Whether a keep's merge takes keys before rotation, as they are stored, not rotated for queries."""
    return keep is not None and keep.merge is not None and keep.merge.unrotated


def merged(
    merge: Any, view: View, kept: Any, leaving: Any, seen: Any, carried: dict[str, Any]
) -> tuple[View, dict[str, Any]]:
    """Merge a view; return it with unchanged shapes, and what rows carry for the merge, by its key."""
    rows = {}
    if isinstance(merge, CarryingMerge):
        rows = {key_of(merge): merge.carry(carried[key_of(merge)], view, kept, leaving, seen)}
        seen = seen._replace(observed=seen.observed | rows)
    new = merge(view, kept, leaving, seen)
    for name, axes in (
        ("k", "[B, K, S, H]"),
        ("v", "[B, K, S, V]"),
        ("pos", "[B, K, S]"),
        ("bias", "[B, K, S]"),
    ):
        old = getattr(view, name)
        if old is not None:
            shaped(merge, f"a view's {name}", getattr(new, name, None), axes, old.shape)
    return new, rows


def met(
    word: SlotObservation, q: Any, q_pos: Any, k: Any, pos: Any, layer: int | Int[Array, ""]
) -> Float[Array, "B K S"]:
    """Compute the numbers slots get from new queries (`SlotObservation`); layer: its index in the stack."""
    return word.of(q, q_pos, k, pos, **({"layer": layer} if word.by_layer else {}))


def observations(keep: Keep, in_steps: bool = False) -> list[Any]:
    """Collect the observations that the words of a keep and its score's traces need, sorted by name.

    in_steps: those of a decode step, if another score ranks slots there.
    """
    score = keep.score.in_steps if in_steps and keep.score is not None else keep.score
    words: list[Any] = [word for word in (score, keep.merge, keep.allocate) if word is not None]
    words += [] if keep.score is None else [*keep.score.traces]
    return sorted({o for word in words for o in word.needs}, key=key_of)


def hiding_of(keep: Keep | None) -> Hiding | None:
    """Return the word that hides slots from later tokens where a keep selects; None if there is none."""
    words = [] if keep is None or keep.score is None else observations(keep)
    return next((o for o in words if isinstance(o, Hiding)), None)


def counts_slots(keep: Keep | None) -> bool:
    """Whether a threshold alone decides how many slots each KV head holds."""
    if keep is None or keep.allocate.threshold is None:
        return False
    return keep.allocate.uniform and keep.budget.ratio == 1


def restored(keep: Keep) -> int:
    """Return how many slots of learned tokens follow those of a prompt."""
    return 0 if keep.restore is None else keep.restore.tokens


def number_of(layer: int | float, layers: int) -> int:
    """Return the index of a layer that is given as an index, or as the share of the layers up to it."""
    return layer if isinstance(layer, int) else max(int(layer * layers), 1) - 1


def probes_of(word: Any) -> set[Any]:
    """Collect the probes that a word reads: its own field `probe`, and those of its parts."""
    found: set[Any] = set()
    for name, value in _fields(word).items():
        found |= {value} if name == "probe" else probes_of(value)
    return found


def with_probe(word: Any, probe: Any) -> Any:
    """Return the word with another probe, wherever it or one of its parts has one."""
    changed = {}
    for name, value in _fields(word).items():
        new = probe if name == "probe" and value is not None else with_probe(value, probe)
        changed |= {} if new is value else {name: new}
    return dataclasses.replace(word, **changed) if changed else word


def with_token_ids(word: Any, ids_of: Callable[[str], tuple[int, ...]]) -> Any:
    """Return the word with the ids of tokens that are given by characters (`kvjax.keep.scores.tokens`)."""
    if isinstance(word, tuple):
        new = tuple(with_token_ids(one, ids_of) for one in word)
        return word if all(a is b for a, b in zip(word, new, strict=True)) else type(word)(new)
    fields = _fields(word)
    changed: dict[str, Any] = {name: with_token_ids(x, ids_of) for name, x in fields.items()}
    changed = {name: x for name, x in changed.items() if x is not fields[name]}
    if "characters" in fields and fields["ids"] is None:
        changed["ids"] = ids_of(fields["characters"])
    return dataclasses.replace(word, **changed) if changed else word


def _fields(word: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(word) or isinstance(word, type):
        return {}
    return {f.name: getattr(word, f.name) for f in dataclasses.fields(word) if f.init}


def compares_once(keep: Keep) -> bool:
    """Whether a keep with a score compares slots with queries at the ends of prompts alone."""
    assert keep.score is not None
    when, later = keep.when, keep.score.looks_after_a_token
    in_steps = when.in_steps and not (when.at_once and not later)
    return not in_steps and not keep.score.traces and not isinstance(keep.allocate, Preferring)

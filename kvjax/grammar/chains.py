"""Chains: one method from several parts, and which parts cannot be joined."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

from kvjax.grammar.facts import clashes
from kvjax.grammar.fitted import fitted_words, lacks_fit, sees_below
from kvjax.grammar.model_kinds import Residence
from kvjax.grammar.phase import BY_POSITION
from kvjax.grammar.prompt_reads import PromptRead
from kvjax.grammar.read_kinds import Read
from kvjax.grammar.refuse_keep import refused
from kvjax.grammar.refuse_method import refused_parts
from kvjax.grammar.sentence import Budget, Keep, Method, Store
from kvjax.grammar.stages import in_stages
from kvjax.grammar.to_text import NAMELESS
from kvjax.state.codes import Thinning


def chain(*parts: Any, spec: tuple[Any, ...] | None = None) -> Method:
    """Join parts into one method, as `kvjax.chain` does, which also takes texts.

    parts: a `Method`, `Keep`, `Store`, `Read`, `PromptRead` or `Residence` each; ValueError for anything
    else.
    spec: how to build the method again, (id, hyper-parameters); by default joined from the parts' specs.
    """
    found: dict[str, Any] = {}
    owner: dict[str, str] = {}
    specs = []
    for part in parts:
        pieces = (
            {"keep": part} if isinstance(part, Keep) else {"store": part} if isinstance(part, Store) else None
        )
        if isinstance(part, Method):
            if part.layers:
                raise ValueError(
                    f"{part.id} has a method of its own for every layer, which no chain can add to: chain "
                    "the methods of its layers"
                )
            verbs = ("keep", "store", "read", "reread", "make", "stack", "host", "read_prompt")
            pieces = {n: getattr(part, n) for n in verbs if getattr(part, n) is not None}
            specs.append(part.spec)
        elif pieces is None:
            kinds = {"read": Read, "read_prompt": PromptRead, "host": Residence}
            pieces = {name: part for name, kind in kinds.items() if isinstance(part, kind)}
            if not pieces:
                raise ValueError(
                    f"{part!r:.80} is no method, keep, store, read or place: build it with kvjax.method"
                )
        for name, piece in pieces.items():
            if name in found:
                piece = _both(found[name], piece, name, f"{owner[name]} and {_called(part)}")
            found[name], owner[name] = piece, _called(part)
    method = Method(**found)
    if spec := spec or _joined(specs, len(parts)):
        method = method.called(spec)
    check(method)
    return method


def _both(a: Any, b: Any, name: str, owners: str) -> Keep | Store:
    """One keep or store that does what two of a chain do; ValueError if there is none."""
    one, why = None, "leave one out"
    if isinstance(a, Keep):
        one = _turned(a, b)
        if one is None:
            try:
                one = in_stages(a, b)
            except ValueError as error:
                why = str(error)
    elif isinstance(a, Store):
        one = _inside(a, b)
    if one is None:
        number = "two keeps only in turn" if isinstance(a, Keep) else f"at most one {name}"
        raise ValueError(f"a method has {number}; this chain has two, of {owners}: {why}")
    return one


def _turned(a: Keep, b: Keep) -> Keep | None:
    """One of two keeps with the phase of the other, if the other has nothing but a phase; else None."""
    for phase, keep in ((a.phase, b), (b.phase, a)):
        bare = Keep(None, Budget(1.0), keep.allocate, phase=phase)
        other = a if keep is b else b
        if keep.phase == BY_POSITION and dataclasses.replace(other, allocate=keep.allocate) == bare:
            return dataclasses.replace(keep, phase=phase)
    return None


def _inside(a: Store, b: Store) -> Store | None:
    """Find the store whose codecs encode what the other store's leave of a row; None if neither does.

    Codecs that leave numbers out (`QueryDrivenChannels`, `Pruned`) come first, in whatever order they are
    given.
    """
    for outer, inner in ((a, b), (b, a)):
        codecs = [codec for codec in (outer.keys, outer.values) if codec is not None]
        # Neither arrays fitted to all channels nor the layer below, which has all, are valid for a part.
        words = fitted_words((inner.keys, inner.values))
        whole = all(word.fitted is None and not lacks_fit(word) for word in words)
        whole = whole and not sees_below((inner.keys, inner.values))
        if whole and codecs and all(isinstance(codec, Thinning) for codec in codecs):
            keys, values = (
                x if y is None else y if x is None else x.around(y)  # type: ignore[attr-defined]
                for x, y in ((outer.keys, inner.keys), (outer.values, inner.values))
            )
            more = max(a.residual, b.residual), max(a.sinks, b.sinks), a.unrotated or b.unrotated
            return Store(keys, values, *more)
    return None


def _called(part: Any) -> str:
    return part.id if isinstance(part, Method) else type(part).__name__


def _joined(specs: list[tuple[Any, ...]], parts: int) -> tuple[Any, ...] | None:
    """Build the spec of a chain; None if one of its parts has no name."""
    if len(specs) < parts or any(spec[0] in NAMELESS for spec in specs):
        return None
    if len(specs) == 1:
        return specs[0]
    # A chain of chains equals the chain of their parts.
    each = [part for s in specs for part in (s[1][1:] if s[1][:1] == ("chain",) else [s])]
    return (" + ".join(s[0] for s in each), ("chain", *each))


@lru_cache(maxsize=1024)
def check(method: Method) -> None:
    """Raise ValueError for methods that cannot work, when they are built and not when they run."""
    for one in method.layers:
        check(one)
    problems = [
        *([] if method.keep is None else refused(method.keep)),
        *((True, clash.says(method)) for clash in clashes(method)),
        *refused_parts(method),
    ]
    for wrong, why in problems:
        if wrong:
            raise ValueError(f"{method.id} cannot work: {why}")

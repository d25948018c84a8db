"""What the words of a sentence promise each other, checked when it is built, and their shapes when traced."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.fitted import fitted_words
from kvjax.when import Full

if TYPE_CHECKING:
    from kvjax.grammar import Keep, Method
from kvjax.protocols import Answering, CarryingMerge, Judging, Preferring, View
from kvjax.read_protocols import Remembering, Resting, Reusing, Sampling

# When an observation exists: while many new tokens are read, or in the step of one token.
IN_PREFILL, IN_STEP = "prefill", "step"
# The longest prompt that is laid out when a sentence is checked.
_LONG = 2**20


def shaped(word: Any, what: str, got: Any, axes: str, sizes: tuple[int, ...], dtype: Any = None) -> Any:
    """`got`, a word's result, while it is traced; ValueError where it has another shape or type.

    Arrays of other shapes may broadcast, and then a slot would be judged by what another one holds.
    """
    kind = "" if dtype is None else f" {np.dtype(dtype).name}"
    shape, own = getattr(got, "shape", None), getattr(got, "dtype", None)
    if shape != sizes or (dtype is not None and own != dtype):
        found = type(got).__name__ if shape is None else f"{own} of shape {list(shape)}"
        raise ValueError(f"{word!r} gave {what}: {found}, expected{kind} {axes} = {list(sizes)}")
    return got


def scored(score: Any, view: View, seen: Any) -> Any:
    """The scores of a view's slots."""
    return shaped(score, "scores", score(view, seen), "[B, K, S]", view.pos.shape)


def protected(pattern: Any, pos: Any, length: Any, n: Any) -> Any:
    """Which slots a pattern protects."""
    return shaped(pattern, "a mask", pattern(pos, length, n), "[B, K, S]", pos.shape, np.bool_)


def written(merge: Any) -> tuple[str, ...]:
    """What a merge changes of the slots that stay; nothing where there is none."""
    return () if merge is None else getattr(merge, "writes", ("k", "v", "bias"))


def merged(
    merge: Any, view: View, kept: Any, leaving: Any, seen: Any, carried: dict[str, Any]
) -> tuple[View, dict[str, Any]]:
    """A view after a merge, of the same shapes as before, and what rows carry of it by its repr."""
    rows = {}
    if isinstance(merge, CarryingMerge):
        rows = {repr(merge): merge.carry(carried[repr(merge)], view, kept, leaving, seen)}
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


def observations(keep: Keep) -> list[Any]:
    """What the words of a keep and its score's traces observe, in the order of their names."""
    words = [word for word in (keep.score, keep.merge) if word is not None]
    words += [keep.allocate] if isinstance(keep.allocate, Preferring) else []
    words += [] if keep.score is None else keep.score.traces
    return sorted({o for word in words for o in word.needs}, key=repr)


def refused(keep: Keep) -> list[tuple[bool, str]]:
    """(wrong, why) for each way in which the words of a keep cannot work together."""
    if keep.score is None:
        return _narrowed(keep)
    whole = int(keep.budget.amount) if keep.budget.ratio is None else 0
    in_steps, threshold = keep.when.in_steps, hasattr(keep.allocate, "threshold")
    # So many tokens show all that patterns protect; of a budget beyond _LONG the prompt itself will.
    long = min(4 * whole + 4096, _LONG)
    full = crowded(keep, long, "a long prompt's tokens") if whole else ""
    masses = sorted((o for o in keep.score.needs if hasattr(o, "reduction")), key=repr)
    absent = [o for o in observations(keep) if IN_STEP not in getattr(o, "phases", (IN_PREFILL,))]
    probes = probes_of(keep.score)
    return [
        (bool(full), full),
        (
            isinstance(keep.when, Full) and not 0 < whole < keep.when.slots,
            f"{keep.when!r} evicts where a list holds so many slots, and the budget is "
            f"{keep.budget.amount!r}: give a smaller number of slots",
        ),
        (
            in_steps and not keep.allocate.uniform and not (threshold and keep.when.at_once),
            "evicting while decoding works with the uniform allocation, or after every token by a threshold",
        ),
        (
            in_steps and threshold and (keep.merge is not None or not all(map(_of_tokens, keep.protect))),
            "evicting by a threshold merges nothing, and protects whole numbers of tokens",
        ),
        (
            keep.lower is not None and (keep.lower.granule > 1 or keep.lower.residual > 0),
            "what leaves for a second tier is encoded token by token: use int8, int4 or turboquant's codecs",
        ),
        (
            keep.lower is not None and (keep.merge is not None or not keep.phase.steady),
            "a second tier works without merging, and with keys at their own positions",
        ),
        (
            keep.lower is not None and in_steps and not (keep.when.at_once and keep.allocate.uniform),
            "a second tier takes what leaves at the end of prompts or, with the uniform allocation, after "
            "every token",
        ),
        (
            keep.lower is not None
            and not keep.allocate.uniform
            and any(True for _ in fitted_words(keep.lower)),
            "codes of a second tier are read by what was fitted to each layer, which pages do not know: use "
            "a keep of equal heads",
        ),
        (
            in_steps and bool(absent),
            "evicting while decoding needs what is observed in steps too, and "
            f"{', '.join(map(repr, absent))} exists in prefills only: use when=PREFILL_END",
        ),
        (
            in_steps and not keep.when.at_once and bool(masses),
            f"{keep.when!r} evicts after many queries, and {', '.join(map(repr, masses))} is what slots "
            "receive of the newest one: name traces, such as Received(Mass()), in its score",
        ),
        (
            in_steps and keep.when.at_once and any(isinstance(t, Judging) for t in keep.score.traces),
            f"{keep.when!r} sees slots in any order, and its score ranks them with their neighbours: evict "
            "after several tokens, as in Every(128)",
        ),
        (
            keep.per_query_head and bool(masses or keep.score.traces),
            "what slots receive is recorded per KV head, and this keep selects per query head",
        ),
        (
            isinstance(keep.merge, Answering) and keep.per_query_head,
            f"{keep.merge!r} answers for keys at their positions in the KV heads: leave out per_query_head",
        ),
        (
            keep.merge is not None and not keep.phase.steady,
            f"{keep.merge!r} merges keys that stand at their positions, and {keep.phase!r} turns them anew "
            "whenever they are read: leave one of both out",
        ),
        (
            not keep.phase.alike and bool(masses or keep.score.traces or getattr(keep.score, "looks", True)),
            f"its score looks at keys or at what they receive, and under {keep.phase!r} a key meets every "
            "query otherwise: use a score of positions",
        ),
        (
            in_steps and keep.probe is not None,
            f"evicting while decoding cannot score by a probe that follows a prompt ({keep.probe!r}): "
            "use when=PREFILL_END",
        ),
        (
            probes - {None} != {keep.probe} - {None},
            f"its score reads the probe {' and '.join(sorted(map(repr, probes))) or None} and the keep's is "
            f"{keep.probe!r}: give both the same",
        ),
        (
            keep.narrow is not None and any(getattr(t, "behind_layers", False) for t in keep.score.traces),
            f"{keep.narrow!r} leaves tokens out of the upper layers, and its score asks how likely they were",
        ),
        (
            keep.reuse > 1 and (in_steps or not keep.allocate.uniform),
            f"{keep.reuse} layers keep what one of them chooses, and while decoding, or by budgets of their "
            "own, they would choose apart: use the uniform allocation at the end of prompts",
        ),
        *_narrowed(keep),
    ]


def refused_in_host(method: Method) -> list[tuple[bool, str]]:
    """(wrong, why) for what cannot be where slots lie in host memory."""
    host, read = method.host, method.read
    if host is None:
        return []
    return [
        (
            read is None,
            f"{host!r} brings the pages to the device that a step reads, and without a read method it reads "
            "all: chain it with one, such as quest",
        ),
        (
            isinstance(read, Resting | Sampling | Reusing) or hasattr(read, "looks_at"),
            f"{host!r} brings what is read to the device, and {read!r} chooses by looking at all keys: use a "
            "read by summaries, such as quest",
        ),
    ]


def refused_in_read(method: Method) -> list[tuple[bool, str]]:
    """(wrong, why) for what cannot be where a read remembers what slots are asked, or layers share picks."""
    return [
        (
            isinstance(method.read, Reusing) and method.keep is not None,
            f"{method.read!r} reads in one layer the slots that another one picked, and a keep would leave "
            "them other tokens: leave one out",
        ),
        (
            isinstance(method.read, Remembering) and method.keep is not None,
            f"{method.read!r} ranks blocks by what the tokens behind them asked for, which a keep would cut "
            "into: leave one out",
        ),
    ]


def refused_in_layers(method: Method) -> list[tuple[bool, str]]:
    """(wrong, why) for what cannot be where every layer has a sentence of its own."""
    if not method.layers:
        return []
    others = (method.reread, method.make, method.stack, method.host)
    alone = (method.keep, method.store, method.read, *others) == (None,) * 7
    parts = [
        one for one in method.sentences if any(part is not None for part in (one.reread, one.make, one.stack))
    ]
    stores = [one.store for one in method.sentences if one.store is not None and one.store.unrotated]
    keeps = [one.keep for one in method.sentences if one.keep is not None]
    whole = [k for k in keeps if not k.phase.steady or k.per_query_head or k.probe or k.narrow]
    return [
        (not alone or any(one.layers for one in method.sentences), "its layers say all that it does"),
        (
            bool(parts or whole or stores),
            "phases, per_query_head, unrotated keys, probes, rewritten weights, what leaves tokens of a "
            "prompt out, and what merges layers, "
            "concern all layers together: give layers sentences without them",
        ),
        (
            len({k for k in keeps if not k.allocate.uniform}) > 1,
            "heads of unequal budgets lie in pages of one keep, and its layers have several: give those that "
            "have unequal heads the same keep",
        ),
    ]


def refused_in_store(method: Method) -> list[tuple[bool, str]]:
    """(wrong, why) for what a store cannot do with the other parts of its sentence."""
    keep, store, read = method.keep, method.store, method.read
    if store is None:
        return []
    in_steps = keep is not None and keep.when.in_steps
    paged = keep is not None and not keep.allocate.uniform
    tiers, turns = keep is not None and keep.lower is not None, keep is not None and not keep.phase.steady
    learned = any(True for _ in fitted_words(store))
    return [
        (
            store.sinks > 0 and (in_steps or paged or tiers or turns or read is not None),
            f"the first {store.sinks} tokens lie apart from the others, which works with keeps of equal "
            "heads that act at the end of prompts, and without a read method: give sinks=0",
        ),
        (
            store.unrotated and read is not None,
            "a read method ranks keys as they are stored, and this store holds them unrotated",
        ),
        (
            store.unrotated and keep is not None and keep.merge is not None,
            f"{keep and keep.merge!r} merges keys at their positions, and this store holds them unrotated",
        ),
        (
            method.stack is not None and (learned or store.unrotated or store.sinks > 0),
            "it merges layers by their numbers at their positions, and this store holds them unrotated, by "
            "what was fitted to each layer, or first tokens apart: use int8, int4 or fp8",
        ),
        (
            learned and (paged or read is not None),
            "its codes are read by what was fitted to each layer, which pages and read methods do not know: "
            "use a keep of equal heads",
        ),
    ]


def _narrowed(keep: Keep) -> list[tuple[bool, str]]:
    """(wrong, why) for what cannot be where the upper layers see fewer tokens than the lower ones."""
    if keep.narrow is None:
        return []
    return [
        (
            not keep.allocate.uniform,
            f"{keep.narrow!r} gives layers unequal numbers of tokens, among which {keep.allocate!r} cannot "
            "share out a budget: use the uniform allocation",
        ),
        (
            not keep.phase.steady,
            f"{keep.narrow!r} leaves tokens at their own positions, and {keep.phase!r} turns them by others",
        ),
        (
            keep.probe is not None,
            f"{keep.narrow!r} leaves some tokens out of the upper layers, and the probe {keep.probe!r} would "
            "attend to all of them: leave one of both out",
        ),
    ]


def _of_tokens(pattern: Any) -> bool:
    """Whether a pattern protects a whole number of tokens."""
    return isinstance(getattr(pattern, "tokens", None), int)


def crowded(keep: Keep, tokens: int, row: str = "") -> str:
    """Why what must stay of a row of `tokens` tokens does not fit the budget; empty where it does.

    row: what such a row is called.

    Where slots leave at every step, the newest token needs a slot beside those that patterns protect.
    """
    n, newest = keep.budget.capacity(tokens), keep.when.in_steps
    # Layers of unequal budgets: the smallest must hold what is protected.
    n = getattr(keep.allocate, "fewest", int)(n)
    pos, length = np.arange(tokens, dtype=np.int32)[None, None], np.array([tokens], np.int32)
    stays = (pos == tokens - 1) & newest
    for pattern in keep.protect:
        stays = stays | np.asarray(pattern(pos, length, np.array([n], np.int32)))  # type: ignore[arg-type]
    if stays.sum() <= n:
        return ""
    names = [*map(repr, keep.protect), *(["the newest token"] if newest else [])]
    return (
        f"{stays.sum()} of {row or f'{tokens} tokens'} must stay ({', '.join(names)}), "
        f"more than the budget of {n} slots (budget={keep.budget.amount!r}): raise the budget or lower "
        "what is protected (window=, sinks=)"
    )


def number_of(layer: int | float, layers: int) -> int:
    """The number of a layer that is given as one, or as the share of the layers that end with it."""
    return layer if isinstance(layer, int) else max(int(layer * layers), 1) - 1


def probes_of(word: Any) -> set[Any]:
    """The probes that a word reads: its own field `probe`, and those of the words it is made of."""
    found: set[Any] = set()
    for name, value in _fields(word).items():
        found |= {value} if name == "probe" else probes_of(value)
    return found


def with_probe(word: Any, probe: Any) -> Any:
    """The word with another probe, wherever it or a word it is made of has one."""
    changed = {}
    for name, value in _fields(word).items():
        new = probe if name == "probe" and value is not None else with_probe(value, probe)
        changed |= {} if new is value else {name: new}
    return dataclasses.replace(word, **changed) if changed else word


def _fields(word: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(word) or isinstance(word, type):
        return {}
    return {f.name: getattr(word, f.name) for f in dataclasses.fields(word) if f.init}

"""Keeps whose words cannot work together, each refused with one sentence when it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.grammar.calls import hiding_of, observations, probes_of
from kvjax.grammar.fitted import fitted_words
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import IN_STEP, Answering, SelectionTrace
from kvjax.grammar.when import WhenFull

if TYPE_CHECKING:
    from kvjax.grammar import Keep
    from kvjax.grammar.kinds import Score

# (wrong, why) for each way in which words cannot work together.
Refusals = list[tuple[bool, str]]
# The longest prompt that is tried when a method is checked.
_LONG = 2**20


def refused(keep: Keep) -> Refusals:
    """Say what the words of a keep cannot do together."""
    score = keep.score
    if score is None:
        return _narrowed(keep)
    parts = (_in_steps, _per_query_head, _merged, _phased, _probed)
    found = [one for part in parts for one in part(keep, score)]
    return [_protected(keep), _restored(keep), *found, *_lower(keep), *_narrowed(keep)]


def _protected(keep: Keep) -> tuple[bool, str]:
    whole = int(keep.budget.amount) if keep.budget.ratio is None else 0
    # So many tokens show all that patterns protect; budgets beyond _LONG are checked with the prompt itself.
    full = crowded(keep, min(4 * whole + 4096, _LONG), "a long prompt's tokens") if whole else ""
    return bool(full), full


def _in_steps(keep: Keep, score: Score) -> Refusals:
    """Refusals of evictions while decoding."""
    whole = int(keep.budget.amount) if keep.budget.ratio is None else 0
    in_steps, threshold = keep.when.in_steps, keep.allocate.threshold is not None
    observed = observations(keep, in_steps=True)
    absent = [o for o in observed if IN_STEP not in o.phases]
    return [
        (
            isinstance(keep.when, WhenFull) and not 0 < whole < keep.when.slots,
            f"{keep.when!r} evicts when a KV head holds that many slots, and the budget is "
            f"{keep.budget.amount!r}: give a smaller budget",
        ),
        (
            hiding_of(keep) is not None and in_steps and not (keep.when.at_once and keep.allocate.uniform),
            "slots that newer tokens drop are evicted in every step or at the end of prompts, with equal "
            "budgets of all heads: use UpTo(0.0), and when=STEP or PREFILL_END",
        ),
        (
            in_steps and not (keep.when.at_once if threshold else keep.allocate.uniform),
            "evicting while decoding works with the uniform allocation, or after every token by a threshold",
        ),
        (
            in_steps
            and threshold
            and not keep.allocate.uniform
            and not (_by_one(keep.merge) and all(map(_of_tokens, keep.protect))),
            f"{keep.allocate!r} evicts the newest slots alone while decoding, none in pages: use UpTo, or "
            "merges of one slot at a time and patterns of whole numbers of tokens",
        ),
        (
            in_steps and threshold and not keep.allocate.uniform and bool(observed),
            f"{keep.allocate!r} evicts no slot of a page while decoding, and {score!r} may give a slot a "
            "lower score than at the end of the prompt: use UpTo",
        ),
        (
            in_steps
            and keep.when.at_once
            and threshold
            and keep.allocate.uniform
            and keep.budget.ratio != 1
            and not score.bounded,
            f"{keep.allocate!r} keeps all slots with high scores, and {score!r} can give "
            "high scores to more slots than fit: use a `bounded` score, such as Votes(256, 256)",
        ),
        (
            in_steps and bool(absent),
            "evicting while decoding needs observations of steps, and "
            f"{', '.join(map(repr, absent))} observes prefills only: use when=PREFILL_END",
        ),
        (
            hiding_of(keep) is not None and in_steps and len(observations(keep)) > 1,
            f"{hiding_of(keep)!r} evicts before a token attends, and other observations need what it "
            "attends to: leave them out",
        ),
        *_at_once(keep, score),
    ]


def _at_once(keep: Keep, score: Score) -> Refusals:
    """Refusals of words that do not fit eviction after every token, or after several.

    After every token, words see slots in any order; after several, they have the mass of the newest query
    alone.
    """
    in_steps, at_once, masses = keep.when.in_steps, keep.when.at_once, _masses(score)
    return [
        (
            in_steps and not at_once and bool(masses),
            f"{keep.when!r} evicts after many queries, and {', '.join(map(repr, masses))} has the "
            "attention of the newest query alone: name traces, such as AccumulatedMass(Mass()), in its score",
        ),
        (
            in_steps and at_once and any(isinstance(t, SelectionTrace) for t in score.traces),
            f"{keep.when!r} sees slots in any order, and its score ranks them with their neighbours: evict "
            "after several tokens, as in Every(128)",
        ),
    ]


def _lower(keep: Keep) -> Refusals:
    """Refusals of a second tier."""
    lower, in_steps = keep.lower, keep.when.in_steps
    if lower is None:
        return []
    return [
        (
            keep.allocate.threshold is not None and keep.allocate.uniform,
            f"a second tier has as many slots as a budget evicts, and {keep.allocate!r} may evict more: "
            "use the uniform allocation",
        ),
        (
            lower.residual > 0 or (in_steps and lower.granule > 1),
            "a second tier takes slots one by one while decoding, and has no newest tokens: use int8, int4 "
            "or turboquant's codecs",
        ),
        (
            keep.merge is not None,
            "with a second tier no slot is dropped that others could take anything of: leave out the merge",
        ),
        (
            in_steps and not (keep.when.at_once and keep.allocate.uniform),
            "a second tier takes slots that are evicted at the end of prompts or, with the uniform "
            "allocation, after every token",
        ),
    ]


def _per_query_head(keep: Keep, score: Score) -> Refusals:
    """Refusals of a selection per query head."""
    fitted = [word for part in (score, keep.allocate) for word in fitted_words(part)]
    of_kv_heads = [type(word).__name__ for word in fitted if word.of_kv_heads]
    masses = _masses(score)
    if not keep.per_query_head:
        return []
    return [
        (
            bool(masses or score.traces),
            "received attention is recorded per KV head, and this keep selects per query head",
        ),
        (
            keep.probe is not None or bool(of_kv_heads),
            f"{of_kv_heads[0] if of_kv_heads else keep.probe!r} is about KV heads, and this "
            "keep selects per query head: leave out per_query_head",
        ),
        (
            isinstance(keep.merge, Answering),
            f"{keep.merge!r} answers for keys at their positions in the KV heads: leave out per_query_head",
        ),
    ]


def _merged(keep: Keep, score: Score) -> Refusals:
    """Refusals of a merge."""
    if keep.merge is None:
        return []
    unknown = sorted(keep.merge.traces - score.traces, key=key_of)
    return [
        (
            bool(unknown),
            f"{keep.merge!r} needs {', '.join(map(repr, unknown))}, which its score does not record: "
            "use a score that names it in `traces`, such as AccumulatedAttention()",
        ),
        (
            keep.merge.unrotated and keep.phase.steady,
            f"{keep.merge!r} merges keys before rotation, and {keep.phase!r} stores them rotated: give "
            "phase=ByRank()",
        ),
    ]


def _phased(keep: Keep, score: Score) -> Refusals:
    """Refusals of scores that look at keys which are rotated anew for each query."""
    probes = probes_of(score) - {None}
    looks = bool(_masses(score) or score.traces or probes or score.looks)
    return [
        (
            not keep.phase.alike and looks,
            f"its score depends on keys or on attention, and under {keep.phase!r} a key is rotated in "
            "another way for every query: use a score of positions",
        ),
    ]


def _probed(keep: Keep, score: Score) -> Refusals:
    """Refusals of a probe after the prompt, and of layers that select for others."""
    in_steps, probes = keep.when.in_steps, probes_of(score)
    return [
        (
            in_steps and bool(probes_of(score.in_steps) - {None}),
            f"evicting while decoding cannot score by a probe that follows a prompt ({keep.probe!r}): "
            "use when=PREFILL_END",
        ),
        (
            probes - {None} != {keep.probe} - {None},
            f"its score reads the probe {' and '.join(sorted(map(repr, probes))) or None} and the keep's is "
            f"{keep.probe!r}: give both the same",
        ),
        (
            keep.narrow is not None and any(t.after_layers for t in score.traces),
            f"{keep.narrow!r} leaves tokens out of the upper layers, and its score needs their probabilities",
        ),
        (
            keep.reuse > 1 and (in_steps or not _alike_in_layers(keep.allocate)),
            f"{keep.reuse} layers keep the tokens that one of them selects, and while decoding, or by "
            "budgets of their own, each would select by itself: use the uniform allocation, or one between "
            "heads, at the end of prompts",
        ),
    ]


def _restored(keep: Keep) -> tuple[bool, str]:
    """Refuse restore tokens that could be evicted in steps, or that some layers would not store."""
    return (
        keep.restore is not None and (keep.when.in_steps or keep.skip_layers > 0),
        f"{keep.restore!r} reads whole prompts in all layers, and its slots are never evicted: use it with a "
        "keep that acts in all layers at the end of prompts alone, such as kvzip",
    )


def _masses(score: Score) -> list[Any]:
    """Collect the received-attention observations of a score."""
    return sorted((o for o in score.needs if o.reduction is not None), key=key_of)


def _narrowed(keep: Keep) -> Refusals:
    """Return (wrong, why) for keeps whose upper layers read fewer tokens than the lower ones."""
    if keep.narrow is None:
        return []
    return [
        (
            not keep.phase.steady and keep.phase != keep.narrow.phase,
            f"{keep.narrow!r} keeps tokens at their own positions, and {keep.phase!r} rotates them by others",
        ),
    ]


def _alike_in_layers(allocate: Any) -> bool:
    """Return whether layers with equal scores keep equally many slots of them."""
    if allocate.across_layers or allocate.needs:
        return False
    try:
        return len({*allocate.layer_slots(64, 256, 4, 2)}) == 1
    except ValueError:  # its budgets are given layer by layer
        return False


def _by_one(merge: Any) -> bool:
    """Whether a merge, or none, can act if a threshold decides after every token."""
    return merge is None or merge.one_by_one


def _of_tokens(pattern: Any) -> bool:
    """Whether a pattern protects a whole number of tokens."""
    return isinstance(pattern.tokens, int)


def crowded(keep: Keep, tokens: int, row: str = "") -> str:
    """Why the slots that must stay of a row of `tokens` tokens do not fit the budget; empty if they do.

    row: what messages call such a row.

    If every step evicts, the newest token needs a slot beside those that patterns protect.
    """
    n, newest = keep.budget.capacity(tokens), keep.when.in_steps
    # With unequal budgets per layer, the smallest must hold the protected slots.
    n = keep.allocate.fewest(n, tokens)
    pos, length = np.arange(tokens, dtype=np.int32)[None, None], np.array([tokens], np.int32)
    stays = (pos == tokens - 1) & newest
    more = 0 if keep.restore is None else keep.restore.tokens
    for pattern in keep.protect:
        stays = stays | np.asarray(pattern(pos, length, np.array([n], np.int32)))  # type: ignore[arg-type]
    if stays.sum() + more <= n:
        return ""
    names = [*map(repr, keep.protect), *(["the newest token"] if newest else [])]
    names += [repr(keep.restore)] if more else []
    return (
        f"{stays.sum() + more} of {row or f'{tokens} tokens'} must stay ({', '.join(names)}), "
        f"more than the budget of {n} slots{keep.allocate.poorest} "
        f"(budget={keep.budget.amount!r}): raise the budget or lower "
        "what is protected (window=, sinks=)"
    )

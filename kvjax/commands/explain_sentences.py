"""Explains a method in plain English: each of its words has its own explanation, in `says` or its docstring.

No method or word is treated by name here; the text around the words explains the fields that every method has
(`kvjax.grammar`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvjax.grammar import Keep, Method, Store
from kvjax.grammar.calls import hiding_of, observations
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.kinds import Answering
from kvjax.grammar.phase import BY_POSITION
from kvjax.grammar.read_kinds import Copying, EstimatingRest
from kvjax.grammar.to_text import written

_ONE_LINE = 10_000


class Statement(NamedTuple):
    """A statement about what happens, and the words of the method that it is about."""

    text: str
    words: tuple[Any, ...] = ()


def said(word: Any) -> str:
    """Return a word's explanation of itself: its `says`, if it has one, or its docstring's first paragraph.

    In a docstring, names of fields in backticks are replaced by the fields' values.

    >>> from kvjax.keep.scores.score import WindowAttention
    >>> said(WindowAttention(64))
    'Attention that slots receive from the last 64 queries.'
    """
    own = getattr(word, "says", None)
    if isinstance(own, str):
        return own
    text = (type(word).__doc__ or "").strip().split("\n\n")[0]
    if text.startswith(f"{type(word).__name__}("):  # the docstring that dataclasses generate if there is none
        return ""
    fields = {f.name: getattr(word, f.name) for f in dataclasses.fields(word)}

    def value(match: re.Match[str]) -> str:
        found = fields.get(match[1])
        plain = isinstance(found, int | float | str) and not isinstance(found, bool)
        return f"{found}" if plain else match[0]

    return " ".join(re.sub(r"`(\w+)`", value, text).split())


def called(word: Any) -> str:
    """Write a word in one line, as it is written in code."""
    return written(word, _ONE_LINE)


def inside(word: Any) -> Iterator[Any]:
    """Yield the words that a word is made of, in the order of its fields."""
    if not dataclasses.is_dataclass(word):
        return
    for field in dataclasses.fields(word):
        value = getattr(word, field.name)
        for one in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(one) and not isinstance(one, type | Fitted):
                yield one


# --- prompts ------------------------------------------------------------------------------------------


def at_prefill(method: Method, tokens: int) -> list[Statement]:
    """Return the statements about what happens to a prompt of `tokens` tokens, in order."""
    told = []
    if method.make is not None:
        told.append(
            Statement("Before any prompt is read, the weights of the model are rewritten.", (method.make,))
        )
    if method.reread is not None:
        told.append(Statement(method.reread.reads, (method.reread,)))
    keep = method.keep
    narrow = None if keep is None else keep.narrow
    if narrow is not None:
        told.append(
            Statement("Lower layers read the whole prompt, upper layers only some of its tokens.", (narrow,))
        )
    elif method.reread is None:
        left = "" if hiding_of(keep) is None else " that have not been dropped"
        told.append(
            Statement(
                f"The layers read all {tokens} tokens; each attends to itself and to earlier tokens{left}."
            )
        )
    told += [] if method.read_prompt is None else _read_in_blocks(method.read_prompt, tokens)
    told += [] if keep is None else _kept(keep, tokens)
    if method.stack is not None:
        told.append(Statement("Adjacent layers are stored together.", (method.stack,)))
    told += _stored(method.store, tokens)
    if method.read is not None:
        told.append(Statement("The summaries by which later steps select slots are computed now."))
    if method.host is not None:
        what = "Values move" if method.host.values_alone else "Keys and values move"
        told.append(Statement(f"{what} to host memory.", (method.host,)))
    return told


def _read_in_blocks(read: Any, tokens: int) -> list[Statement]:
    """Say what a first prompt attends to, and what share of the full attention that computes."""
    if tokens <= read.read_whole:
        return [Statement(f"A prompt of up to {read.read_whole} tokens is attended to as a whole.", (read,))]
    share = read.share(tokens)
    known = "how many follows from the prompt" if share is None else f"{100 * share:.3g}% of full attention"
    together, block = _many(read.segment, "token"), _many(read.block, "token")
    told = [Statement(f"Every {together} together attend to selected blocks of {block}: {known}.", (read,))]
    if read.skip_layers:
        told.append(Statement(f"All tokens are attended to in the first {_many(read.skip_layers, 'layer')}."))
    return told


def _kept(keep: Keep, tokens: int) -> list[Statement]:
    told = []
    if keep.score is not None:
        seen = observations(keep)
        if seen:
            told.append(Statement("While the layers attend, they record what the scores need.", tuple(seen)))
        traces = tuple(sorted(keep.score.traces, key=repr))
        if traces:
            told.append(
                Statement("A number is stored with every slot, and updated as tokens follow.", traces)
            )
        if keep.probe is not None:
            told.append(
                Statement(
                    "Further tokens are read after the prompt, only to observe what they attend to.",
                    (keep.probe,),
                )
            )
        if keep.restore is not None:
            read = "Learned tokens then attend to all slots of the prompt, and their own slots stay."
            told.append(Statement(read, (keep.restore,)))
        told.append(Statement("Every slot gets a score; slots with high scores stay.", (keep.score,)))
        told.append(_counted(keep, tokens))
        if keep.protect:
            told.append(Statement("Some slots stay whatever their scores.", keep.protect))
        if keep.skip_layers:
            told.append(Statement(f"The first {_many(keep.skip_layers, 'layer')} keep everything."))
        if keep.reuse > 1:
            told.append(
                Statement(f"{keep.reuse} layers in a row keep the tokens that the first of them selects.")
            )
        if keep.merge is not None and keep.merge.at_prompts:
            told.append(Statement(_MERGED, (keep.merge,)))
        elif keep.lower is not None:
            told.append(Statement("Evicted slots move to a second tier, in fewer bits.", _codecs(keep.lower)))
        else:
            told.append(Statement("The other slots are evicted, and their memory is freed."))
    if keep.phase != BY_POSITION:
        told.append(Statement("Keys and queries are rotated anew whenever they are used.", (keep.phase,)))
    return told


def _counted(keep: Keep, tokens: int) -> Statement:
    """How many slots are kept."""
    if keep.allocate.threshold is not None and keep.budget.amount == 1.0:
        return Statement("How many slots stay follows from the scores.", (keep.allocate,))
    n = keep.budget.capacity(tokens)
    who = "a query head" if keep.per_query_head else "a KV head"
    share = f"{100 * n / tokens:.3g}%"
    mean = "" if keep.allocate.uniform else keep.allocate.of_budget
    return Statement(f"The budget is n = {n} of {tokens} tokens ({share}) for {who}{mean}.", (keep.allocate,))


def _stored(store: Store | None, tokens: int) -> list[Statement]:
    if store is None:
        return [Statement("The slots that stay are stored as computed.")]
    told = []
    if store.sinks:
        told.append(Statement(f"The first {_many(store.sinks, 'token')} stay as computed."))
    if store.unrotated:
        told.append(
            Statement("Keys are stored before rotation, and rotated by their positions when they are read.")
        )
    if store.residual:
        told.append(Statement(f"The newest {_many(store.residual, 'token')} stay as computed."))
    together = f", {store.granule} tokens at a time" if store.granule > 1 else ""
    if store.keys is None and store.values is None:
        return told
    older = "Older slots are" if store.residual or store.sinks else "Slots are"
    if store.keys == store.values:
        return [*told, Statement(f"{older} encoded, keys and values alike{together}.", (store.keys,))]
    for name, codec in (("Keys", store.keys), ("Values", store.values)):
        if codec is None:
            told.append(Statement(f"{name} are stored as they were computed."))
        else:
            told.append(
                Statement(f"{name} of {older.lower().removesuffix(' are')} are encoded{together}.", (codec,))
            )
    return told


def _codecs(store: Store) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(codec for codec in (store.keys, store.values) if codec is not None))


# --- steps --------------------------------------------------------------------------------------------


_MERGED = "Evicted slots are merged, not dropped."
_BROUGHT = "The slots of each layer come from host memory while the layer below computes."
_FETCHED = "The slots that its query selects come from host memory, unless the device has a copy."


def at_each_step(method: Method) -> list[Statement]:
    """Return the statements about what happens to every generated token, in order."""
    keep, store, read = method.keep, method.store, method.read
    told = [_written(store)]
    first = hiding_of(keep) is not None
    if keep is not None and first and keep.when.in_steps:
        told.append(Statement("Older slots are evicted before its query attends.", (keep.score,)))
    if keep is not None and keep.phase != BY_POSITION:
        told.append(Statement("Its query and all keys are rotated anew.", (keep.phase,)))
    if method.host is not None:
        picked = _FETCHED.replace("slots", "values") if method.host.values_alone else _FETCHED
        told.append(Statement(_BROUGHT if read is None else picked))
    if read is None:
        told.append(Statement("Its query attends to every slot that the cache holds."))
    else:
        told.append(
            Statement(
                "Its query attends to the newest slots, and to those older slots that it selects.", (read,)
            )
        )
        if read.skip_layers:
            told.append(Statement(f"The first {_many(read.skip_layers, 'layer')} read every slot."))
        if isinstance(read, Copying):
            told.append(Statement("It attends to copies, in fewer bits, of the slots that are not read."))
        elif isinstance(read, EstimatingRest):
            told.append(Statement("Attention to slots that are not read is estimated from sums over them."))
    if keep is not None and isinstance(keep.merge, Answering):
        told.append(
            Statement("Its query also attends to what was accumulated from evicted slots.", (keep.merge,))
        )
    if keep is None or keep.score is None or not keep.when.in_steps:
        told.append(Statement("No slot is evicted: the cache grows by one slot for every token."))
    else:
        if not first:
            told.append(Statement("Then slots may be evicted.", (keep.when,)))
            same = "The slots with the lowest scores are evicted; the score is that of the end of a prompt."
            told.append(Statement(same, (keep.score,)))
        if keep.protect:
            told.append(Statement("Some stay whatever their scores.", keep.protect))
        if keep.merge is not None:
            told.append(Statement(_MERGED, (keep.merge,)))
    if store is not None and store.granule > 1:
        text = (
            f"As soon as {store.granule} tokens are older than the newest {store.residual}, they are encoded."
        )
        told.append(Statement(text))
    return told


def _written(store: Store | None) -> Statement:
    late = store is not None and (store.granule > 1 or store.residual > 0)
    how = "as computed" if store is None or late else "encoded as those of the prompt"
    return Statement(f"The new token's key and value are written into an empty slot, {how}.")


def _many(count: int, what: str) -> str:
    return what if count == 1 else f"{count} {what}s"

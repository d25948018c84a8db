"""The recall language: 220 words in which a model of 0.8 M parameters learns to look things up.

A context is filler text (a fixed Markov chain, half of it phrases that recur inside the document) with
records scattered in it; questions follow the context:

    <set> brave otter 17 4 52 <.>        a value             <get> brave otter    -> 17 4 52 <.>
    <set> calm fox brave otter <.>       a pointer           <chase> calm fox     -> brave otter 17 4 52 <.>
    <add> brave otter 8 8 31 <.>         a second value      <all> brave otter    -> 17 4 52 <,> 8 8 31 <.>
    <tag> teal                           a vote              <mode>               -> teal <.>
    any span of the context              to be repeated      <copy> c1 c2 c3 c4   -> c5 c6 ...

Keys are two words and every word is shared by several keys, so that half a match is never enough; values are
three numbers, so that guessing scores nothing. This module has the words, the tokenizer and the contexts; the
questions about them, for training and evaluation, are in `kvjax.eval.tasks.recall_tasks`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from kvjax.base.errors import InputError

MARKERS = tuple("<pad> <bos> <set> <get> <add> <.> <chase> <all> <,> <tag> <mode> <copy>".split())
PAD, BOS, SET, GET, ADD, DOT, CHASE, ALL, COMMA, TAG, MODE, COPY = range(len(MARKERS))

_FIRST = """brave calm clever cold eager early fair fast gentle glad grand happy hidden honest humble keen
kind lively lucky mighty modest noble old proud quick quiet rapid rare silent swift wise young""".split()
_SECOND = """badger bear beaver bison crane crow deer dolphin eagle falcon finch fox goose hare heron horse
lion lynx mole moose otter owl panda raven robin salmon seal shark swan tiger whale wolf""".split()
_NUMBERS = [str(n) for n in range(64)]
_COLOURS = """amber black blue brown crimson cyan gold green indigo orange pink purple red silver teal
white""".split()
_FILLER = """the a of and to in on at by with from over under near past along through across into upon while
when then there here river road hill field house garden window table stone tree forest lake bridge market
village morning evening winter summer rain snow wind cloud light shadow music story letter people children
night walked waited stood moved turned carried followed opened""".split()

WORDS: tuple[str, ...] = (*MARKERS, *_FIRST, *_SECOND, *_NUMBERS, *_COLOURS, *_FILLER)
"""Word of every token id: 12 markers, 32 + 32 key words, 64 numbers, 16 tags, 64 filler words."""

VOCAB = len(WORDS)
FIRST, SECOND, NUMBER, COLOUR, FILLER = 12, 44, 76, 140, 156
VALUE_TOKENS = 3
RECORD_TOKENS = 4 + VALUE_TOKENS
MAX_RECORDS = 128
MIN_LOOKALIKES = 3
EVAL_DENSITY = 0.35

Key = tuple[int, int]


def _successors() -> np.ndarray:
    # The shipped weights were trained on this very chain: its seed and the order of draws must not change.
    rng = np.random.default_rng(1234)
    return np.stack([rng.choice(len(_FILLER), 4, replace=False) for _ in _FILLER])


_NEXT = _successors()
_NEXT_CDF = np.cumsum([0.5, 0.25, 0.15, 0.10])


class Record(NamedTuple):
    """One fact of a context: kind (value, pointer, second or tag), key, content ids, span [start, end)."""

    kind: str
    key: tuple[int, ...]
    content: tuple[int, ...]
    span: tuple[int, int]


@dataclass(frozen=True)
class Context:
    """A context: token ids, its records in order, and the key that has look-alikes (or None)."""

    tokens: tuple[int, ...]
    records: tuple[Record, ...]
    target: Key | None


def tokenizer() -> Tokenizer:
    """Word-level tokenizer of the recall language: one word, one id.

    Markers such as `<set>` are added tokens that `decode` keeps, so `encode(decode(ids)).ids == ids`.
    Encoding a word outside `WORDS` is an error of the `tokenizers` library: there is no unknown token.

    >>> tokenizer().encode("<get> brave otter").ids
    [3, 12, 64]
    """
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in MARKERS])
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return made


def filler(rng: np.random.Generator, length: int, phrases: list[list[int]]) -> list[int]:
    """`length` filler ids: stretches of the Markov chain, every second one a phrase of the document."""
    out: list[int] = []
    word = int(rng.integers(len(_FILLER)))
    while len(out) < length:
        if phrases and rng.random() < 0.5:
            out += phrases[int(rng.integers(len(phrases)))]
            word = out[-1] - FILLER
            continue
        branches = np.searchsorted(_NEXT_CDF, rng.random(int(rng.integers(4, 12))))
        for branch in np.minimum(branches, 3):
            word = int(_NEXT[word, branch])
            out.append(FILLER + word)
    return out[:length]


def _draw_keys(rng: np.random.Generator, n: int, family: float) -> tuple[list[Key], Key | None]:
    """`n` distinct keys in random order; the share `family` of them has one word of the target key."""
    width = len(_SECOND)
    codes = rng.permutation(len(_FIRST) * width)
    target = None
    if family:
        a, b = divmod(int(codes[0]), width)
        close = (codes // width == a) ^ (codes % width == b)
        lookalikes = codes[close][: max(MIN_LOOKALIKES, round(family * (n - 1)))]
        others = codes[1:][~close[1:]]
        codes = rng.permutation(np.concatenate([codes[:1], lookalikes, others])[:n])
        target = (FIRST + a, SECOND + b)
    return [(FIRST + int(c) // width, SECOND + int(c) % width) for c in codes[:n]], target


def _draw_votes(rng: np.random.Generator, tokens: int) -> list[int]:
    """Colour ids of the votes in a context of `tokens`; one colour leads, never a tie."""
    n_colours = int(rng.integers(3, 7))
    colours = rng.choice(len(_COLOURS), n_colours, replace=False)
    n = max(3, int(tokens * rng.uniform(0.02, 0.08) / 2))
    votes = rng.choice(n_colours, n, p=rng.dirichlet(np.ones(n_colours)))
    counts = np.bincount(votes)
    if (counts == counts.max()).sum() > 1:
        votes = np.append(votes, counts.argmax())
    return [COLOUR + int(colours[v]) for v in votes]


def _record_room(tokens: int) -> int:
    """Tokens that are surely left for records beside <bos> and the largest possible number of votes."""
    return tokens - 1 - 2 * (max(3, int(tokens * 0.04)) + 1)


def _fewest_records(values: int, pointers: int, seconds: int, family: bool) -> int:
    return max(2, max(1, values, seconds) + pointers + (1 + MIN_LOOKALIKES if family else 0))


def min_tokens(*, values: int = 0, pointers: int = 0, seconds: int = 0, family: bool = False) -> int:
    """Compute the shortest context, in tokens, that certainly has room for these arguments of `make_context`.

    >>> min_tokens(pointers=1, seconds=1)
    30
    """
    need = RECORD_TOKENS * (_fewest_records(values, pointers, seconds, family) + seconds)
    return next(tokens for tokens in count(1) if _record_room(tokens) >= need)


def _choose(rng: np.random.Generator, options: Sequence[Key], p: float, least: int, most: int) -> list[Key]:
    """Choose each option with probability `p`, then add or remove some to satisfy `least` and `most`."""
    chance = rng.random(len(options))
    n = max(min(max(least, int((chance < p).sum())), most), 0)
    return [options[int(i)] for i in np.argsort(chance)[:n]]


def _draw_value(rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(NUMBER + int(v) for v in rng.integers(0, len(_NUMBERS), VALUE_TOKENS))


def _lay_out(
    rng: np.random.Generator, tokens: int, items: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]
) -> tuple[tuple[int, ...], tuple[Record, ...]]:
    """Place items in order with random stretches of filler between them, exactly `tokens` long."""
    phrases = [filler(rng, int(rng.integers(6, 12)), []) for _ in range(int(rng.integers(3, 8)))]
    marker = {"value": SET, "pointer": SET, "second": ADD}
    bodies = [
        (TAG, *content) if kind == "tag" else (marker[kind], *key, *content, DOT)
        for kind, key, content in items
    ]
    free = tokens - 1 - sum(map(len, bodies))
    gaps = rng.multinomial(free, rng.dirichlet(np.ones(len(items) + 1)))
    out, records = [BOS], []
    for (kind, key, content), body, gap in zip(items, bodies, gaps[:-1], strict=True):
        out += filler(rng, int(gap), phrases)
        records.append(Record(kind, key, content, (len(out), len(out) + len(body))))
        out += body
    out += filler(rng, int(gaps[-1]), phrases)
    return tuple(out), tuple(records)


def make_context(
    rng: np.random.Generator,
    tokens: int,
    *,
    density: float | None = None,
    p_pointer: float = 0.25,
    p_second: float = 0.1,
    family: float = 0.0,
    values: int = 1,
    pointers: int = 0,
    seconds: int = 0,
) -> Context:
    """Make a random context of exactly `tokens` ids, about `density` of them in value and pointer records.

    density: fraction of the tokens, drawn from [0.15, 0.75] when None; evaluation uses `EVAL_DENSITY`.
    p_pointer, p_second: chance that a record is a pointer, that a value gets a second one later.
    family: share of the records whose key has one word in common with `Context.target`; 0 means no target.
    values, pointers, seconds: at least so many keys of each kind besides the target.

    Raises InputError if `tokens` are too few for the requested records.

    >>> context = make_context(np.random.default_rng(0), 128, density=EVAL_DENSITY)
    >>> len(context.tokens), sorted({record.kind for record in context.records})
    (128, ['pointer', 'tag', 'value'])
    """
    least = min_tokens(values=values, pointers=pointers, seconds=seconds, family=family > 0)
    if tokens < least:
        raise InputError(
            f"a recall context with at least {values} value(s), {pointers} pointer(s) and {seconds} second "
            f"value(s) needs {least} tokens or more, got {tokens}: make it longer or ask for fewer records"
        )
    density = float(rng.uniform(0.15, 0.75)) if density is None else density
    votes = _draw_votes(rng, tokens)
    room = tokens - 1 - 2 * len(votes)
    n = min(int(tokens * density) // RECORD_TOKENS, MAX_RECORDS, room // RECORD_TOKENS - seconds)
    n = max(n, _fewest_records(values, pointers, seconds, family > 0))
    keys, target = _draw_keys(rng, n, family)
    most_pointers = n - (target is not None) - max(1, values, seconds)
    pointing = set(_choose(rng, [k for k in keys[1:] if k != target], p_pointer, pointers, most_pointers))
    items: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    for i, key in enumerate(keys):
        to = keys[int(rng.integers(max(0, i - 12), i))] if key in pointing else None
        items.append(("pointer", key, to) if to else ("value", key, _draw_value(rng)))
    doubled = [k for k in keys if k not in pointing and k != target]
    for key in _choose(rng, doubled, p_second, seconds, room // RECORD_TOKENS - n):
        first = next(i for i, item in enumerate(items) if item[1] == key)
        items.insert(int(rng.integers(first + 1, len(items) + 1)), ("second", key, _draw_value(rng)))
    for vote in votes:
        items.insert(int(rng.integers(0, len(items) + 1)), ("tag", (), (vote,)))
    laid, records = _lay_out(rng, tokens, items)
    return Context(laid, records, target)

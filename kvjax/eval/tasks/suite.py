"""Suites: where questions come from, how they are answered, and whether an answer is right.

A suite makes samples and grades answers. Most answers are forced: the right tokens are fed and what the
model would have said is compared. Samples of `OpenSample` are answered by the model itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int
from tokenizers import Tokenizer

from kvjax import steps
from kvjax.cache import Cache
from kvjax.errors import InputError
from kvjax.eval.tasks import recall, recall_tasks
from kvjax.eval.tasks.rows import Rows
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.steps import Run

TASKS = ("get", "chase", "all", "copy", "multikey")
LENGTH = 512


@runtime_checkable
class Sample(Protocol):
    """One question about one context, as ids; spans are the [start, end) of the context it needs."""

    @property
    def id(self) -> str: ...
    @property
    def task(self) -> str: ...
    @property
    def context(self) -> tuple[int, ...]: ...
    @property
    def question(self) -> tuple[int, ...]: ...
    @property
    def answer(self) -> tuple[int, ...]: ...
    @property
    def spans(self) -> tuple[tuple[int, int], ...]: ...


@dataclasses.dataclass(frozen=True)
class OpenSample:
    """A question answered in the model's own words, up to `max_new_tokens`; it must be a row's last one.

    Nothing is forced, so `answer` is empty; the written text is scored against `references` (and, for
    classification, `classes`).
    """

    id: str
    task: str
    context: tuple[int, ...]
    question: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    references: tuple[str, ...]
    max_new_tokens: int
    classes: tuple[str, ...] = ()
    answer: tuple[int, ...] = ()


class Graded(NamedTuple):
    """What was said, what was right, and the score in [0, 1]."""

    prediction: str
    answer: str
    score: float


@runtime_checkable
class Suite(Protocol):
    """A source of rows: each is one context with one question, or several asked in turn.

    length bounds context and question together. contexts: how many there are, None for any number.
    sources: what besides the arguments decides the questions, such as the contents of files.
    """

    @property
    def tasks(self) -> tuple[str, ...]: ...
    @property
    def length(self) -> int: ...
    @property
    def contexts(self) -> int | None: ...
    @property
    def sources(self) -> tuple[str, ...]: ...

    def rows(self, index: int, protocol: str) -> list[list[Any]]:
        """The rows about context number `index`."""
        ...

    def grade(self, sample: Any, prediction: Sequence[int]) -> Graded: ...

    def words(self, ids: Sequence[int]) -> list[str]:
        """One readable word per token."""
        ...


@dataclasses.dataclass(frozen=True)
class Recall:
    """The recall language of the shipped model: contexts of `length` tokens, questions included."""

    tasks: tuple[str, ...]
    length: int
    seed: int
    turns: int = 5
    contexts: int | None = None
    sources: tuple[str, ...] = ()

    # The longest question: a marker and four words.
    question_tokens = 5

    def rows(self, index: int, protocol: str) -> list[list[Any]]:
        """One row per task about context number `index`; one row with several turns for "multi-turn"."""
        tokens = self.length - self.question_tokens
        if protocol == "multi-turn":
            return [
                recall_tasks.conversation(
                    self.tasks, seed=self.seed, index=index, tokens=tokens, turns=self.turns
                )
            ]
        samples = recall_tasks.context_samples(self.tasks, seed=self.seed, index=index, tokens=tokens)
        return [[s] for s in samples]

    def grade(self, sample: Any, prediction: Sequence[int]) -> Graded:
        said, right = (" ".join(self.words(ids)) for ids in (prediction, sample.answer))
        return Graded(said, right, self.score(sample.task, prediction, sample.answer))

    def score(self, task: str, prediction: Sequence[int], answer: Sequence[int]) -> float:
        return recall_tasks.score(task, list(prediction), list(answer))

    def words(self, ids: Sequence[int]) -> list[str]:
        return [recall.WORDS[i] for i in ids]


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Several suites of one model side by side; context number i of each. Their tasks differ in name."""

    parts: tuple[Any, ...]

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(task for part in self.parts for task in part.tasks)

    @property
    def length(self) -> int:
        return max(part.length for part in self.parts)

    @property
    def contexts(self) -> int | None:
        counts = [part.contexts for part in self.parts]
        return None if None in counts else max(counts)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(source for part in self.parts for source in part.sources)

    def rows(self, index: int, protocol: str) -> list[list[Any]]:
        there = [part for part in self.parts if part.contexts is None or index < part.contexts]
        return [row for part in there for row in part.rows(index, protocol)]

    def grade(self, sample: Any, prediction: Sequence[int]) -> Graded:
        part = next(part for part in self.parts if sample.task in part.tasks)
        return part.grade(sample, prediction)

    def words(self, ids: Sequence[int]) -> list[str]:
        return self.parts[0].words(ids)


def make_suite(
    model: Model,
    tasks: Sequence[str] | None = None,
    *,
    length: int | None = None,
    seed: int = 0,
    contexts: int = 32,
) -> Suite:
    """The questions of a comparison: built-in tasks in the model's language, and those of local files.

    Args:
      tasks: built-in names (by default all), paths of JSONL files, or of folders of them.
      length: bound on context and question together; by default 512 tokens, or the longest prompt in files.
      contexts: at most so many records of each file are read.

    Raises InputError for whatever cannot be asked: unknown tasks, unreadable files, lengths that are too
    short for the questions or beyond the model's positions, a model without a tokenizer.

    >>> from kvjax.models.load import load
    >>> suite = make_suite(load("recall-tiny"), ["get", "copy"])
    >>> suite.tasks, suite.length, len(suite.rows(0, "aware"))
    (('get', 'copy'), 512, 2)
    """
    given = tuple(dict.fromkeys(TASKS if tasks is None else tasks))
    paths = tuple(Path(t) for t in given if _is_path(t))
    names = tuple(t for t in given if not _is_path(t))
    if length is not None and length > model.config.max_positions:
        raise InputError(
            f"--length {length} reaches beyond the model's {model.config.max_positions} positions: shorten it"
        )
    parts: list[Any] = []
    if names:
        parts.append(_built_in(model, names, length, seed))
    if paths:
        from kvjax.eval.tasks.local_data import read_local

        parts.append(read_local(model, paths, length=length, contexts=contexts))
    doubled = [t for part in parts[1:] for t in part.tasks if t in names]
    if doubled:
        raise InputError(
            f"the task {doubled[0]} is named twice, once built in and once in a file: rename the file"
        )
    return parts[0] if len(parts) == 1 else Mixed(tuple(parts))


def _is_path(task: str) -> bool:
    looks = task.endswith(".jsonl") or os.sep in task
    return looks or (task not in recall_tasks.TASKS and Path(task).exists())


def _built_in(model: Model, names: tuple[str, ...], length: int | None, seed: int) -> Suite:
    if not speaks_recall(model):
        from kvjax.eval.tasks.words import make_words

        return make_words(model, names, length=length, seed=seed)
    try:
        suite = Recall(names, length or LENGTH, seed)
        suite.rows(0, "aware")
    except ValueError as error:
        raise InputError(str(error)) from error
    return suite


def speaks_recall(model: Model) -> bool:
    """Whether a model's tokens are the words of the recall language (its tokenizer may be missing)."""
    if model.config.vocab != recall.VOCAB:
        return False
    return model.tokenizer is None or model.tokenizer.token_to_id(recall.WORDS[-1]) == recall.VOCAB - 1


# --- text and tokens -----------------------------------------------------------------------------------


class Reader(NamedTuple):
    """A tokenizer as suites use it: special tokens are not added; those that open a text are `bos`."""

    tokenizer: Any
    name: str
    bos: tuple[int, ...]

    def split(self, *pieces: str) -> list[tuple[int, ...]]:
        """Ids of each piece of a text, tokenised as one; a token over a border belongs to what follows."""
        try:
            found = self.tokenizer.encode("".join(pieces), add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise self._cannot_read("".join(pieces), error) from error
        starts, ends = np.array(found.offsets, np.int64).reshape(-1, 2).T
        borders = np.cumsum([len(piece) for piece in pieces])[:-1]
        cuts = np.minimum(np.searchsorted(starts, borders, "left"), np.searchsorted(ends, borders, "right"))
        ids = found.ids
        return [tuple(ids[a:b]) for a, b in itertools.pairwise([0, *cuts.tolist(), len(ids)])]

    def after(self, *pieces: str) -> list[tuple[int, ...]]:
        """`split` of what stands behind the end of a sentence."""
        return self.split(".", *pieces)[1:]

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def words(self, ids: Sequence[int]) -> list[str]:
        """What each token reads as."""
        return [
            self.tokenizer.decode([i], skip_special_tokens=False).strip() or self.tokenizer.id_to_token(i)
            for i in ids
        ]

    def reads(self, word: str) -> bool:
        """Whether a word comes back from its tokens: no unknown token stands for it, nothing is dropped."""
        try:
            ids = self.tokenizer.encode(word, add_special_tokens=False).ids
        except Exception:
            return False
        return word.lower() in self.text(ids).lower().replace(" ", "")

    def _cannot_read(self, text: str, error: Exception) -> InputError:
        words = (w for w in text.split() if not self.reads(w))
        what = next((f"knows no word {w!r}" for w in words), f"failed ({error})")
        return InputError(f"the tokenizer of {self.name} {what}: expected a text in the model's own words")


def reader_of(model: Model) -> Reader:
    """The model's tokenizer, without truncation or padding; InputError where it has none.

    >>> from kvjax.models.load import load
    >>> reader_of(load("recall-tiny")).split("<get> brave", " otter")
    [(3, 12), (64,)]
    """
    tokenizer = recall.tokenizer() if speaks_recall(model) else model.tokenizer
    if tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer.json, expected one beside its weights: put it there")
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    empty = plain.encode("")
    first = model.special_tokens.get("bos_token")
    opens = plain.token_to_id(first) if first else None
    bos = itertools.takewhile(
        lambda pair: pair[1] and (pair[0] == opens or pair[0] not in model.stop_ids),
        zip(empty.ids, empty.special_tokens_mask, strict=True),
    )
    return Reader(plain, model.name, tuple(i for i, _ in bos))


# --- answers -------------------------------------------------------------------------------------------


def new_tokens(sample: Any) -> int:
    """How many tokens the model writes itself: 0 for samples whose answer is forced."""
    return getattr(sample, "max_new_tokens", 0)


def most_new_tokens(rows: Sequence[Sequence[Any]]) -> int:
    """The largest `new_tokens` of rows of samples: the room a cache needs beyond what is forced."""
    return max((new_tokens(sample) for row in rows for sample in row), default=0)


def row_new_tokens(rows: Rows) -> Int[np.ndarray, "B"]:
    """Per row of a batch, how many tokens its last sample writes; 0 for the rows that only fill it up."""
    out = np.zeros(rows.prompt.shape[0], np.int32)
    for i, turns in enumerate(rows.turns):
        out[i] = new_tokens(turns[-1][1])
    return out


def predicted(sample: Any, said: Int[np.ndarray, "S"], start: int) -> list[int]:
    """A sample's answer in a row of `generate_answers`, `start` being the step that predicts its first token.

    >>> from types import SimpleNamespace
    >>> predicted(SimpleNamespace(answer=(7, 8)), np.array([3, 7, 9, 5], np.int32), 1)
    [7, 9]
    """
    count = new_tokens(sample) or len(sample.answer)
    return [int(i) for i in said[start : start + count] if i >= 0]


@partial(jax.jit, static_argnames=("run", "width"))
def generate_answers(
    run: Run,
    params: Params,
    cache: Cache,
    forced: Int[Array, "B F"],
    count: Int[Array, "B"],
    again: Bool[Array, "B"],
    new: Int[Array, "B"],
    stop: Int[Array, "N"],
    *,
    width: int,
) -> Int[Array, "B S"]:
    """Greedy predictions of S = F + width steps: behind every forced token, then behind the model's own.

    Row b is fed forced[b, :count[b]] one by one and then its own predictions until new[b] tokens are written
    or one of `stop` is said. Steps that a row did not make, and a stop that ended it, are -1. again: the
    first forced token is the prompt's last one, asked again. width (static): at least new.max().
    """
    fed = jnp.pad(forced, ((0, 0), (0, width)))
    limit = count + jnp.maximum(new - 1, 0)

    def unfinished(carry: tuple[Array, Cache, Array, Array]) -> Array:
        i, _, _, done = carry
        return ((i < limit) & ~done).any()

    def body(carry: tuple[Array, Cache, Array, Array]) -> tuple[Array, Cache, Array, Array]:
        i, cache, said, done = carry
        own = said[:, jnp.maximum(i - 1, 0)]
        token = jnp.where(i < count, fed[:, i], jnp.maximum(own, 0))
        live = (i < limit) & ~done
        logits, cache = steps.step_fn(run, params, cache, token, live & ~(again & (i == 0)))
        best = jnp.argmax(logits, -1).astype(jnp.int32)
        ends = (new > 0) & (i >= count - 1) & (best[:, None] == stop[None]).any(-1)
        said = said.at[:, i].set(jnp.where(live & ~ends, best, -1))
        return i + 1, cache, said, done | ends

    start = jnp.zeros((), jnp.int32), cache, jnp.full_like(fed, -1), jnp.zeros(count.shape, bool)
    return jax.lax.while_loop(unfinished, body, start)[2]

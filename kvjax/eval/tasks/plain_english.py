"""Questions for any model with a tokenizer: plain English in words of the tokenizer's vocabulary.

A context is filler sentences with facts scattered among them; questions follow it:

    The code of amber harbor is 52 17 94.                      get: the code of a name
    The code of calm river is the same as that of old tower.   chase: the other name and its code
    The second code of old tower is 31 70 22.                  all: both codes of a name
    The code of amber tower is 18 40 63.                       multikey: get, among similar names

and copy: continue a passage of the text. The tasks mirror those of the recall language.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np
from jaxtyping import Int

from kvjax.base.errors import InputError
from kvjax.eval.tasks import recall_tasks
from kvjax.eval.tasks.reader import SuiteTokenizer, reader_of
from kvjax.eval.tasks.sample import LENGTH, TASKS, ForcedSample, Graded, Sample
from kvjax.models.model import Model

_FIRST = """amber brave bright calm clever cold dark deep early fair fast fresh gentle golden grand green
happy heavy hidden honest kind large light little lucky modern narrow noble old open plain proud quick quiet
red rich round sharp silent silver simple small soft strong sweet tall warm white wild""".split()
_SECOND = """bear bird boat bridge camp castle cat church city cloud coast crown dog door eagle engine farm
field fire fish flower forest fox garden gate harbor hill horse island king lake lion moon mountain ocean
queen river road rock ship star stone storm sun sword tiger tower tree valley village wolf""".split()
_THINGS = """afternoon apple baby bag ball bank bed book bottle box bread brother car chair child clock coat
corner country cup doctor dress evening family farmer father finger floor food friend glass group hand hat
heart home hospital hour house kitchen lamp letter market milk money month morning mother night office page
paper park party people phone picture plan school sister street table teacher train wall water""".split()
_FILLERS = (
    " The {} and the {} stayed near the {}.",
    " A {} was left by the {} in the {}.",
    " Then the {} came back with the {} and a {}.",
    " Nobody saw the {} behind the {} and the {}.",
    " Later the {} went from the {} to the {}.",
)
_INTRO = "This text names some codes. Questions about them follow at its end."
_VALUE = " The code of {} is {}."
_POINTER = " The code of {} is the same as that of {}."
_SECOND_VALUE = " The second code of {} is {}."
_PADDING = (" Next came", ".")
# Question and answer of every task; names and codes are filled in.
_ASKED = {
    "get": (" What is the code of {0}? The code is", " {1}."),
    "chase": (" Whose code does {0} share, and what is it (name, code)? It is that of", " {1}, {2}."),
    "all": (" What are both codes of {0}? The codes are", " {1} and {2}."),
    "multikey": (" What is the code of {0}? The code is", " {1}."),
}
_COPY = " Repeat the passage of the text that begins with these words:"
_CUE, _COPIED = range(6, 17), (8, 24)

_ENOUGH = 24  # words per kind: 576 names
_DENSITY, _MAX_FACTS, _LOOKALIKES = 0.35, 200, 3


# --- words --------------------------------------------------------------------------------------------


class _Vocabulary(NamedTuple):
    """Words by their use, and how many tokens each costs after another word."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    things: tuple[str, ...]
    cost: Mapping[str, int]

    def longest(self, words: Iterable[str]) -> str:
        return max(words, key=lambda w: self.cost[w])

    @property
    def longest_name(self) -> str:
        return f"{self.longest(self.first)} {self.longest(self.second)}"

    @property
    def longest_value(self) -> str:
        return " ".join([self.longest(_NUMBERS)] * 3)


_NUMBERS = tuple(str(n) for n in range(10, 100))


def _vocabulary(reader: SuiteTokenizer) -> _Vocabulary:
    """English words of one token if there are enough, then other words of one token, then longer ones."""
    fixed = " ".join([_INTRO, _VALUE, _POINTER, _SECOND_VALUE, *_FILLERS, _COPY, *_NUMBERS])
    fixed += "".join(part for pair in _ASKED.values() for part in pair)
    for word in re.sub(r"\{\d?\}", " ", fixed).split():
        if not reader.reads(word):
            raise InputError(
                f"the tokenizer of {reader.name} cannot write {word!r}, expected one for English text and "
                "numbers: give --tasks a JSONL file, or use --text"
            )
    cost = {w: len(reader.after(" " + w)[0]) for w in _NUMBERS}
    spare = _spare_words(reader, {*fixed.split(), *_FIRST, *_SECOND, *_THINGS})
    chosen: list[tuple[str, ...]] = []
    for words in (_FIRST, _SECOND, _THINGS):
        known = {w: len(reader.after(" " + w)[0]) for w in words if reader.reads(w)}
        best = [w for w in known if known[w] == 1]
        best += itertools.islice(spare, max(0, _ENOUGH - len(best)))
        best += [w for w in known if known[w] > 1][: max(0, _ENOUGH - len(best))]
        if len(best) < _ENOUGH:
            raise InputError(
                f"the tokenizer of {reader.name} knows too few words to ask about, expected {3 * _ENOUGH}: "
                "give --tasks a JSONL file, or use --text"
            )
        cost |= {w: known.get(w, 1) for w in best}
        chosen.append(tuple(best))
    first, second, things = chosen
    return _Vocabulary(first, second, things, cost)


def _spare_words(reader: SuiteTokenizer, taken: set[str]) -> Iterator[str]:
    """Lower-case words of one token from the tokenizer's own vocabulary, the most frequent first."""
    for token, _ in sorted(reader.tokenizer.get_vocab().items(), key=lambda item: item[1]):
        word = token.lstrip("Ġ▁")
        plain = word.isascii() and word.isalpha() and word.islower() and 3 <= len(word) <= 10
        if plain and word not in taken and reader.reads(word) and len(reader.after(" " + word)[0]) == 1:
            taken.add(word)
            yield word


# --- contexts ------------------------------------------------------------------------------------------


class _Fact(NamedTuple):
    text: str
    name: str
    content: str


class _Context(NamedTuple):
    """Ids of a context, the starts of its sentences, possible questions per task, and facts' positions."""

    ids: Int[np.ndarray, "T"]
    starts: Int[np.ndarray, "S"]
    subjects: dict[str, list[tuple[_Fact, ...]]]
    spans: dict[_Fact, tuple[int, int]]


def make_words(
    model: Model, tasks: Sequence[str] = TASKS, *, length: int | None = None, seed: int = 0
) -> PlainEnglish:
    """Make questions for a model with a tokenizer; context and question fit `length` tokens (default 512).

    Raises InputError for unknown tasks, a model without a tokenizer or with one that cannot write English,
    and a length that is too short for the questions (naming the minimum) or beyond the model's positions.

    >>> from kvjax.io.load import load
    >>> make_words(load("path/to/model"), ["get"], length=256).rows(0, "aware")  # doctest: +SKIP
    """
    for task in tasks:
        if task not in TASKS:
            near = difflib.get_close_matches(task, TASKS, 1, cutoff=0.0)[0]
            raise InputError(
                f"unknown task {task!r}: did you mean {near!r}? The tasks are {', '.join(TASKS)}, and "
                "files of RULER or LongBench records (path.jsonl)"
            )
    reader = reader_of(model)
    words = PlainEnglish(tuple(tasks), length or LENGTH, seed, reader, _vocabulary(reader))
    most = model.config.max_positions - words.answer_tokens
    if length is None:
        words = dataclasses.replace(words, length=min(LENGTH, most))
    if words.length > most:
        raise InputError(
            f"--length {words.length} and an answer of {words.answer_tokens} tokens reach beyond the model's "
            f"{model.config.max_positions} positions: expected at most {most}"
        )
    words.check(words.tasks)
    return words


@dataclasses.dataclass(frozen=True)
class PlainEnglish:
    """Questions in English; a sample is a pure function of (tasks, seed, index, length) and the tokenizer."""

    tasks: tuple[str, ...]
    length: int
    seed: int
    reader: SuiteTokenizer
    vocabulary: _Vocabulary
    turns: int = 5
    contexts: int | None = None
    sources: tuple[str, ...] = ()

    @property
    def answer_tokens(self) -> int:
        """The longest answer."""
        return max([_COPIED[1], *(len(self._longest(t)[1]) for t in _ASKED)])

    def rows(self, index: int, protocol: str) -> list[Sequence[Sample]]:
        """One row per task about context number `index`; one row with several turns for "multi-turn"."""
        if protocol != "multi-turn":
            return [[sample] for sample in self._samples(index, self.tasks)]
        return [self._samples(index, tuple(itertools.islice(itertools.cycle(self.tasks), self.turns)))]

    def grade(self, sample: Sample, prediction: Sequence[int]) -> Graded:
        """Exact match of the tokens; the share of right ones for copy."""
        said, right = (self.reader.text(ids).strip() for ids in (prediction, sample.answer))
        return Graded(said, right, recall_tasks.score(sample.task, list(prediction), sample.answer))

    def words(self, ids: Sequence[int]) -> list[str]:
        return self.reader.words(ids)

    def check(self, tasks: Sequence[str]) -> None:
        """Raise InputError if `length` cannot hold the facts that these questions need."""
        facts = {"get": 1, "chase": 2, "all": 2, "multikey": 1 + _LOOKALIKES, "copy": 0}
        need = sum(facts[t] for t in tasks) * self._fact_tokens() + self._question_tokens(tasks)
        need += len(self.reader.bos) + len(self.reader.split(_INTRO)[0])
        need += _CUE[-1] + _COPIED[1] if "copy" in tasks else 0
        if self.length < need:
            raise InputError(
                f"{len(tasks)} question(s) ({', '.join(tasks)}) need a length of {need} tokens or more with "
                f"the tokenizer of {self.reader.name}, got {self.length}: raise --length or ask fewer --tasks"
            )

    # --- one context ---

    def _samples(self, index: int, tasks: tuple[str, ...]) -> list[ForcedSample]:
        self.check(tasks)
        group = crc32("+".join(sorted(tasks)).encode())
        context = self._context(np.random.default_rng([self.seed, group, index]), tasks)
        ids = tuple(context.ids.tolist())
        out = []
        for i, task in enumerate(tasks):
            turn = tasks[:i].count(task)
            if task == "copy":
                rng = np.random.default_rng([self.seed, crc32(task.encode()), index, turn])
                question, answer, spans = self._ask_copy(rng, context)
            else:
                facts = context.subjects[task][turn]
                question, answer = self._ask(task, facts)
                spans = tuple(context.spans[fact] for fact in facts)
            name = f"{task}-{self.length}-s{self.seed}-i{index}-q{turn}-{group:08x}"
            out.append(ForcedSample(name, task, ids, question, answer, spans))
        return out

    def _ask(self, task: str, facts: tuple[_Fact, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        question, answer = _ASKED[task]
        blanks = facts[0].name, *(fact.content for fact in facts)
        asked, right = self.reader.after(question.format(*blanks), answer.format(*blanks))
        return asked, right

    def _ask_copy(
        self, rng: np.random.Generator, context: _Context
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Take a cue from a sentence's start, long enough to occur once if possible; and what follows it."""
        count = int(rng.integers(*_COPIED))
        fits = context.starts[context.starts + _CUE[-1] + count <= len(context.ids)].tolist()
        start, cue = fits[0], _CUE[-1]
        # The first sentence comes last: it is the same in every context.
        for at, size in itertools.product([*rng.permutation(fits[1:]).tolist(), start], _CUE):
            windows = np.lib.stride_tricks.sliding_window_view(context.ids, size)
            if (windows == context.ids[at : at + size]).all(-1).sum() == 1:
                start, cue = at, size
                break
        cut, end = start + cue, start + cue + count
        words = tuple(context.ids[start:cut].tolist())
        return (*self.reader.after(_COPY)[0], *words), tuple(context.ids[cut:end].tolist()), ((start, end),)

    def _context(self, rng: np.random.Generator, tasks: tuple[str, ...]) -> _Context:
        """Facts and filler in random order; as long as the longest question leaves room for."""
        limit = self.length - self._question_tokens(tasks)
        subjects, facts = self._facts(rng, tasks, _DENSITY * limit)
        bos, seed = len(self.reader.bos), int(rng.integers(2**32))
        filler = limit - bos - sum(len(p) for p in self.reader.split(_INTRO, *(f.text for f in facts)))
        found = None
        # Sentences may have more or fewer tokens together than apart, so the filler is corrected a few times.
        for _ in range(8):
            draw = np.random.default_rng(seed)
            texts = [*(fact.text for fact in facts), *self._filler(draw, filler)]
            order = draw.permutation(len(texts)).tolist()
            pieces = self.reader.split(_INTRO, *(texts[i] for i in order))
            ends = np.cumsum([bos, *(len(p) for p in pieces)])
            if ends[-1] <= limit and (found is None or ends[-1] > found[2][-1]):
                found = order, pieces, ends
            if ends[-1] == limit:
                break
            filler += int(limit - ends[-1])
        if found is None:
            raise InputError(
                f"the facts asked about do not fit --length {self.length} with the tokenizer of "
                f"{self.reader.name}: raise it or ask fewer --tasks"
            )
        order, pieces, ends = found
        ids = np.array([*self.reader.bos, *itertools.chain(*pieces)], np.int64)
        spans = {
            facts[i]: (int(ends[at + 1]), int(ends[at + 2])) for at, i in enumerate(order) if i < len(facts)
        }
        return _Context(ids, ends[:-1], subjects, spans)

    def _filler(self, rng: np.random.Generator, tokens: int) -> list[str]:
        """Filler sentences of `tokens` tokens together, as far as words of one token allow."""
        cost, things = self.vocabulary.cost, self.vocabulary.things
        frames = {f: len(self.reader.after(f.format("a", "a", "a"))[0]) - 3 for f in _FILLERS}
        padding = len(self.reader.after("".join(_PADDING))[0])
        longest = max(frames.values()) + 3 * max(cost[w] for w in things)
        out = []
        while tokens >= longest + padding:
            frame = list(frames)[int(rng.integers(len(frames)))]
            words = [things[i] for i in rng.choice(len(things), 3, replace=False)]
            out.append(frame.format(*words))
            tokens -= frames[frame] + sum(cost[w] for w in words)
        last = [things[i] for i in rng.permutation(len(things))]
        room = np.searchsorted(np.cumsum([padding, *(cost[w] for w in last)]), tokens, side="right") - 1
        if room > 0:
            out.append(_PADDING[0] + "".join(f" {w}" for w in last[:room]) + _PADDING[1])
        return out

    def _facts(
        self, rng: np.random.Generator, tasks: tuple[str, ...], tokens: float
    ) -> tuple[dict[str, list[tuple[_Fact, ...]]], list[_Fact]]:
        """Draw the facts tasks ask about, and all facts: more of these kinds, up to about `tokens` tokens."""
        draw = _Draw(rng, self.vocabulary)
        subjects: dict[str, list[tuple[_Fact, ...]]] = {}
        facts: list[_Fact] = []
        for task in sorted(set(tasks) - {"copy"}, reverse=True):  # tasks with similar names first
            for _ in range(tasks.count(task)):
                asked, beside = draw.subject(task)
                subjects.setdefault(task, []).append(asked)
                facts += [*asked, *beside]
        most = min(_MAX_FACTS, int(tokens) // self._fact_tokens())
        kinds = itertools.cycle(["get", "get", "chase", "all"])
        while len(facts) < most:
            facts += draw.subject(next(kinds))[0]
        return subjects, facts

    # --- longest forms ---

    def _longest(self, task: str) -> tuple[tuple[int, ...], ...]:
        """Find the longest question of a task and its longest answer."""
        name, value = self.vocabulary.longest_name, self.vocabulary.longest_value
        blanks = (name, name if task == "chase" else value, value)
        return tuple(self.reader.after(*(part.format(*blanks) for part in _ASKED[task])))

    def _question_tokens(self, tasks: Sequence[str]) -> int:
        copy = len(self.reader.after(_COPY)[0]) + _CUE[-1]
        return max(copy if task == "copy" else len(self._longest(task)[0]) for task in tasks)

    def _fact_tokens(self) -> int:
        """Find the longest fact."""
        name, value = self.vocabulary.longest_name, self.vocabulary.longest_value
        texts = (_POINTER.format(name, name), _SECOND_VALUE.format(name, value))
        return max(len(self.reader.after(text)[0]) for text in texts)


class _Draw:
    """Draws the facts of one context; no name and no code occurs twice."""

    def __init__(self, rng: np.random.Generator, vocabulary: _Vocabulary):
        self.rng, self.vocabulary = rng, vocabulary
        self.used: set[str] = set()

    def name(self, first: str | None = None, second: str | None = None) -> str:
        """Draw a new name; one of its words may be given."""
        while True:
            a = first or self.vocabulary.first[int(self.rng.integers(len(self.vocabulary.first)))]
            b = second or self.vocabulary.second[int(self.rng.integers(len(self.vocabulary.second)))]
            if self._new(f"{a} {b}"):
                return f"{a} {b}"

    def code(self) -> str:
        while True:
            text = " ".join(str(n) for n in self.rng.integers(10, 100, 3))
            if self._new(text):
                return text

    def _new(self, text: str) -> bool:
        new = text not in self.used
        self.used.add(text)
        return new

    def subject(self, task: str) -> tuple[tuple[_Fact, ...], tuple[_Fact, ...]]:
        """Draw the facts that one question of a task needs, in order, and the facts that make it hard."""
        fact = self._value(self.name())
        if task == "chase":
            name = self.name()
            return (_Fact(_POINTER.format(name, fact.name), name, fact.name), fact), ()
        if task == "all":
            code = self.code()
            return (fact, _Fact(_SECOND_VALUE.format(fact.name, code), fact.name, code)), ()
        if task == "multikey":
            first, second = fact.name.split(" ")
            alike = [self.name(first=first), self.name(second=second), self.name(first=first)]
            return (fact,), tuple(self._value(name) for name in alike)
        return (fact,), ()

    def _value(self, name: str) -> _Fact:
        code = self.code()
        return _Fact(_VALUE.format(name, code), name, code)

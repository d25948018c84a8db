"""Converts records to samples: token ids with the chat template around them, cut as the benchmark cuts."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence

from kvjax.base.errors import InputError
from kvjax.eval.tasks.chats import around_user, between_users, chat_reader
from kvjax.eval.tasks.cuts import Ids, Spans, cut_end, cut_middle
from kvjax.eval.tasks.published.record import BenchmarkForm, BenchmarkQuestion, BenchmarkRecord, Dialogue
from kvjax.eval.tasks.reader import SuiteTokenizer
from kvjax.eval.tasks.sample import OpenSample
from kvjax.models.model import Model


class TooLong(Exception):
    """A prompt is too long and its benchmark does not cut it; the message has its length."""


class Chats:
    """A model's tokenizer, and cached results of its chat template, since each rendering starts a process."""

    def __init__(self, model: Model):
        self.model, self.reader = model, chat_reader(model)
        self._frames: dict[str, tuple[str, str]] = {}

    def frame(self, before: Sequence[Mapping[str, str]] = ()) -> tuple[str, str]:
        """Return the template's text around a user's message after others; long chats are not cached."""
        if len(before) > 1:
            return around_user(self.model, before)
        key = repr(before)
        if key not in self._frames:
            self._frames[key] = around_user(self.model, before)
        return self._frames[key]

    @functools.cached_property
    def between(self) -> tuple[str, str, str]:
        """The template's text between a user's messages."""
        return between_users(self.model)


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Turns records of one form into samples. length: the most tokens of a prompt, without answers."""

    chats: Chats
    form: BenchmarkForm
    length: int | None = None
    max_new_tokens: int | None = None

    @property
    def model(self) -> Model:
        return self.chats.model

    @property
    def reader(self) -> SuiteTokenizer:
        return self.chats.reader

    def samples(self, record: BenchmarkRecord, name: str) -> list[OpenSample]:
        """One sample per question. InputError for one that does not fit; TooLong if the form skips it."""
        head, tail = self.chats.frame(record.before)
        talk = any(message["role"] != "system" for message in record.before)
        if talk and self.model.chat_template is None:
            raise InputError(
                f"{record.where} is a conversation, and {self.model.name} has no chat template: take a model "
                "that chats, or leave the file out"
            )
        tail = tail if self.model.chat_template is not None else self.form.plain_end
        many = len(record.turns) > 1
        new = [self._new_tokens(turn) for turn in record.turns]
        ids = [self._ids(record, head, turn.question + tail + turn.prefix) for turn in record.turns]
        # Questions about one context are asked of the same tokens.
        fits = min(
            self._limit(record, n, len(question)) - len(question)
            for n, (_, question, _) in zip(new, ids, strict=True)
        )
        found = []
        for i, (turn, (context, question, spans)) in enumerate(zip(record.turns, ids, strict=True)):
            if len(context) > fits:
                context, spans = self._cut(context, question, spans, fits, head, tail + turn.prefix)
            task, number = turn.task or record.task, f"{name}-{i + 1}" if many else name
            found.append(OpenSample(number, task, context, question, spans, turn.references, new[i]))
        return found

    def dialogue(self, record: BenchmarkRecord, name: str) -> list[OpenSample]:
        """One sample per question, after those before it and the right answers to them.

        The first question, except its last token, is part of the prompt that is compressed.
        """
        assert record.dialogue is not None
        first, *later = self._dialogue_ids(record.dialogue)
        new = [self._new_tokens(turn) for turn in record.turns]
        follows = [*itertools.accumulate((len(ids) for ids in later), initial=0)]
        most = max(a + b for a, b in zip(follows, new, strict=True))
        limit = self._limit(record, most, 1)
        kept, _ = cut_middle(first, (), (), limit)
        return [
            OpenSample(
                f"{name}-turn-{i + 1}", turn.task or record.task, kept[:-1],
                (kept[-1], *itertools.chain(*later[:i])), (), turn.references, new[i],
            )
            for i, turn in enumerate(record.turns)
        ]  # fmt: skip

    def _dialogue_ids(self, said: Dialogue) -> list[Ids]:
        bos, read = self.reader.bos, lambda text: self.reader.split(text)[0]
        if self.model.chat_template is None:
            first, *later = said.plain
            return [(*bos, *read(first)), *map(read, later)]
        (head, tail), (before, between, after) = self.chats.frame(), self.chats.between
        later = [
            before + answer + between + user + after + said.opens
            for answer, user in zip(said.answers, said.users[1:], strict=False)
        ]
        return [(*bos, *read(head + said.users[0] + tail)), *map(read, later)]

    def _cut(
        self, context: Ids, question: Ids, spans: Spans, fits: int, head: str, end: str
    ) -> tuple[Ids, Spans]:
        """Cut the context to `fits` tokens, or raise TooLong, as the form says; return its spans, too."""
        if self.form.cut == "skip":
            raise TooLong(f"{len(context) + len(question)} tokens, and {fits + len(question)} fit")
        if self.form.cut == "end":
            return cut_end(context, spans, fits)
        if self.form.apart:
            return cut_middle(context, (), spans, fits)
        # The benchmark cuts the user's message, before the chat template is applied.
        before, after = (len(self.reader.split(text)[0]) for text in (head, end))
        before, after = before + len(self.reader.bos), min(after, len(question))
        inner = tuple((a - before, b - before) for a, b in spans)
        kept, inner = cut_middle(
            context[before:], question[: len(question) - after], inner, fits + len(question) - before - after
        )
        return context[:before] + kept, tuple((a + before, b + before) for a, b in inner)

    def _ids(self, record: BenchmarkRecord, head: str, asked: str) -> tuple[Ids, Ids, Spans]:
        """Ids of context and question, and the spans of the needles in the context."""
        needles = "|".join(re.escape(needle) for needle in record.needles if needle)
        pieces = re.split(f"({needles})", record.context) if needles else [record.context]
        pieces = [head + pieces[0], *pieces[1:]]
        if self.form.apart:
            parts, question = self.reader.split(*pieces), self.reader.split(asked)[0]
        else:
            *parts, question = self.reader.split(*pieces, asked)
        context = (*self.reader.bos, *itertools.chain(*parts))
        if not question:
            context, question = context[:-1], context[-1:]
        if not context:
            raise InputError(f"{record.where}: context and question hold no two tokens, expected a text")
        ends = [*itertools.accumulate((len(p) for p in parts), initial=len(self.reader.bos))]
        spans = tuple((a, min(b, len(context))) for a, b in [*itertools.pairwise(ends)][1::2])
        return context, question, tuple(span for span in spans if span[1] > span[0])

    def _new_tokens(self, turn: BenchmarkQuestion) -> int:
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if turn.new_tokens is not None:
            return turn.new_tokens
        return 2 * len(self.reader.split(turn.references[0])[0])

    def _limit(self, record: BenchmarkRecord, new: int, question: int) -> int:
        """Find the most tokens of context and question; error if a question leaves no room for a context."""
        last = self.model.config.max_positions
        limit = last - new if self.length is None else min(self.length, last - new)
        if limit > question:
            return limit
        if self.form.cut == "skip" and last > new:
            raise TooLong(f"a question of {question} tokens, and {limit} fit")
        if self.length is not None and last - new > question:
            raise InputError(
                f"{record.where}: the question has {question} tokens, expected fewer than --length "
                f"{self.length}: raise it"
            )
        raise InputError(
            f"{record.where}: a question of {question} tokens and an answer of up to {new} leave nothing of "
            f"the {last} positions of {self.model.name} to the context: give fewer tokens to the answer, as "
            f"in {self.form.name}:FILE,max_new_tokens={max(last // 4, 1)}"
        )

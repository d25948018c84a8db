"""Rows: samples as padded arrays. A row is a prompt, then a forced text whose predictions are scored.

The model reads the prompt, compresses, and is then fed the questions and the right answers token by token;
its prediction at every position of an answer is compared with the answer. An answer is right under greedy
decoding exactly when all of these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from kvjax.eval.tasks.sample import OpenSample, Sample

PROTOCOLS = ("agnostic", "aware", "aware-unprotected", "multi-turn")
# Protocols whose prompts end with the question; of these, protocols that protect the question from eviction.
ASKED_FIRST, STAYS = ("aware", "aware-unprotected"), ("aware",)


class QuestionRows(NamedTuple):
    """A batch of questions, with the tokens that are fed after the prompt.

    `forced` is fed after the prompt; `turns` holds, per row, (start, sample) of every question: prediction j
    of its answer comes after token start + j of `forced`.

    again: the first forced token is the prompt's last one, read again over the compressed cache. newest: how
    many of the prompts' last tokens are protected under any method. of: the prompt of each row, if several
    rows ask about one; None: each has its own, and P = B.
    """

    prompt: Int[np.ndarray, "P T"]
    length: Int[np.ndarray, "P"]
    forced: Int[np.ndarray, "B F"]
    count: Int[np.ndarray, "B"]
    again: Bool[np.ndarray, "B"]
    turns: list[list[tuple[int, Sample]]]
    newest: int = 1
    of: Int[np.ndarray, "B"] | None = None


def make_rows(
    rows: Sequence[Sequence[Sample]],
    protocol: str,
    tokens: int,
    forced_tokens: int,
    batch: int,
    newest: int = 1,
    prompts: int | None = None,
) -> QuestionRows:
    """Arrange samples as arrays of `batch` rows; the last batch is filled up by repeating its first row.

    agnostic and multi-turn: the prompt is the context. aware: the prompt ends with the question, whose tokens
    are protected, and its last token is read again; aware-unprotected: the same, but only the last token is
    protected. prompts: how many distinct prompts there are; each is read once for all its rows
    (`prompts_of`).
    """
    shared = prompts is not None
    number = prompts_of(rows, protocol) if shared else list(range(len(rows)))
    number += [number[0] if shared else i for i in range(len(rows), batch)]
    prompt = np.zeros((batch if prompts is None else prompts, tokens), np.int32)
    forced = np.zeros((batch, forced_tokens), np.int32)
    length, count = np.ones(len(prompt), np.int32), np.zeros(batch, np.int32)
    turns: list[list[tuple[int, Sample]]] = []
    for i in range(batch):
        row = rows[i] if i < len(rows) else rows[0]
        first = row[0]
        if protocol in ASKED_FIRST:
            text = [*first.context, *first.question]
            after, starts = [first.question[-1], *first.answer[:-1]], [(0, first)]
        else:
            text, after, starts = list(first.context), [], []
            for sample in row:
                after += sample.question
                starts.append((len(after) - 1, sample))
                after += sample.answer
        prompt[number[i], : len(text)], length[number[i]] = text, len(text)
        forced[i, : len(after)], count[i] = after, len(after)
        if i < len(rows):
            turns.append(starts)
    again = np.full(batch, protocol in ASKED_FIRST)
    # Unused rows repeat the first prompt.
    free = len({*number})
    prompt[free:], length[free:] = prompt[0], length[0]
    of = np.array(number, np.int32) if shared else None
    return QuestionRows(prompt, length, forced, count, again, turns, newest, of)


def prompts_of(rows: Sequence[Sequence[Sample]], protocol: str) -> list[int]:
    """Return the index of each row's prompt: rows with generated answers about one context share a prompt.

    Rows with forced answers have a prompt each, so that methods with random draws draw for each question.
    """
    if protocol in ASKED_FIRST or not all(isinstance(row[0], OpenSample) for row in rows):
        return list(range(len(rows)))
    numbers: dict[tuple[int, ...], int] = {}
    return [numbers.setdefault(row[0].context, len(numbers)) for row in rows]


def targets_of(rows: QuestionRows) -> Int[np.ndarray, "B F"]:
    """Return the answer token that must follow each forced token; -1 if none does."""
    out = np.full(rows.forced.shape, -1, np.int32)
    for i, turns in enumerate(rows.turns):
        for start, sample in turns:
            out[i, start : start + len(sample.answer)] = sample.answer
    return out


def forced_length(rows: Sequence[Sequence[Sample]], protocol: str | None = None) -> int:
    """Find the most tokens a protocol feeds after a prompt; without `protocol`, that any of them feeds."""
    if protocol in ASKED_FIRST:
        return max(len(row[0].answer) for row in rows)
    return max(sum(len(s.question) + len(s.answer) for s in row) for row in rows)

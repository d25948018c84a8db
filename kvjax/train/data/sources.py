"""Sources of batches: a run's settings as a stream of rows, with its tokenizer and held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from kvjax.base.errors import InputError
from kvjax.eval.tasks import recall
from kvjax.eval.tasks.associative_recall import pair_count, pairs_batch
from kvjax.eval.tasks.recall_tasks import MIX, training_batch
from kvjax.io.load import load_text
from kvjax.train.data.byte_tokenizer import END, byte_tokenizer
from kvjax.train.data.packing import HeldOut, PackedRows, Stream, StreamPosition, held_out_rows
from kvjax.train.data.prefetch import Prefetcher
from kvjax.train.data.texts import read_texts
from kvjax.train.settings import OF_WORDS, Data, Loop


@runtime_checkable
class Source(Protocol):
    """An endless stream of rows; `place` is its position."""

    place: StreamPosition

    def next(self, rows: int, length: int) -> PackedRows: ...


class RunTokenizer(NamedTuple):
    """A tokenizer, its number of ids, its end-of-text id, and its models' special tokens."""

    tokenizer: Any
    vocab: int
    end: int
    special: dict[str, str]


class RecallSource:
    """The language of `recall-tiny`; the batch of a step is a function of (seed, step)."""

    def __init__(self, seed: int, place: StreamPosition | None = None, tasks: Sequence[str] = ()):
        self.seed, self.place = seed, place or StreamPosition()
        self.mix = {task: MIX[task] for task in tasks or MIX}

    def batch(self, number: int, rows: int, length: int) -> PackedRows:
        rng = np.random.default_rng([self.seed, number])
        tokens, weights, _ = training_batch(rng, rows, length, self.mix)
        return PackedRows(np.asarray(tokens), np.asarray(weights, np.float32), None)

    def next(self, rows: int, length: int) -> PackedRows:
        self.place.reading += 1
        return self.batch(self.place.reading - 1, rows, length)


class Pairs:
    """Associative recall; the batch of a step is a function of (seed, step)."""

    def __init__(self, seed: int, place: StreamPosition | None = None):
        self.seed, self.place = seed, place or StreamPosition()

    def batch(self, number: int, rows: int, length: int) -> PackedRows:
        tokens, weights = pairs_batch(np.random.default_rng([self.seed, number]), rows, length)
        return PackedRows(tokens, weights, None)

    def next(self, rows: int, length: int) -> PackedRows:
        self.place.reading += 1
        return self.batch(self.place.reading - 1, rows, length)


def words_of(data: Data) -> RunTokenizer:
    """Return a run's tokenizer. Raises InputError if there is none, or none with an end-of-text token."""
    if data.kind in OF_WORDS:
        special = {"bos_token": recall.WORDS[recall.BOS], "pad_token": recall.WORDS[recall.PAD]}
        special["repeat_prompt"] = recall.WORDS[recall.COPY]
        return RunTokenizer(recall.tokenizer(), len(recall.WORDS), recall.PAD, special)
    if data.tokenizer == "bytes":
        tokenizer = byte_tokenizer()
        return RunTokenizer(tokenizer, tokenizer.get_vocab_size(), 256, {"eos_token": END})
    text = load_text(data.tokenizer)
    ends = [text.special_tokens.get(name) for name in ("eos_token", "bos_token")]
    end = next((text.tokenizer.token_to_id(e) for e in ends if e), None) if text.tokenizer else None
    if text.tokenizer is None or end is None:
        raise InputError(
            f"{data.tokenizer} has no tokenizer with an eos_token: set data.tokenizer to 'bytes' or another"
        )
    return RunTokenizer(text.tokenizer, text.tokenizer.get_vocab_size(), end, dict(text.special_tokens))


def source_of(
    data: Data,
    words: RunTokenizer,
    loop: Loop,
    *,
    segments: bool,
    place: StreamPosition | None = None,
    workers: int = 0,
) -> tuple[Source, HeldOut | None]:
    """Return the source of a run and its held-out rows; place: the position to continue from.

    Makes the rows of a first step once: texts that the tokenizer cannot read, or that are all held out, raise
    InputError here.
    workers: processes that make rows of tasks ahead; texts are read in the run's own process.
    """
    if data.kind in OF_WORDS:
        source = _of_tasks(data, loop, place)
        return (Prefetcher(source, workers) if workers else source), None
    texts = read_texts(data)

    def encode(text: str) -> Sequence[int]:
        if data.tokenizer == "bytes" and END not in text:
            return text.encode()  # equals the tokenizer's ids, a hundred times as fast
        try:
            return words.tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # tokenizers has no exception class of its own
            raise InputError(
                f"the tokenizer of {data.tokenizer} cannot read the texts ({error}): give texts of its "
                "language, which for recall-tiny are those of data.kind='recall'"
            ) from error

    held = held_out_rows(
        texts, encode, words.end, loop.length, loop.evaluate_rows, share=data.held_out, segments=segments
    )
    stream = Stream(
        texts, encode, words.end, held_out=data.held_out, segments=segments, seed=data.seed,
    )  # fmt: skip
    stream.next(loop.batch, loop.length)
    stream.place = place or StreamPosition()
    return stream, held


def _of_tasks(data: Data, loop: Loop, place: StreamPosition | None) -> RecallSource | Pairs:
    if data.kind == "recall":
        return RecallSource(data.seed, place, data.tasks)
    for length in {length for _, length, _ in loop.stages} or {loop.length}:
        pair_count(length)
    return Pairs(data.seed, place)

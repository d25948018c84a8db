"""Rows of equal length, cut from texts in a shuffled order, with a position for restarts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from kvjax.base.errors import InputError
from kvjax.train.data.texts import TextSource, is_held_out


class PackedRows(NamedTuple):
    """One batch, S = T + 1. weights: of tokens as targets. segments: which text of its row a token is in."""

    tokens: Int[np.ndarray, "B S"]
    weights: Float[np.ndarray, "B S"]
    segments: Int[np.ndarray, "B S"] | None


# A function from a text to its token ids.
Encode = Callable[[str], Sequence[int]]


@dataclasses.dataclass
class StreamPosition:
    """A stream's position: finished passes, texts begun in this pass, and used tokens of the last text."""

    reading: int = 0
    text: int = 0
    used: int = 0

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StreamPosition:
        """Read the place that `as_json` wrote. Raises InputError for one of an older form, with tokens."""
        if data.get("left"):
            raise InputError(
                "the checkpoint says its place in the texts in an older form: start the run anew"
            )
        return cls(**{name: value for name, value in data.items() if name != "left"})


class Stream:
    """An endless stream of texts, shuffled for every pass, cut into rows of a length and one more token.

    The order is a function of (seed, pass), so a `StreamPosition` is all that a restart needs. A row's last
    token is only a target, and the next row starts with it. Making a row takes time in its own length, not in
    its text's.
    """

    def __init__(
        self, texts: TextSource, encode: Encode, end: int, *, held_out: float, segments: bool,
        seed: int, place: StreamPosition | None = None,
    ):  # fmt: skip
        self.texts, self.encode, self.end = texts, encode, end
        self.held_out, self.segments, self.seed = held_out, segments, seed
        self.place = place or StreamPosition()
        self._order: tuple[int, np.ndarray] | None = None
        # The text that was begun last, as (reading, number), and its tokens.
        self._begun: tuple[tuple[int, int], np.ndarray] | None = None

    def next(self, rows: int, length: int) -> PackedRows:
        """Return the next rows; the place then is after them."""
        tokens = np.stack([self._row(length) for _ in range(rows)])
        return cut(tokens, self.end, self.segments)

    def _row(self, length: int) -> Int[np.ndarray, "S"]:
        place, misses = self.place, 0
        pieces = [self._rest()[: length + 1]]
        found, used = len(pieces[0]), place.used
        while found <= length:
            text = self._next_text()
            if is_held_out(text, self.held_out):
                misses += 1
                if misses > len(self.texts):
                    raise InputError("all texts are held out: lower data.held_out, or give more texts")
                continue
            pieces.append(self._tokens(text)[: length + 1 - found])
            used, found = -found, found + len(pieces[-1])
        place.used = used + length
        return np.concatenate(pieces)

    def _rest(self) -> Int[np.ndarray, "_"]:
        """Return the unused tokens of the text that was begun last."""
        place = self.place
        if not place.text:
            return np.zeros(0, np.int32)
        return self._tokens()[place.used :]

    def _tokens(self, text: str | None = None) -> Int[np.ndarray, "_"]:
        """Read the tokens of the text that was begun last, which is read again if it is not given."""
        at = self.place.reading, self.place.text
        if self._begun is None or self._begun[0] != at:
            text = self._text(self.place.text - 1) if text is None else text
            self._begun = at, np.asarray([*self.encode(text), self.end], np.int32)
        return self._begun[1]

    def _next_text(self) -> str:
        place = self.place
        if place.text >= len(self.texts):
            place.reading, place.text = place.reading + 1, 0
        place.text += 1
        return self._text(place.text - 1)

    def _text(self, number: int) -> str:
        """Read a text of this reading by its number in the shuffled order."""
        reading = self.place.reading
        if self._order is None or self._order[0] != reading:
            rng = np.random.default_rng([self.seed, reading])
            self._order = reading, rng.permutation(len(self.texts))
        return self.texts[int(self._order[1][number])]


def cut(tokens: Int[np.ndarray, "B S"], end: int, segments: bool) -> PackedRows:
    """Rows with their segments, which begin after every `end`. The token after an end is no target."""
    first = np.zeros(tokens.shape, bool)
    first[:, 1:] = tokens[:, :-1] == end
    return PackedRows(
        tokens, (~first).astype(np.float32), np.cumsum(first, 1, dtype=np.int32) if segments else None
    )


class HeldOut(NamedTuple):
    """Rows that are never trained on, and the mean number of bytes per token in them."""

    rows: PackedRows
    bytes_per_token: float


def held_out_rows(
    texts: TextSource, encode: Encode, end: int, length: int, rows: int, *, share: float, segments: bool
) -> HeldOut | None:
    """Return the first held-out rows, in the order of the texts; None if no text is held out.

    Raises InputError if they are shorter than one row.
    """
    ids: list[int] = []
    size = 0
    for index in range(len(texts) if share else 0):
        text = texts[index]
        if is_held_out(text, share):
            ids += [*encode(text), end]
            size += len(text.encode()) + 1
        if len(ids) > rows * length:
            break
    if not ids:
        return None
    count = min(rows, (len(ids) - 1) // length)
    if not count:
        raise InputError(
            f"what is held out has {len(ids)} tokens, fewer than one row of {length}: raise data.held_out, "
            "give more texts, or shorten train.length"
        )
    tokens = np.stack([ids[i * length : (i + 1) * length + 1] for i in range(count)]).astype(np.int32)
    return HeldOut(cut(tokens, end, segments), size / len(ids))

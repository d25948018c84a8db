"""What compressors share: an order of documents, shares of a budget, and the most surprising tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float, Int

from kvjax.models.model import Model
from kvjax.prompts.scorer import Reading, first_token, mean_loss
from kvjax.prompts.text import KeptPositions, PromptText

# The text that LongLLMLingua appends to the question when it ranks documents by the likelihood of both.
RESTRICTION = " We can get the answer to this question in the given documents."
# Between documents, and between a question and the first one.
BREAK = "\n\n"


def by_surprise(model: Model, prompt: PromptText) -> list[int]:
    """Documents in descending order of perplexity."""
    losses = [mean_loss(model, document.ids) for document in prompt.documents]
    return sorted(range(len(losses)), key=lambda i: -losses[i])


def by_question(model: Model, prompt: PromptText) -> list[int]:
    """Documents in descending order of the likelihood of the question and the restriction after them."""
    if len(prompt.documents) == 1:
        return [0]
    asked = np.concatenate([prompt.question, encoded(model, RESTRICTION)])
    losses = [mean_loss(model, np.concatenate([d.ids, asked]), len(d.ids)) for d in prompt.documents]
    return sorted(range(len(losses)), key=lambda i: losses[i])


def until(order: Sequence[int], prompt: PromptText, most: float) -> list[int]:
    """Take the first documents, up to and including the one with which they exceed `most` tokens."""
    kept, held = [], 0
    for number in order:
        kept.append(number)
        held += len(prompt.documents[number].ids)
        if held > most:
            break
    return kept


def scaled(
    shares: Float[np.ndarray, "d"], lengths: Int[np.ndarray, "d"], tokens: float
) -> Float[np.ndarray, "d"]:
    """Shares in [0, 1] that keep `tokens` tokens in all: shifted by a common amount, found by bisection."""
    low, high = -1.0 - shares.max(), 1.0 - shares.min()
    for _ in range(60):
        middle = (low + high) / 2
        held = float((np.clip(shares + middle, 0, 1) * lengths).sum())
        low, high = (middle, high) if held < tokens else (low, middle)
    return np.clip(shares + high, 0, 1)


def surprising(
    model: Model, prompt: PromptText, order: Sequence[int], shares: Sequence[float], segment: int,
    contrast: bool = False,
) -> list[KeptPositions]:  # fmt: skip
    """Choose the most surprising tokens of each segment to the model, given what is kept of the text before.

    order: the documents in reading order; shares: how much of each stays. contrast: ranks tokens by how much
    likelier the question, read before all documents, makes them.
    """
    documents = [prompt.documents[i].ids for i in order]
    gap = encoded(model, BREAK)
    start, of_text = first_token(model, documents[0])
    counts = [math.ceil(len(ids) * share) + len(gap) for ids, share in zip(documents, shares, strict=True)]
    room = sum(counts) + segment
    readings = [Reading(model, start, room)]
    if contrast:
        asked = [*prompt.question.tolist(), *gap.tolist()]
        readings.append(Reading(model, [*asked, *start] if of_text else [*start, *asked], room))
    found = []
    for place, (number, ids, share) in enumerate(zip(order, documents, shares, strict=True)):
        # The first token of a text without a beginning-of-text token cannot be predicted.
        kept = [np.arange(of_text if place == 0 else 0)]
        for reading in readings if place else ():
            reading.take(gap)
        for first, end, count in segments(len(ids), share, segment, len(kept[0])):
            losses = [reading.losses(ids[first:end]) for reading in readings]
            stay = first + largest(losses[0] - losses[1] if contrast else losses[0], count)
            for reading in readings:
                reading.take(ids[stay])
            kept.append(stay)
        found.append(KeptPositions(number, np.concatenate(kept)))
    return [one for one in found if len(one.positions)]


def segments(length: int, share: float, size: int, begun: int = 0) -> Iterator[tuple[int, int, int]]:
    """Yield the (start, end) of each segment after the first `begun` tokens, and how many of its tokens stay.

    >>> [*segments(10, 0.5, 4)], [*segments(10, 0.25, 4, 1)]
    ([(0, 4, 2), (4, 8, 2), (8, 10, 1)], [(1, 5, 0), (5, 9, 1), (9, 10, 0)])
    """
    kept = begun
    for start in range(begun, length, size):
        end = min(start + size, length)
        count = min(max(0, round(share * end) - kept), end - start)
        kept += count
        yield start, end, count


def largest(scores: Float[np.ndarray, "n"], count: int) -> Int[np.ndarray, "count"]:
    """Find the positions of the largest scores, in text order; of equal ones the earlier stay.

    >>> largest(np.array([1.0, 3.0, 2.0, 3.0, 2.0]), 3)
    array([1, 2, 3])
    """
    return np.sort(np.argsort(-scores, kind="stable")[:count])


def cosine(a: Float[np.ndarray, "D"], b: Float[np.ndarray, "D"]) -> float:
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-30))


def encoded(model: Model, text: str) -> Int[np.ndarray, "n"]:
    return np.array(model.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

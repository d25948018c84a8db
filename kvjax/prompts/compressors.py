"""Prompt compressors: one function per paper, from a model and a prompt to what is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvjax.models.model import Model
from kvjax.prompts.choose import by_question, by_surprise, cosine, scaled, surprising, until
from kvjax.prompts.classifier import Classifier
from kvjax.prompts.scorer import embeddings
from kvjax.prompts.text import KeptPositions, PromptText


class Compressor(NamedTuple):
    """A prompt compressor: a function (model, prompt, keep, **options), its paper and its needs."""

    choose: Callable[..., list[KeptPositions]]
    title: str
    arxiv: str
    needs_question: bool


def llmlingua(
    model: Model, prompt: PromptText, keep: float, *, segment: int = 100, coarse: float = 2.0
) -> list[KeptPositions]:
    """LLMLingua (Jiang et al., 2023, arXiv:2310.05736): keeps tokens that a small model did not expect.

    Of several documents (the paper's demonstrations) those with the largest perplexity stay, until they hold
    more than `coarse` times the token budget (algorithm 1). Of these, every `segment` of tokens keeps its
    most surprising ones, by -log p given what is already kept (algorithm 2). Deviations: `keep` is the share
    of the documents alone, instruction and question are the caller's; each segment keeps its own share, where
    the authors' code has one threshold for all that was read so far.
    """
    chosen = list(range(len(prompt.documents)))
    if len(chosen) > 1:
        chosen = sorted(until(by_surprise(model, prompt), prompt, coarse * keep * prompt.tokens))
    left = sum(len(prompt.documents[i].ids) for i in chosen)
    share = min(1.0, keep * prompt.tokens / max(left, 1))
    return surprising(model, prompt, chosen, [share] * len(chosen), segment)


def longllmlingua(
    model: Model, prompt: PromptText, keep: float, *, segment: int = 200, spare: int = 100, tilt: float = 0.3
) -> list[KeptPositions]:
    """LongLLMLingua (Jiang et al., 2023, arXiv:2310.06839): keeps tokens that the question makes likelier.

    Documents are ordered by how likely the question is after them (equation 2), the likeliest first, and
    dropped once the kept ones exceed the token budget by `spare`. A document's share is larger by up to
    `tilt` the earlier it comes (equation 5). Every `segment` keeps the tokens of the largest -log p(token) +
    log p(token | question), both given what is already kept (equation 3). Deviations: shares are scaled so
    that `keep` of all tokens stay; segments end with their document; answers are not mapped back to the text.
    """
    order = until(by_question(model, prompt), prompt, keep * prompt.tokens + spare)
    lengths = np.array([len(prompt.documents[i].ids) for i in order])
    last = max(len(order) - 1, 1)
    shares = np.array([(1 - 2 * rank / last) * tilt if len(order) > 1 else 0.0 for rank in range(len(order))])
    shares = scaled(shares + keep * prompt.tokens / lengths.sum(), lengths, keep * prompt.tokens)
    return surprising(model, prompt, order, shares.tolist(), segment, contrast=True)


def cpc(model: Model, prompt: PromptText, keep: float) -> list[KeptPositions]:
    """CPC (Liskavets et al., 2024, arXiv:2409.01227): keeps sentences that are close to the question.

    A sentence is the mean of its tokens' outputs in the last layer, read within the whole document; those of
    the largest cosine to the question's mean stay while they fit. Deviation: any decoder can be used; the
    paper fine-tunes one on pairs of questions and sentences.
    """
    about = embeddings(model, prompt.question).mean(0)
    found: list[tuple[float, int, int]] = []
    for number, document in enumerate(prompt.documents):
        outputs = embeddings(model, document.ids)
        for sentence in np.unique(document.sentences):
            found.append(
                (cosine(outputs[document.sentences == sentence].mean(0), about), number, int(sentence))
            )
    room, kept = round(keep * prompt.tokens), set()
    for _, number, sentence in sorted(found, key=lambda one: -one[0]):
        size = int((prompt.documents[number].sentences == sentence).sum())
        if size <= room:
            room -= size
            kept.add((number, sentence))
    stays = [
        np.array([(number, int(s)) in kept for s in document.sentences], bool)
        for number, document in enumerate(prompt.documents)
    ]
    return [KeptPositions(number, np.flatnonzero(stay)) for number, stay in enumerate(stays) if stay.any()]


def llmlingua2(
    model: Model, prompt: PromptText, keep: float, *, classifier: Classifier
) -> list[KeptPositions]:
    """LLMLingua-2 (Pan et al., 2024, arXiv:2403.12968): keeps the tokens that a classifier says to keep.

    The `keep` share of all tokens with the largest log odds stays, in their order. Deviations: the paper
    trains a bidirectional encoder on a large model's summaries; here a logistic regression on a decoder's
    outputs is fitted to what KVzip keeps (`fit_classifier`).
    """
    odds = np.concatenate([classifier.logits(model, one.ids) for one in prompt.documents])
    stays = np.zeros(len(odds), bool)
    stays[np.argsort(-odds, kind="stable")[: max(round(keep * len(odds)), 1)]] = True
    parts = np.split(stays, np.cumsum([len(one.ids) for one in prompt.documents])[:-1])
    return [KeptPositions(i, np.flatnonzero(part)) for i, part in enumerate(parts) if part.any()]


COMPRESSORS = {
    "llmlingua": Compressor(
        llmlingua,
        "LLMLingua: Compressing Prompts for Accelerated Inference of Large Language Models",
        "2310.05736",
        needs_question=False,
    ),
    "longllmlingua": Compressor(
        longllmlingua,
        "LongLLMLingua: Accelerating and Enhancing LLMs in Long Context Scenarios via Prompt Compression",
        "2310.06839",
        needs_question=True,
    ),
    "llmlingua2": Compressor(
        llmlingua2,
        "LLMLingua-2: Data Distillation for Efficient and Faithful Task-Agnostic Prompt Compression",
        "2403.12968",
        needs_question=False,
    ),
    "cpc": Compressor(
        cpc,
        "Prompt Compression with Context-Aware Sentence Encoding for Fast and Improved LLM Inference",
        "2409.01227",
        needs_question=True,
    ),
}

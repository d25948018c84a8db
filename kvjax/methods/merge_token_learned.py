"""Merging by learned tokens: what a chunk of a prompt says goes into memory tokens behind it."""

from __future__ import annotations

from typing import Annotated

from kvjax.grammar import Method
from kvjax.grammar.fitted import as_fitted
from kvjax.keep.prompts.memory_tokens import MemoryTokens, RunMemory
from kvjax.methods.papers import paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Fit

# Memory tokens behind a chunk, and the tokens of a chunk.
Memory = Annotated[int, Range(1)]
Chunk = Annotated[int, Range(1)]
# Tokens of a run for which one memory token stands.
PerMemory = Annotated[int, Range(1)]


@paper(
    "Learning to Compress Prompts with Gist Tokens",
    arxiv="2304.08467",
    family="merge-token",
    exact="deviates",
)
def gisting(*, fitted: Fit | None = None, tokens: Memory = 4) -> Method:
    """Gisting (Mu et al., 2023, arXiv:2304.08467): `tokens` gist tokens behind a prompt stay in its place.

    What follows the prompt sees the gist tokens' keys and values, and nothing of the prompt (`MemoryTokens`).
    fitted: their embeddings and weights. `kvjax train --gin gisting` trains all of the model with them, as
    the paper does; `kvjax fit gisting` leaves the model as it is and gives gist tokens weights of their own.
    Deviations: the last token of a prompt is read behind the gist tokens and stays; and what stays is turned
    anew, to the first positions. A question that shall stay is read with `compress=False`, as in `ccm`.

    Trained so for half an hour, recall-tiny answers 94% of questions behind contexts of 64 tokens from 16
    gist tokens (docs/training.md, "Under a method"). A fit beside the unchanged model learns less: with
    tokens=16, five minutes of a core (750 steps of 16 texts) have 26% to 28% of the tokens of answers right
    behind such contexts, by three draws, where unfitted gist tokens have none, and next to no whole answer
    (without the last token, which ends all answers). The fit that comes with kvjax is of 4 gist tokens for
    prompts of 512 tokens, and answers no question about them.
    """
    return Method(reread=MemoryTokens(tokens, by="gisting", fitted=as_fitted(fitted)))


@paper(
    "Compressed Context Memory For Online Language Model Interaction",
    arxiv="2312.03414",
    family="merge-token",
    exact="deviates",
)
def ccm(*, fitted: Fit | None = None, tokens: Memory = 8, chunk: Chunk = 64) -> Method:
    """CCM-concat (Kim et al., 2024, arXiv:2312.03414), section 3.1: memory grows by every chunk's tokens.

    Behind every `chunk` tokens of a prompt `tokens` <COMP> tokens are read, over the memory of the chunks
    before and with a LoRA of theirs; their keys and values are what is added to it, g(Mem, h) = [Mem; h]
    (`MemoryTokens`). fitted: embeddings and LoRA, as `kvjax fit ccm` writes them. Read: the authors' code.
    Deviations: chunks are of equal length, where theirs are the turns of a conversation; the last token of a
    prompt is read behind its memory and stays; what stays is turned anew, to positions without gaps, where
    theirs stands where its chunk ended; every turn has a memory of its own, beside those before it (a
    question that shall stay is read with `compress=False`); and what is written is not compressed.

    Beside the shipped model a fit of five minutes of a core with tokens=1 and chunk=2 (600 steps of 16
    texts, `alike=0.3`) has 29% to 32% of the tokens of answers right behind contexts of 64 tokens, by three
    draws, where unfitted ones have none; and next to no whole answer (without the last token, which ends all
    answers). With tokens=4 and chunk=16 it learned nothing by 750 steps, and the fit that comes with kvjax,
    for prompts of 512 tokens, answers no question about them. Where all of the model learns with them
    (`train.method` of `kvjax train`), a quarter of an hour has it answer 86% of questions behind contexts of
    64 tokens from a quarter as many slots (docs/training.md, "Under a method").
    """
    return Method(reread=MemoryTokens(tokens, chunk, by="ccm", fitted=as_fitted(fitted)))


@paper(
    "Compressed Context Memory For Online Language Model Interaction",
    arxiv="2312.03414",
    family="merge-token",
    exact="deviates",
)
def ccm_merge(*, fitted: Fit | None = None, tokens: Memory = 8, chunk: Chunk = 64) -> Method:
    """CCM-merge (Kim et al., 2024, arXiv:2312.03414), section 3.1: memory is the mean over chunks.

    As `ccm`, but the memory of a prompt has the size of one chunk's: behind chunk t it is
    (1 - 1/t) Mem + h / t, of keys that are turned to the same positions. fitted: as `kvjax fit ccm-merge`
    writes it. Deviations: those of `ccm`.

    Of one chunk it is Gisting, and a fit of it learns what that of `gisting` does; of several, a fit beside
    the shipped model found nothing, that which comes with kvjax included. A model that learns with it answers
    90% (docs/training.md).
    """
    return Method(reread=MemoryTokens(tokens, chunk, mean=True, by="ccm-merge", fitted=as_fitted(fitted)))


@paper(
    "LoMA: Lossless Compressed Memory Attention",
    arxiv="2401.09486",
    family="merge-token",
    exact="deviates",
)
def loma(*, fitted: Fit | None = None, tokens: Memory = 4, ratio: PerMemory = 4) -> Method:
    """LoMA (Wang and Xiao, 2024, arXiv:2401.09486), section 3: behind t c tokens stand t memory tokens.

    A run of `tokens` x `ratio` tokens sees the memory of the runs before it and itself; the memory tokens
    behind it see all of it and each other both ways, and their keys and values alone stay (`RunMemory`). A
    shorter last run has one memory token for every `ratio` tokens. fitted: embeddings and weights, which are
    taught to have every run said again from its memory alone, by as many repetition tokens:
    `kvjax train --gin gisting --set train.method=loma` trains all of the model with them, as the paper does,
    and `kvjax fit loma` leaves the model as it is and gives them a LoRA of their own. Deviations: memory
    tokens turn and stay at the positions of the last of the `ratio` tokens for which they stand, which is how
    we read the paper's positions; the last token of a prompt is read behind its memory and stays; and what is
    written is not compressed.

    Trained so for half an hour, recall-tiny answers 97% of questions behind contexts of 64 tokens from a
    quarter as many slots (docs/training.md, "Under a method"). A fit of three minutes (1400 steps, rank 12)
    says runs again at 2.4 nats a token, where unfitted memory leaves 8.0, and finds none of 24 records behind
    256 tokens. The fit that comes with kvjax, for prompts of 512 tokens, is shorter and finds none either.
    """
    return Method(reread=RunMemory(tokens, tokens * ratio, by="loma", fitted=as_fitted(fitted)))

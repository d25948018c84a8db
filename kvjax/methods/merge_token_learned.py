"""Merging by learned tokens: a chunk of a prompt is summarised by memory tokens after it."""

from __future__ import annotations

from typing import Annotated

from kvjax.grammar import Method
from kvjax.grammar.fitted import as_fitted
from kvjax.keep.prompts.memory_tokens import MemoryTokens, RunMemory
from kvjax.methods.papers import paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Fit

# Memory tokens after a chunk, and the tokens of a chunk.
Memory = Annotated[int, Range(1)]
Chunk = Annotated[int, Range(1)]
# How many tokens of a run one memory token represents.
PerMemory = Annotated[int, Range(1)]


@paper(
    "Learning to Compress Prompts with Gist Tokens",
    arxiv="2304.08467",
    family="merge-token",
    exact="deviates",
)
def gisting(*, fitted: Fit | None = None, tokens: Memory = 4) -> Method:
    """Gisting (Mu et al., 2023, arXiv:2304.08467): `tokens` gist tokens after a prompt replace it.

    Tokens after the prompt attend to the gist tokens' keys and values, and to nothing of the prompt
    (`MemoryTokens`). fitted: their embeddings and weights. `kvjax train --gin gisting` trains all of the
    model with them, as the paper does; `kvjax fit gisting` freezes the model and gives gist tokens weights of
    their own. Deviations: the last token of a prompt is read after the gist tokens and kept; and kept keys
    are rotated again, to the first positions. A question to keep is read with `compress=False`, as in `ccm`.

    Trained this way for half an hour, recall-tiny answers 94% of questions after contexts of 64 tokens from
    16 gist tokens (docs/training.md, "Under a method"). A fit with a frozen model learns less: with
    tokens=16, five minutes of one core (750 steps of 16 texts) get 26% to 28% of the answers' tokens right
    after such contexts, over three seeds, while unfitted gist tokens get none, and almost no whole answer
    (without the last token, which ends all answers). The fit that ships with kvjax has 4 gist tokens for
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
    """CCM-concat (Kim et al., 2024, arXiv:2312.03414), section 3.1: memory grows with every chunk.

    After every `chunk` tokens of a prompt `tokens` <COMP> tokens are read, over the memory of the chunks
    before and with their own LoRA; their keys and values are appended to it, g(Mem, h) = [Mem; h]
    (`MemoryTokens`). fitted: embeddings and LoRA, as `kvjax fit ccm` writes them. Source: the authors' code.
    Deviations: chunks are of equal length, where theirs are the turns of a conversation; the last token of a
    prompt is read after its memory and stays; kept keys are rotated again, to positions without gaps, where
    theirs have the position of their chunk's end; every turn adds a memory of its own (a question to keep is
    read with `compress=False`); and generated tokens are not compressed.

    On the shipped model a fit of five minutes of one core with tokens=1 and chunk=2 (600 steps of 16 texts,
    `alike=0.3`) gets 29% to 32% of the answers' tokens right after contexts of 64 tokens, over three seeds,
    while unfitted tokens get none; and almost no whole answer (without the last token, which ends all
    answers). With tokens=4 and chunk=16 it learned nothing by 750 steps, and the fit that ships with kvjax,
    for prompts of 512 tokens, answers no question about them. If all of the model is trained with them
    (`train.method` of `kvjax train`), after a quarter of an hour it answers 86% of questions after contexts
    of 64 tokens from a quarter as many slots (docs/training.md, "Under a method").
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

    As `ccm`, but the memory of a prompt has the size of one chunk's: after chunk t it is (1 - 1/t) Mem + h /
    t, with keys rotated to the same positions. fitted: as `kvjax fit ccm-merge` writes it. Deviations: those
    of `ccm`.

    With one chunk it is Gisting, and a fit learns as much as that of `gisting`; with several, fits on the
    shipped model learned nothing, including the one that ships with kvjax. A model trained with it answers
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
    """LoMA (Wang and Xiao, 2024, arXiv:2401.09486), section 3: t memory tokens follow every t c tokens.

    A run of `tokens` x `ratio` tokens attends to the memory of the runs before it and itself; the memory
    tokens after it attend to all of it and to each other bidirectionally, and only their keys and values are
    kept (`RunMemory`). A shorter last run has one memory token for every `ratio` tokens. fitted: embeddings
    and weights, which are trained to repeat every run from its memory alone, by as many repetition tokens:
    `kvjax train --gin gisting --set train.method=loma` trains all of the model with them, as the paper does,
    and `kvjax fit loma` freezes the model and gives them a LoRA of their own. Deviations: memory tokens have
    the positions of the last of the `ratio` tokens that they represent, which is our interpretation of the
    paper's positions; the last token of a prompt is read after its memory and kept; and generated tokens are
    not compressed.

    Trained this way for half an hour, recall-tiny answers 97% of questions after contexts of 64 tokens from a
    quarter as many slots (docs/training.md, "Under a method"). A fit of three minutes (1400 steps, rank 12)
    repeats runs at 2.4 nats a token, compared with 8.0 for unfitted memory, and finds none of 24 records in
    256 tokens. The fit that ships with kvjax, for prompts of 512 tokens, is shorter and finds none either.
    """
    return Method(reread=RunMemory(tokens, tokens * ratio, by="loma", fitted=as_fitted(fitted)))

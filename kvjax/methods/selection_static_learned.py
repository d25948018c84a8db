"""Selection by gates trained, on texts or on questions, to predict how much a token will matter."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.fitted import as_fitted
from kvjax.grammar.when import STEP
from kvjax.keep.budgets.budget import AcrossLayers, Threshold, Uniform
from kvjax.keep.gates.eviction_gates import AttentionGate, EvictionGate
from kvjax.keep.gates.gate import Gated, HiddenGate
from kvjax.keep.gates.gate_forms import RetainingHead, SinkGate, WriteGate
from kvjax.keep.patterns import Recent, Sink
from kvjax.keep.prompts.distilled import Distilled, TokenScore, TokenScorer
from kvjax.keep.prompts.restore import RestoreTokens
from kvjax.methods.papers import Press, paper
from kvjax.methods.parameters import Range
from kvjax.methods.selection_static_attention import kvzip
from kvjax.methods.shared import Amount, Depth, Fit, Page, Share, TokenIds, Tokens, Window


@paper(
    "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning",
    arxiv="2601.07891",
    family="selection-static",
    exact="deviates",
    kvpress=Press("DMSPress(KVzapPress)", same="no: kvpress takes the authors' gates of other models"),
)
def kvzap(
    *,
    fitted: Fit | None = None,
    threshold: Annotated[float, Range(-100, 100)] = -4.0,
    window: Window = 128,
    page: Page | None = None,
) -> Method:
    """KVzap (Jegou and Jeblick, 2026, arXiv:2601.07891): a gate predicts KVzip's scores; evicts low ones.

    A network on the layer's input predicts the log of the score for each head; a token is evicted from a head
    when it is older than the `window` newest ones and its score is below `threshold`, in the prompt and while
    decoding, so the number of kept tokens depends on the text. fitted: the gate, as `kvjax fit kvzap` writes
    it. Deviation: the gate is fitted to the scores of our KVzip, without the paper's division by the norm of
    the hidden state; the published gates are of that score.
    """
    gate = HiddenGate(as_fitted(fitted))
    keep = Keep(Gated(gate), Budget(1.0), Threshold(threshold), (Recent(window),), when=STEP, page=page)
    return Method(keep)


@paper(
    "Fast KVzip: Efficient and Accurate LLM Inference with Gated KV Eviction",
    arxiv="2601.17668",
    family="selection-static",
    exact="deviates",
    kvpress=Press("FastKVzipPress", same="no: kvpress takes the authors' gates of other models"),
)
def fast_kvzip(
    budget: Amount,
    *,
    fitted: Fit | None = None,
    window: Window = 4096,
    sinks: Tokens = 4,
    page: Page | None = None,
) -> Method:
    """Fast KVzip (Kim et al., 2026, arXiv:2601.17668): gates with learned sinks predict KVzip's scores.

    A gate on the layer's input computes for each head how much a token attends to itself rather than to sinks
    (`SinkGate`, section 3.2). The L K n best slots of the whole stack stay; the first `sinks` tokens and the
    `window` newest ones always do. A score is computed once, when its token is read, so a prompt in chunks
    (`prefill(..., chunk=)`) is compressed chunk by chunk. fitted: the gates, as `kvjax fit fast-kvzip` writes
    them. Deviation: decoding evicts nothing, where the authors' evicts after every 128 tokens; and `window`
    is a number of tokens, where theirs keeps the last 2 % of a short prompt.
    """
    gate = SinkGate(as_fitted(fitted))
    keep = Keep(Gated(gate), Budget(budget), AcrossLayers(), (Sink(sinks), Recent(window)), page=page)
    return Method(keep)


@paper(
    "Locret: Enhancing Eviction in Long-Context LLM Inference with Trained Retaining Heads on "
    "Consumer-Grade Devices",
    arxiv="2410.01805",
    family="selection-static",
    exact="deviates",
)
def locret(budget: Amount, *, fitted: Fit | None = None, newest: Tokens = 100) -> Method:
    """Locret (Huang et al., 2024, arXiv:2410.01805): predicts how much answers will attend to a token.

    A network on a token's queries, keys and values predicts for each head how large a logit the answer's
    queries will give it (`RetainingHead`, section 3.2); the best stay, and the `newest` tokens. A score is
    computed once, when its token is read, so a prompt in chunks, `prefill(..., chunk=3072)` in the paper, is
    compressed chunk by chunk. fitted: the heads, as `kvjax fit locret` writes them. Deviation: the `newest`
    tokens stay after every chunk, where the authors keep more of them (2500) until the last chunk and read
    the last 100 by themselves.
    """
    score = Gated(RetainingHead(as_fitted(fitted)))
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(newest),)))


@paper(
    "KV Admission: Learning What to Write for Efficient Long-Context Inference",
    arxiv="2512.17452",
    family="selection-static",
    exact="deviates",
    aliases=("write-gated-kv",),
)
def wg_kv(
    *,
    fitted: Fit | None = None,
    threshold: Share = 0.1,
    window: Window = 256,
    page: Page | None = None,
) -> Method:
    """Write-Gated KV (Huang et al., 2025, arXiv:2512.17452): a gate admits useful tokens to the cache.

    A network of each head predicts from a token's key how useful the token will be (`WriteGate`, section
    3.2). It is evicted from the head when it is older than the `window` newest tokens and its gate is below
    `threshold`, in the prompt and while decoding, so the number of kept tokens depends on the text. fitted:
    the gates, as `kvjax fit wg-kv` writes them. Deviation: the tokens of a prompt still attend to all of it,
    and tokens that are not admitted are evicted after it, or after each of its chunks (`prefill(...,
    chunk=)`); in the paper tokens beyond the window attend to admitted ones alone.
    """
    gate = WriteGate(as_fitted(fitted))
    keep = Keep(Gated(gate), Budget(1.0), Threshold(threshold), (Recent(window),), when=STEP, page=page)
    return Method(keep)


@paper(
    "Inference-Time Hyper-Scaling with KV Cache Compression",
    arxiv="2506.05345",
    family="selection-static",
    exact="deviates",
)
def dms(*, fitted: Fit | None = None, window: Window = 256, page: Page | None = None) -> Method:
    """DMS (Lancucki et al., 2025, arXiv:2506.05345), section 3: delayed eviction by learned decisions.

    A linear map of the layer's input decides for each head, when a token is read, whether to evict it
    (`EvictionGate`); it is evicted once `window` tokens are newer, in the prompt and while decoding, so the
    number of kept tokens depends on the text. fitted: the gates, as `kvjax fit dms` writes them. Sources:
    kvpress' form, and the notes and part of the code of the authors' retrofit of Qwen3. Deviation: the tokens
    of a prompt still attend to all of it, and eviction follows after it, or after each of its chunks
    (`prefill(..., chunk=)`).

    On the shipped model a window of 16 and 37 % of the slots of 512 tokens are kept, with which it finds 22
    of 32 records (all slots: 32).
    """
    gate = EvictionGate(as_fitted(fitted))
    keep = Keep(Gated(gate), Budget(1.0), Threshold(0.0), (Recent(window),), when=STEP, page=page)
    return Method(keep)


@paper(
    "In-context KV-Cache Eviction for LLMs via Attention-Gate",
    arxiv="2410.12876",
    family="selection-static",
    exact="deviates",
)
def attention_gate(*, fitted: Fit | None = None, threshold: Share = 0.5, page: Page | None = None) -> Method:
    """Attention-Gate (Zeng et al., 2024, arXiv:2410.12876): gates over the whole context decide eviction.

    A small attention over the layer's inputs of all tokens of a prompt gives every head a number for every
    token (`AttentionGate`), which is evicted from the head if that is below `threshold`; the number of kept
    tokens depends on the text. fitted: the gates, as `kvjax fit attention-gate` writes them. Sources: the
    abstract and summaries of the paper, which has no public code; sizes are ours. Deviations: the tokens of a
    prompt still attend to all of it, and eviction follows after it, or after each of its turns or chunks; the
    gates decide for KV heads; generated tokens are judged one by one, and evicted after the next turn.

    On the shipped model 36 % of the slots of 512 tokens are kept, with which it finds 12 of 32 records (all
    slots: 32).
    """
    score = Gated(AttentionGate(as_fitted(fitted)))
    return Method(Keep(score, Budget(1.0), Threshold(threshold), page=page))


@paper(
    "KV-Distill: Nearly Lossless Learnable Context Compression for LLMs",
    arxiv="2503.10337",
    family="selection-static",
    exact="deviates",
)
def kv_distill(budget: Amount, *, fitted: Fit | None = None, layer: Depth = 0.5) -> Method:
    """KV-Distill (Chari et al., 2025, arXiv:2503.10337): chosen tokens absorb the others' content.

    A network on the input of a layer scores the tokens of a prompt (`TokenScorer`), alike for all heads and
    layers. The prompt is read once more, with a LoRA for the best tokens (`Distilled`), and they alone are
    kept, at their positions. fitted: scorer and LoRA, as `kvjax fit kv-distill` writes them. Sources: the
    abstract and summaries of the paper. Deviations: all four maps have a LoRA, which is our choice; the last
    token of a prompt always stays; every turn keeps its share of its own tokens (a question to keep is read
    with `compress=False`); and generated tokens are not compressed.

    On the shipped model it finds 31 of 32 records in 512 tokens with a quarter of the slots, and 17 with an
    eighth (all slots: 32), for questions after the compressed prompt. It is fitted for these: if the question
    is compressed with the prompt, which the fit has not seen, it finds 1 of 8 with a quarter.
    """
    arrays = as_fitted(fitted)
    score = TokenScore(TokenScorer(arrays))
    return Method(reread=Distilled(layer, score, Budget(budget), arrays))


@paper(
    "RestoreKV: Recovering Full-Cache Behavior Under Aggressive Query-Agnostic KV Cache Eviction",
    arxiv="2608.01247",
    family="selection-static",
    exact="deviates",
    kvpress=Press("RestoreKVPress", same="yes, with the same tokens, for contexts up to 2048 tokens"),
)
def restorekv(
    budget: Amount,
    *,
    fitted: Fit | None = None,
    tokens: Annotated[int, Range(1)] = 8,
    sinks: Tokens = 4,
    normalised: bool = False,
    page: Page | None = None,
    prefix: TokenIds | None = None,
) -> Method:
    """RestoreKV (Baek et al., 2026, arXiv:2608.01247): learned tokens absorb evicted tokens.

    After KVzip (`kvzip`, or KVzip+ if `normalised`) has scored the slots of a prompt, and before any
    eviction, `tokens` learned tokens are read after it, with their own LoRA (`RestoreTokens`). Their keys and
    values stay in all KV heads, within the same budget. fitted: embeddings and LoRA, as `kvjax fit restorekv`
    writes them. Sources: the authors' public code and kvpress 0.5.5; not the paper itself. Deviations: the
    LoRA is of queries, keys, values and attention outputs, where theirs is of the feed-forwards, too; and
    those of `kvzip`. Text after a prompt has positions after its restore tokens, as in the authors' code.

    On the shipped model, whose prompts of 512 tokens have 64 slots per head at an eighth, a fit of 192 steps
    (the authors take 5000) works better than unfitted restore tokens, and less well than the slots of KVzip
    that they replace: 42% of answers are right, compared with 51% for KVzip. It is fitted for questions after
    the compressed prompt; if the question is compressed with the prompt, its answer follows restore tokens,
    which the fit has not seen.
    """
    keep = kvzip(budget, sinks=sinks, normalised=normalised, page=page, prefix=prefix).keep
    assert keep is not None
    return Method(dataclasses.replace(keep, restore=RestoreTokens(tokens, as_fitted(fitted))))

"""Retrieval by indices that a prompt's own queries or tokens shape."""

from __future__ import annotations

from typing import Annotated

from kvjax.grammar import Budget, Keep, Method, Store
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.observations.trace import Surprisal
from kvjax.keep.patterns import Recent
from kvjax.keep.scores.tokens import IsTokenType
from kvjax.methods.papers import paper
from kvjax.methods.parameters import Range
from kvjax.methods.retrieval_sparse_slots import Many
from kvjax.methods.shared import (
    Amount,
    Kernel,
    Layers,
    Ratio,
    Share,
    TokenIds,
    Tokens,
    Turns,
    Window,
    window_score,
)
from kvjax.read.by_queries import ScannedClusters, WindowedCodes
from kvjax.read.events import SurprisingEvents
from kvjax.read.sentences import SentenceMeans

# Standard deviations beyond the mean.
Deviations = Annotated[float, Range(-10, 10)]
# Keys that represent an event, and its least tokens.
Few = Annotated[int, Range(1)]


@paper(
    "RetrievalAttention: Accelerating Long-Context LLM Inference via Vector Retrieval",
    arxiv="2409.10516",
    family="retrieval-sparse",
    exact="deviates",
)
def retrievalattention(
    budget: Amount,
    *,
    scan: Share = 0.25,
    clusters: Many = 64,
    turns: Turns = 10,
    window: Window = 64,
    sinks: Tokens = 128,
    newest: Window = 512,
    skip_layers: Layers = 0,
) -> Method:
    """RetrievalAttention (Liu et al., 2024, arXiv:2409.10516), section 3: an index made for queries.

    A query finds its keys in an index that knows how queries are distributed, since they lie elsewhere than
    keys: it scans a share `scan` of the keys and reads those with the largest products (`ScannedClusters`),
    beside the first `sinks` and the `newest` tokens. `budget` is the share (or number) of older tokens that a
    query reads at most. Deviation: the index is a list of clusters, near in what the prompt's `window` newest
    queries make of them, where the paper walks a graph of keys that are linked if they are nearest to the
    same queries of the prompt; keys and values are in device memory, and are attended to there; generated
    tokens join the nearest cluster until the next prompt; the query heads of a group share tokens, by the sum
    of their products. There was no code of the authors' index to compare with. Prompts and several tokens at
    once are read in full.
    """
    read = ScannedClusters(Budget(budget), newest, skip_layers, clusters, turns, sinks, window, scan)
    return Method(read=read)


@paper(
    "A2ATS: Retrieval-Based KV Cache Reduction via Windowed Rotary Position Embedding and Query-Aware Vector "
    "Quantization",
    arxiv="2502.12665",
    family="retrieval-sparse",
    exact="deviates",
)
def a2ats(
    budget: Amount,
    *,
    clusters: Many = 64,
    turns: Turns = 10,
    window: Window = 64,
    sinks: Tokens = 4,
    newest: Window = 64,
    skip_layers: Layers = 0,
) -> Method:
    """A2ATS (He et al., 2025, arXiv:2502.12665): codes of keys without positions, made for queries.

    Tokens before the `newest` ones stand at one distance from every query, so a code of an unrotated key says
    how it meets any of them. Codes are those of a codebook that minimises the error of products with queries,
    sum (k - c)' E[q q'] (k - c), and the tokens with the largest products of their codes are attended to
    (`WindowedCodes`), with the first `sinks`. `budget` is the share (or number) of older tokens that a query
    reads. Source: the abstract, and the paper's equations as later papers quote them; the authors' repository
    has no code. Deviation: the codebook has `clusters` entries for each KV head and is fitted to a row's own
    prompt and its `window` newest queries, where the paper fits a larger one to other texts; the one distance
    is `newest`; keys and values are in device memory; the query heads of a group share tokens, by the sum of
    their products. Prompts and several tokens at once are read in full and at their own positions.
    """
    read = WindowedCodes(Budget(budget), newest, skip_layers, clusters, turns, sinks, window)
    return Method(store=Store(unrotated=True), read=read)


@paper(
    "Human-inspired Episodic Memory for Infinite Context LLMs",
    arxiv="2407.09450",
    family="retrieval-sparse",
    exact="deviates",
)
def em_llm(
    budget: Amount,
    *,
    gamma: Deviations = 1.0,
    keys: Few = 4,
    beside: Share = 0.3,
    least: Few = 8,
    events: Many = 512,
    sinks: Tokens = 128,
    newest: Window = 4096,
    skip_layers: Layers = 0,
) -> Method:
    """EM-LLM (Fountas et al., 2024, arXiv:2407.09450), section 3: a text is remembered as events.

    An event begins at a token whose surprisal exceeds the mean by `gamma` standard deviations; its border is
    then moved, within the event before, to where the modularity of key similarities is largest, and no event
    has fewer than `least` tokens. Events are recalled by `keys` representative keys as in InfLLM, and their
    neighbours in the text with them, which get the share `beside` of the budget (`SurprisingEvents`). The
    first `sinks` and the `newest` tokens are always read. `budget` is the share (or number) of older tokens
    that are read. Deviation: this is the paper's decoding; prompts and several tokens at once are read in
    full. Mean and deviation are those of all older tokens of a prompt, where the paper takes a window before
    each, and similarities are those of the layer's own keys, where it sums them over layers. Neighbours are
    those of what this token recalls, where it queues those of earlier tokens, too. Generated tokens belong to
    the last event until the next prompt is read, there are at most `events` of them, tokens keep their own
    positions, and all is in device memory.
    """
    sizes = sinks, gamma, keys, beside, least, events
    return Method(read=SurprisingEvents(Budget(budget), newest, skip_layers, *sizes, surprisal=Surprisal()))


@paper(
    "SentenceKV: Efficient LLM Inference via Sentence-Level Semantic KV Caching",
    arxiv="2504.00970",
    family="retrieval-sparse",
    exact="deviates",
)
def sentencekv(
    budget: Amount,
    *,
    read: Ratio = 0.2,
    separators: TokenIds | None = None,
    window: Window = 32,
    kernel: Kernel = 7,
    sentences: Many = 512,
    sinks: Tokens = 32,
    newest: Window = 32,
) -> Method:
    """SentenceKV (Zhu et al., 2025, arXiv:2504.00970), section 3: a query reads the sentences that match it.

    SnapKV's choice of a prompt is kept, `budget` of it, and each query attends to the share `read` of the
    kept tokens before the `newest` ones: the first `sinks` tokens and then, by <q, mean key>, whole sentences
    (`SentenceMeans`). separators: the ids of tokens that end a sentence; None takes those of . ? ! and line
    ends from the model's tokenizer. Deviation: sentences match the newest query, where the paper takes the
    mean of the queries since the last separator and reads only `sinks` and `newest` tokens right after one;
    generated tokens belong to the last sentence until the next prompt, where it adds sentences; there are at
    most `sentences` of them; keys and values are in device memory, where it fetches them from the host; the
    query heads of a group share tokens, by the sum of their products, where it repeats keys for each. Several
    tokens at once are read in full.
    """
    keep = Keep(window_score(window, kernel, "grouped"), Budget(budget), Uniform(), (Recent(window),))
    ends = IsTokenType(separators, ".?!\n")
    means = SentenceMeans(Budget(read), newest, 0, sinks, sentences, separators=ends)
    return Method(keep, read=means)

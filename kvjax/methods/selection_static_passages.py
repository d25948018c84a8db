"""Selection at the end of a prompt: of whole passages, by future queries, or in the upper layers alone."""

from __future__ import annotations

from typing import Annotated, Literal

from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.phase import ByRank
from kvjax.grammar.when import STEP
from kvjax.keep.algebra import Pool
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.budgets.phases import PromptAndGenerated
from kvjax.keep.patterns import Recent
from kvjax.keep.prompts.narrow import SelectivePropagation
from kvjax.keep.scores.chunk_wise import EntropyGated
from kvjax.keep.scores.lookahead import Lookahead, LookaheadAttention
from kvjax.keep.scores.passages import PassageMean
from kvjax.keep.scores.question import ChunkAttention, CurrentChunkFirst, Question, QuestionAttention
from kvjax.keep.scores.score import Position, WindowAttention
from kvjax.keep.scores.tokens import IsTokenType
from kvjax.methods.papers import Press, paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Amount, Depth, Kernel, Share, TokenIds, Window, window_score

# How many neighbouring tokens, or layers, are treated as one.
Together = Annotated[int, Range(1)]


@paper(
    "WindowKV: Task-Adaptive Group-Wise KV Cache Window Selection for Efficient LLM Inference",
    arxiv="2503.17922",
    family="selection-static",
    exact="deviates",
)
def windowkv(
    budget: Amount,
    *,
    size: Together = 32,
    task: Literal["localization", "aggregation"] = "localization",
    window: Window = 16,
    reuse: Together = 8,
) -> Method:
    """WindowKV (Zuo et al., 2025, arXiv:2503.17922): keeps whole pieces of a text, chosen by the task.

    A piece is `size` tokens. Its score is the attention that the last `window` queries give its tokens, in
    sum over them and averaged over a layer's heads: for "aggregation" the mean over the piece, for
    "localization" that of its size // 2 best tokens, as in the authors' code. Every `reuse` layers in a row
    keep the pieces that the first of them chooses, and the window stays. Deviations: the caller names the
    task, where the paper trains a classifier; heads are averaged before the best tokens are taken; groups of
    layers have equal budgets; slots that remain after whole pieces go to the first tokens of the next best
    one.
    """
    best = max(size // 2, 1) if task == "localization" else 0
    score = PassageMean(WindowAttention(window, heads="layer"), size, best)
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(window),), reuse=reuse))


@paper(
    "Entropy-gated ChunkKV",
    family="selection-static",
    kvpress=Press(
        "EntropyGatedChunkKVPress(SnapKVPress)", same="no: there, the window counts among the chunks"
    ),
)
def entropy_gated_chunkkv(
    budget: Amount,
    *,
    chunk: Annotated[int, Range(2)] = 10,
    few: Together = 4,
    window: Window = 64,
    kernel: Kernel = 5,
) -> Method:
    """Entropy-gated ChunkKV (kvpress 0.5.5; no paper): whole chunks, except those with a single peak.

    Chunks of `chunk` tokens are chosen by the mean of SnapKV's scores, for all heads of a layer alike. A
    chunk with a high mean and a low entropy of scores keeps only its `few` best tokens, and the freed slots
    go to other chunks (`EntropyGated`). The window itself stays.
    """
    few = min(few, chunk - 1)
    score = EntropyGated(window_score(window, kernel, "kvpress"), chunk, few)
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(window),)))


@paper(
    "Can LLMs Maintain Fundamental Abilities under KV Cache Compression?",
    arxiv="2502.01941",
    family="selection-static",
    exact="deviates",
)
def shotkv(
    budget: Amount, *, separators: TokenIds | None = None, window: Window = 32, written: Share = 0.5
) -> Method:
    """ShotKV (Liu et al., 2025, arXiv:2502.01941), section 4: keeps or evicts whole examples of a prompt.

    A shot ends with a separator; its score is the mean attention that the last `window` queries give its
    tokens, over a layer's heads. Of the budget, a prompt has the share 1 - `written`, for the best shots and
    the window, and these stay. Generated tokens have the rest: of those before the `window` newest ones, the
    one to which the newest query attends least is evicted. separators: their token ids, for example that of a
    blank line; None takes the ends of sentences and lines from the model's tokenizer. Deviations: the best
    shot that does not fit whole keeps its first tokens; budgets of both parts are shares of one, as in SCOPE.
    """
    shots = PassageMean(WindowAttention(window, heads="layer"), IsTokenType(separators, ".?!\n"))
    later = WindowAttention(1, hide_window=False)
    score = PromptAndGenerated(shots, later, written, window)
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(window),), when=STEP))


@paper(
    "Lookahead Q-Cache: Achieving More Consistent KV Cache Eviction via Pseudo Query",
    arxiv="2505.20334",
    family="selection-static",
    exact="deviates",
    aliases=("lookahead-q-cache",),
)
def laq(budget: Amount, *, ahead: Window = 8, window: Window = 8, kernel: Kernel = 5) -> Method:
    """LAQ (Wang et al., 2025, arXiv:2505.20334): what the likely next tokens attend to.

    `ahead` tokens are decoded greedily after the prompt, and removed again; a token's score is the attention
    that their queries give it, in sum, smoothed by the maximum (`LookaheadAttention`). The `window` newest
    tokens stay. Deviation: these tokens are decoded from the whole cache; the paper decodes them from one
    compressed by SnapKV, to save memory.
    """
    probe = Lookahead(ahead)
    score = LookaheadAttention(probe) >> Pool(kernel)
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(window),), probe=probe))


@paper(
    "CItruS: Chunked Instruction-aware State Eviction for Long Sequence Modeling",
    arxiv="2406.12018",
    family="selection-static",
    exact="deviates",
)
def citrus(
    budget: Amount, *, question: Window = 32, variant: Literal["single", "double"] = "single"
) -> Method:
    """CItruS (Bai et al., 2024, arXiv:2406.12018): older tokens that a prompt's instruction attends to stay.

    The last `question` tokens of a prompt are its instruction, which is read after every chunk (`prefill(...,
    chunk=)`) and then dropped. A layer keeps the chunk, if the budget holds it, and of older tokens those
    with the largest attention from the instruction, the mean over its queries and the layer's heads: one set
    for all heads. Kept keys are rotated by their ranks.

    "single", the default because it needs no second cache: one cache for chunks and instruction, the
    authors' `instruction_aware_single`. At the end of the prompt, the instruction stays in place of the
    chunk. "double": their `instruction_aware_double`. Chunks attend to a cache of their own, of which the
    chunk's queries keep the best (mean over them and the layer's heads), and the instruction to one of what
    it chose itself, to which every chunk's keys and values are added. At the end the instruction is read over
    this cache alone, and the other is dropped; a further turn starts both from it. While the prompt is read,
    twice the slots are held. Without chunk= there is no cache that a chunk could attend to, and both forms
    are the same.

    Deviations: the budget holds chunk and older slots together, where the code adds the chunk to it; the
    instruction is read after the chunk, where the code reads it after the slots kept before.
    """
    chunks = None
    if variant == "double":
        chunks = Keep(CurrentChunkFirst(ChunkAttention()), Budget(budget), Uniform(), phase=ByRank())
    probe = Question(question, chunks)
    score = CurrentChunkFirst(QuestionAttention(probe, "alike", "layer"), probe)
    return Method(Keep(score, Budget(budget), Uniform(), phase=ByRank(), probe=probe))


@paper(
    "LazyLLM: Dynamic Token Pruning for Efficient Long Context LLM Inference",
    arxiv="2407.14057",
    family="selection-static",
    exact="deviates",
)
def lazyllm(*, layer: Depth = 0.5, share: Share = 0.5) -> Method:
    """LazyLLM (Fu et al., 2024, arXiv:2407.14057), section 3: upper layers see fewer tokens.

    Above `layer` (its number, or the share of the layers up to it), only the share `share` of a prompt's
    tokens to which the last query attends most there, averaged over the layer's heads, is processed further;
    layers up to it keep all. Deviations: tokens are left out once, where the paper does so at several layers
    and in every step; the paper keeps the hidden states of omitted tokens, so that a token may return.
    """
    narrow = SelectivePropagation(layer, WindowAttention(1, hide_window=False), share, window=1)
    return Method(Keep(Position(), Budget(1.0), Uniform(), narrow=narrow))

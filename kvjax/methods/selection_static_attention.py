"""Selection once, at the end of a prompt, by the attention that tokens received."""

from __future__ import annotations

from typing import Annotated, Literal

from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.fitted import as_fitted
from kvjax.grammar.kinds import Allocation
from kvjax.grammar.phase import ByRank
from kvjax.keep.algebra import ChunkSum, Pool, stage
from kvjax.keep.budgets.budget import AcrossHeads, AcrossLayers, Uniform
from kvjax.keep.observations.probe import Catalyst, ProbeAttention, RepeatContext
from kvjax.keep.patterns import Recent, Sink
from kvjax.keep.prompts.narrow import SelectivePropagation
from kvjax.keep.prompts.reread import Reread
from kvjax.keep.scores.crush import Representatives
from kvjax.keep.scores.drawn import GumbelTopK
from kvjax.keep.scores.probe_weighted import RepeatWithGradients, RepeatWithNorms, WeightedProbeAttention
from kvjax.keep.scores.question import Question, QuestionAttention
from kvjax.keep.scores.score import LastLogits, Novelty, WindowAttention
from kvjax.keep.scores.semantic import SemanticAttention, SemanticHeads
from kvjax.methods.papers import Press, paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import (
    Amount,
    Depth,
    Fit,
    Kernel,
    Page,
    Seed,
    Share,
    TokenIds,
    Tokens,
    Variant,
    Window,
    per_query_head,
    pick,
    window_score,
)

# How many neighbouring tokens, or layers, are treated as one.
Together = Annotated[int, Range(1)]


@paper(
    "SnapKV: LLM Knows What You are Looking for Before Generation",
    arxiv="2404.14469",
    family="selection-static",
    exact="equal",
    kvpress=Press("SnapKVPress", "variant=kvpress"),
)
def snapkv(
    budget: Amount, *, window: Window = 64, kernel: Kernel = 5, variant: Variant = "grouped"
) -> Method:
    """SnapKV (Li et al., 2024, arXiv:2404.14469), section 4: what the last `window` queries attend to.

    score[j] = pool(sum_{i in window} softmax_j(q_i k_j / sqrt(H))); the window itself stays.

    With variant="grouped", the default because equal budgets are then equal bytes, scores are summed over
    the query heads of a group, and every KV head selects once. Pooling is by the maximum, as in the settings
    of the authors' experiments (their code's own default is the mean). `variant="paper"` is the authors' code
    with max pooling: every query head selects, so the cache holds N heads of slots, N / K times the bytes.
    `variant="kvpress"` pools by the average, takes the mean over the group, and every KV head selects once.
    """
    score = window_score(window, kernel, variant)
    each = per_query_head(variant)
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(window),), per_query_head=each))


@paper(
    "LLMs Know What to Drop: Self-Attention Guided KV Cache Eviction for Efficient Long-Context Inference",
    arxiv="2503.08879",
    family="selection-static",
    exact="deviates",
)
def sage_kv(budget: Amount, *, sinks: Tokens = 4, window: Window = 64) -> Method:
    """SAGE-KV (Wang et al., 2025, arXiv:2503.08879): what the last token of a prompt attends to.

    score[j] = softmax_j(q k_j / sqrt(H)) of the newest query, the mean over a group's heads; the first
    `sinks` and the newest `window` tokens stay. Deviation: generated tokens stay, where the paper's window of
    newest tokens moves with them.
    """
    protect = (Sink(sinks), Recent(window))
    return Method(Keep(WindowAttention(1), Budget(budget), Uniform(), protect))


@paper(
    "NACL: A General and Effective KV Cache Eviction Framework for LLMs at Inference Time",
    arxiv="2408.03675",
    family="selection-static",
    exact="deviates",
)
def nacl(
    budget: Amount, *, window: Window = 64, share: Share = 0.632, sinks: Tokens = 4, seed: Seed = 0
) -> Method:
    """NACL (Chen et al., 2024, arXiv:2408.03675): keeps some tokens by attention, some at random.

    score[j] is the summed attention of the proxies, which are the last `window` queries. The first `sinks`
    tokens and the window stay. Of the other slots of the budget, the share `share` goes to the best by score,
    0.12 of 0.12 + 0.07 as in the authors' code; the rest is drawn without replacement from all others, with
    probabilities softmax(score) (`GumbelTopK`). Deviations: a proxy attends to no token after it, where
    the code lets all proxies see all of them; a group's heads are averaged; draws depend only on `seed`,
    layer, head and position.
    """
    score = WindowAttention(window)
    protect = (Sink(sinks), Recent(window))
    return Method(Keep(stage(score, share, GumbelTopK(score, seed)), Budget(budget), Uniform(), protect))


@paper(
    "KVCrush: Key Value Cache Size-Reduction Using Similarity in Head-Behaviour",
    arxiv="2503.00022",
    family="selection-static",
    exact="deviates",
)
def kvcrush(budget: Amount, *, share: Share = 0.25, window: Window = 64, kernel: Kernel = 5) -> Method:
    """KVCrush (Jha et al., 2025, arXiv:2503.00022): keeps representatives of the evicted tokens.

    A head fills its budget except `share` by SnapKV's scores. Each token has a bit vector of the heads that
    would keep it; the tokens that a head would evict are ordered by the Hamming distance of these vectors to
    an anchor, and evenly spaced ones fill the budget (`Representatives`). Deviation: the heads are KV heads,
    the anchor alternates between 0 and 1, which is an option of the authors' OpenVINO code, and tokens are
    chosen one by one; that code chooses pages.
    """
    score = Representatives(window_score(window, kernel, "grouped"), share, window)
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(window),)))


@paper(
    "CompressKV: Semantic Retrieval Heads Know What Tokens are Not Important Before Generation",
    arxiv="2508.02401",
    family="selection-static",
    exact="deviates",
)
def compresskv(
    budget: Amount,
    *,
    fitted: Fit | None = None,
    heads: Annotated[int, Range(1)] = 4,
    window: Window = 32,
    kernel: Kernel = 5,
) -> Method:
    """CompressKV (Lin et al., 2025, arXiv:2508.02401): what retrieval heads attend to.

    A token's score is the attention of the last `window` queries, in sum, smoothed by the mean, and averaged
    over the `heads` query heads of its layer that attend most to the tokens that answers need
    (`SemanticAttention`); all heads of a layer keep the same tokens, and the window. fitted: this attention,
    as `kvjax fit compresskv` writes it. Deviation: layers have equal budgets; the paper also shares the
    budget by what eviction changes in each layer's output, measured beforehand.
    """
    score = SemanticAttention(SemanticHeads(as_fitted(fitted)), heads, window) >> Pool(kernel, "mean")
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(window),)))


@paper(
    "FastKV: Decoupling of Context Reduction and KV Cache Compression for Prefill-Decoding Acceleration",
    arxiv="2502.01068",
    family="selection-static",
    exact="deviates",
)
def fastkv(
    budget: Amount,
    *,
    tsp_layer: Depth = 0.5,
    share: Share = 0.2,
    window: Window = 8,
    kernel: Kernel = 7,
) -> Method:
    """FastKV (Jo et al., 2025, arXiv:2502.01068): fewer tokens above one layer, fewer slots in all of them.

    Layers above `tsp_layer` (its number, or the share of the layers up to it) process `share` of the prompt:
    the tokens that its last `window` queries attend to most, summed over all heads and smoothed by the mean,
    and the window itself. Each layer selects by its own such score, once per KV head, and keeps the budget,
    or all of its tokens if they are fewer. Deviation: if a prompt's share is smaller than the window, the
    upper layers process the window; the authors' code has no rule for this.
    """
    score = window_score(window, kernel, "kvpress")
    narrow = SelectivePropagation(tsp_layer, score, share, window)
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(window),), narrow=narrow))


@paper(
    "Discovering the Gems in Early Layers: Accelerating Long-Context LLMs with 1000x Input Token Reduction",
    arxiv="2409.17422",
    family="selection-static",
    exact="deviates",
)
def gemfilter(budget: Amount, *, filter_layer: Depth = 0.44, kernel: Kernel = 5) -> Method:
    """GemFilter (Shi et al., 2024, arXiv:2409.17422), algorithm 1: an early layer selects tokens.

    The prompt runs up to `filter_layer` (its number, or the share of the layers up to it). The tokens with
    the largest q k_j of the newest query, summed over all heads and smoothed by the mean, are processed again
    by the whole model, at new positions without gaps; the cache holds these. In a later turn the selecting
    layers attend to the cached tokens. Deviation: the last token is always processed, because its logits are
    needed.
    """
    return Method(reread=Reread(filter_layer, LastLogits() >> Pool(kernel, "mean"), Budget(budget)))


@paper(
    "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction",
    arxiv="2505.23416",
    family="selection-static",
    exact="deviates",
    kvpress=Press("KVzipPress", same="yes, for contexts up to 2048 tokens"),
)
def kvzip(
    budget: Amount,
    *,
    sinks: Tokens = 4,
    over: Literal["stack", "layer", "head"] = "stack",
    normalised: bool = False,
    page: Page | None = None,
    prefix: TokenIds | None = None,
) -> Method:
    """KVzip (Kim et al., 2025, arXiv:2505.23416), section 3: what the model needs to repeat its context.

    The prompt is read a second time over the full cache, after an instruction to repeat it; a slot's score is
    the largest attention it receives. The best slots of the whole stack stay (over="layer": of every layer;
    over="head": of every head). normalised: KVzip+ (arXiv:2601.07891), in which attention is weighted by the
    size of the value's contribution relative to the layer's input (`RepeatWithNorms`). prefix: token ids of
    the instruction, by default encoded with the model's tokenizer. Deviation: one pass whatever the length,
    where the paper repeats 2048 tokens at a time; `sinks` stay as in kvpress.
    """
    probe = RepeatWithNorms(prefix) if normalised else RepeatContext(prefix)
    score = WeightedProbeAttention(probe) if normalised else ProbeAttention(probe)
    return Method(Keep(score, Budget(budget), _over(over), (Sink(sinks),), probe=probe, page=page))


@paper(
    "KVgrad: KV pairs by input x gradient attribution",
    family="selection-static",
    kvpress=Press("KVgradPress", same="yes, for contexts up to 512 tokens"),
)
def kvgrad(
    budget: Amount,
    *,
    sinks: Tokens = 4,
    over: Literal["stack", "layer", "head"] = "stack",
    page: Page | None = None,
    prefix: TokenIds | None = None,
) -> Method:
    """KVgrad (2026, openreview.net/forum?id=cg1wTCJjjk): the gradient of the last hidden states by slot.

    The prompt is read a second time after an instruction to repeat it, as in `kvzip`, forward and backward:

        score[j] = max_i p_ij ||W_O' v_j|| ||d phi / d a_i||, phi = sum_i ||h_i||^2

    over the repeated queries i and the heads of a group; a_i is the hidden state after the layer's attention,
    h_i the output of the last layer. over, page, prefix: as in `kvzip`. The equations are those of kvpress
    0.5.5; the paper itself was not at hand. There 512 tokens are repeated at a time; here it is one pass
    whatever the length.
    """
    probe = RepeatWithGradients(prefix)
    score = WeightedProbeAttention(probe)
    return Method(Keep(score, Budget(budget), _over(over), (Sink(sinks),), probe=probe, page=page))


@paper(
    "FINCH: Prompt-guided Key-Value Cache Compression for Large Language Models",
    arxiv="2408.00167",
    family="selection-static",
    exact="deviates",
    kvpress=Press("FinchPress", "variant=kvpress", "yes, at the end of a prompt that is read at once"),
)
def finch(
    budget: Amount, *, question: Window = 32, variant: Literal["paper", "llama", "kvpress"] = "paper"
) -> Method:
    """FINCH (Corallo and Papotti, 2024, arXiv:2408.00167): what a question at the end of a text attends to.

    The last `question` tokens of a prompt are its question. Every chunk (`prefill(..., chunk=)`) is read
    after the slots kept so far, then the question; the budget, of the tokens read so far, is chosen by

        score[j] = mean_i n_i p_ij over the question's queries i, n_i the number of positions that i sees.

    "paper", the default because it has the paper's n_i: the mean over all heads, so that a layer keeps one
    set, as in the authors' file for Mistral. "llama": their file for Llama, which computes n_i and then
    leaves them out. "kvpress": the mean over a group, so that each KV head keeps a set, and n_i is without i
    itself. Kept keys are rotated by their ranks, which are the positions that the paper rotates them to, so a
    chunk, the question and generated tokens directly follow the kept slots.
    Deviation: in the paper the caller gives a question of any length; a chunk's end may here cut the
    question, whose first tokens then count as text until the next chunk.
    """
    weigh, heads = pick(
        variant, paper=("visible", "layer"), llama=("alike", "layer"), kvpress=("before", "mean")
    )
    probe = Question(question)
    score = QuestionAttention(probe, weigh, heads)
    return Method(Keep(score, Budget(budget), Uniform(), phase=ByRank(), probe=probe))


@paper(
    "InfiniPot: Infinite Context Processing on Memory-Constrained LLMs",
    arxiv="2410.01518",
    family="selection-static",
    exact="deviates",
)
def infinipot(budget: Amount, *, share: Share = 0.5, prefix: TokenIds | None = None) -> Method:
    """InfiniPot (Kim et al., 2024, arXiv:2410.01518), section 3: surprising tokens, and a summary's.

    After every chunk (`prefill(..., chunk=)`) a catalyst prompt is read over the uncompressed cache, and
    removed. A `share` of the budget goes to the tokens with the largest surprisal -log p(x_j | x_<j) (NuC),
    which is computed once, when they are read, and the rest to those with the most attention from the
    catalyst's queries (CaP), summed over these and a group. Kept keys are rotated by their ranks, which are
    the positions that the paper resets them to. prefix: token ids of the catalyst, by default an instruction
    to summarise, or the model's own instruction to repeat a context. Deviation: the surprisal of a chunk's
    first token counts as 0; the cache is distilled after every chunk, not when a pot of another size is full;
    and the default share is ours.
    """
    probe = Catalyst(prefix)
    score = stage(Novelty(), share, ProbeAttention(probe))
    return Method(Keep(score, Budget(budget), Uniform(), phase=ByRank(), probe=probe))


@paper(
    "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference",
    arxiv="2502.00299",
    family="selection-static",
    exact="deviates",
    kvpress=Press("ChunkKVPress", same="no: kvpress chooses once for all heads of a layer"),
)
def chunkkv(budget: Amount, *, chunk: Together = 10, window: Window = 64, reuse: Together = 1) -> Method:
    """ChunkKV (Liu et al., 2025, arXiv:2502.00299), algorithms 1 and 2: keeps whole chunks.

    score[j] = the summed attention that tokens of j's chunk receive from the last `window` queries, the mean
    over a group; a chunk is `chunk` tokens of the text, and the window itself stays. Every `reuse` layers in
    a row keep the tokens that the first of them chooses (algorithm 2, which the paper offers for speed); the
    default is algorithm 1, in which every layer chooses, as in kvpress. Deviation: slots that remain after
    whole chunks go to the first tokens of the next best chunk, where the paper leaves them empty.
    """
    score = ChunkSum(WindowAttention(window), chunk)
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(window),), reuse=reuse))


def _over(over: str) -> Allocation:
    """Return the set from which the best slots are chosen: the whole stack's, a layer's, or a head's."""
    return pick(over, stack=AcrossLayers(), layer=AcrossHeads(0.0, blend=False), head=Uniform())

"""Merging: evicted tokens are merged into kept tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.fitted import as_fitted
from kvjax.grammar.phase import ByRank
from kvjax.grammar.when import STEP, Every
from kvjax.keep.algebra import MaxNormalised, Pool
from kvjax.keep.budgets.budget import Threshold, Uniform
from kvjax.keep.merges.low_pass import LowPass
from kvjax.keep.merges.matched import AttentionMatching
from kvjax.keep.merges.merge import ZipMerge
from kvjax.keep.merges.merge_cam import ValueMerge
from kvjax.keep.merges.merge_conv import ConvMerge
from kvjax.keep.merges.merge_counted import CountedMerge, GaussianMerge, MergedFirst, Pivots, Runs
from kvjax.keep.merges.merge_d2o import SimilarMerge
from kvjax.keep.merges.merge_runs import Opening, RunMerge
from kvjax.keep.merges.pooled import LastOfGroup, MeanOfGroup
from kvjax.keep.patterns import Recent, Sink
from kvjax.keep.prompts.hierarchy import Hierarchy
from kvjax.keep.scores.matched import RootMeanSquare
from kvjax.keep.scores.score import AccumulatedAttention, DecayedAttention, Position, WindowAttention
from kvjax.methods.papers import Press, paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Amount, Fit, Kernel, Page, Seed, Share, Tokens, Turns, Window, pick

# How many tokens are merged into one.
Together = Annotated[int, Range(2)]
# A cosine of two keys.
Cosine = Annotated[float, Range(-1, 1)]


@paper(
    "KeepKV: Achieving Periodic Lossless KV Cache Compression for Efficient LLM Inference",
    arxiv="2504.09936",
    family="merge-token",
    exact="deviates",
)
def keepkv(budget: Amount, *, recent: Share = 0.5, threshold: Cosine = 0.8) -> Method:
    """KeepKV (Tian et al., 2025, arXiv:2504.09936): evicted tokens join the kept ones they resemble.

    Heavy hitters and recent tokens stay as in H2O; `ZipMerge` merges the others. Deviations: those that
    `ZipMerge` lists.
    """
    score = AccumulatedAttention()
    merge = ZipMerge(threshold)
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(recent),), when=STEP, merge=merge))


@paper(
    "D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large Language Models",
    arxiv="2406.13035",
    family="merge-token",
    exact="deviates",
)
def d2o(budget: Amount, *, recent: Share = 0.5, sinks: Tokens = 4, smoothing: Share = 0.7) -> Method:
    """D2O (Wan et al., 2024, arXiv:2406.13035), token level: evicted tokens are merged or dropped.

    Heavy hitters and recent tokens stay as in H2O, and the first `sinks` ones; `SimilarMerge` decides about
    the others, by a running threshold per layer and row, in which the current evictions have the weight
    `smoothing`. Deviations: every layer has the same budget, where the paper gives more to layers of even
    attention. A token is merged if its own similarity reaches the threshold; the authors' code compares the
    mean over the tokens that the heads evict at the same time, and weights by the similarity itself and not
    by its exponential.
    """
    keep = Keep(
        AccumulatedAttention(), Budget(budget), Uniform(), (Sink(sinks), Recent(recent)), when=STEP,
        merge=SimilarMerge(smoothing),
    )  # fmt: skip
    return Method(keep)


@paper(
    "CaM: Cache Merging for Memory-efficient LLMs Inference",
    family="merge-token",
    kvpress=Press("CAMPress", same="no: other random numbers, and there decoding alone evicts"),
)
def cam(
    budget: Amount,
    *,
    recent: Share = 0.5,
    following: Window | None = None,
    seed: Seed = 0,
    variant: Literal["streaming", "window"] = "streaming",
) -> Method:
    """CaM (Zhang et al., ICML 2024): the value of an evicted token is distributed over later tokens.

    Slots evicted from a prompt are dropped. While decoding, `ValueMerge` merges the evicted token at random,
    the likelier the more attention it received compared with tokens that follow it; its key is dropped.
    "streaming", the default because that code drops tokens, where the other masks them: attention is
    accumulated, the next 16 tokens are compared and take up the value (kv_cache_cam.py of the authors, at
    fc80e64), and heavy hitters stay beside the recent tokens as in H2O. "window": as in their
    utils_hh/modify_llama_cam.py, the newest query's attention alone is compared with its mean over all tokens
    that follow, the next 32 get a 32nd each, and the first tokens stay beside the recent ones. What differs:
    the streaming code evicts as StreamingLLM does, so that the token in front of the recent ones leaves; in
    "window" a token merges when it leaves, where that file merges it one step before. `following` replaces 16
    and 32.
    """
    take, newest = pick(variant, streaming=(16, False), window=(32, True))
    score = -1.0 * Position() if newest else AccumulatedAttention()
    merge = ValueMerge(take if following is None else following, seed, newest)
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(recent),), when=STEP, merge=merge))


@paper(
    "ZeroMerge: Parameter-Free KV Cache Compression for Memory-Efficient Long-Context LLMs",
    arxiv="2503.10714",
    family="merge-token",
    exact="deviates",
)
def zeromerge(
    budget: Amount,
    *,
    recent: Share = 0.4,
    share: Share = 0.0,
    fading: Annotated[float, Range(0.001, 1)] = 0.98,
    bonus: Annotated[float, Range(0.01, 10)] = 0.6,
) -> Method:
    """ZeroMerge (Liu et al., 2025, arXiv:2503.10714): a few slots absorb and count all evicted ones.

    Heavy hitters and recent tokens stay as in H2O, by F[j] = sum_i fading^(t - i) p_ij. A `share` of the
    budget (at least one slot) absorbs evicted ones, each those with the most similar keys, as a running mean;
    a slot that represents w tokens has `bonus` log w added to its logits, keeps the largest F of the absorbed
    slots, and is never evicted (`CountedMerge`). The defaults are those of the authors' experiments: one such
    slot, a tail of 0.4 and a bonus of 0.6 (exam/exam_rouge.py), while the class itself has a tail of 0.1 and
    a bonus of 1; both fade by 0.98 with every query. Deviations: the residual slots are those of the least
    attention among the heavy hitters when the first token is evicted, where the authors' code pools runs of a
    prompt's other tokens; similarity is that of directions, not the code's product of keys.
    """
    score = AccumulatedAttention() if fading == 1 else DecayedAttention(fading)
    merge = CountedMerge(takers=share, newest=recent, fading=fading, bonus=bonus, largest=True)
    keep = Keep(MergedFirst(score), Budget(budget), Uniform(), (Recent(recent),), when=STEP, merge=merge)
    return Method(keep)


@paper(
    "EMS: Adaptive Evict-then-Merge Strategy for Head-wise KV Cache Compression Based on Global-Local "
    "Importance",
    arxiv="2412.08521",
    family="merge-token",
    exact="deviates",
)
def ems(
    budget: Amount, *, window: Window = 32, kernel: Kernel = 5, threshold: Cosine = 0.6, sinks: Tokens = 4
) -> Method:
    """EMS (Li et al., 2024, arXiv:2412.08521): evicted tokens join similar ones, or are dropped.

    score = G / max G + L / max L of the attention of all queries (global) and of the last `window` ones
    (local, smoothed by the maximum); the first `sinks` tokens and the window stay. An evicted token is merged
    into the kept one with the most similar key if their cosine reaches `threshold`, and is dropped otherwise
    (`CountedMerge`). Deviations: which tokens merge follows from the threshold alone, where the paper allots
    a number of them to every head by its redundancy; counts are added to the logits.
    """
    local = WindowAttention(window) >> Pool(kernel)
    score = MaxNormalised(AccumulatedAttention()) + MaxNormalised(local)
    protect = (Sink(sinks), Recent(window))
    return Method(Keep(score, Budget(budget), Uniform(), protect, merge=CountedMerge(threshold)))


@paper(
    "Model Tells You Where to Merge: Adaptive KV Cache Merging for LLMs on Long-Context Tasks",
    arxiv="2407.08454",
    family="merge-token",
    exact="deviates",
)
def kvmerger(budget: Amount, *, threshold: Cosine = 0.75, sinks: Tokens = 4, window: Window = 32) -> Method:
    """KVMerger (Wang et al., 2024, arXiv:2407.08454), section 4: neighbours with similar keys are merged.

    Consecutive tokens whose keys have a cosine above `threshold` form a run (`Runs`), whose pivot is the
    token with the most attention. Pivots are kept first, then other tokens, both by the attention that they
    received, and the other tokens of a run are merged into its pivot with Gaussian weights (`GaussianMerge`).
    The first `sinks` and the `window` newest tokens stay. Deviations: a budget is given, where the paper's
    follows from the threshold, so that the remaining budget goes to further tokens, and pivots beyond it are
    dropped; heavy hitters are not treated separately; the size of a run is added to its logits, where the
    paper multiplies by it; generated tokens do not extend runs.
    """
    runs = Runs(threshold, sinks, window)
    protect = (Sink(sinks), Recent(window))
    keep = Keep(Pivots(runs), Budget(budget), Uniform(), protect, merge=GaussianMerge(runs))
    return Method(keep)


@paper(
    "LoCoCo: Dropping In Convolutions for Long Context Compression",
    arxiv="2406.05317",
    family="merge-token",
    exact="deviates",
)
def lococo(budget: Amount, *, newest: Tokens = 0, segment: Window = 512, fitted: Fit | None = None) -> Method:
    """LoCoCo (Cai et al., 2024, arXiv:2406.05317): a convolution mixes evicted tokens into a few slots.

    The slots with the most attention so far and the `newest` tokens are kept; the kept slots with the least
    attention become mixtures of themselves and of all evicted slots (`ConvMerge`, section 3), at the end of a
    prompt or of its chunks (`prefill(..., chunk=512)` in the paper) and after every `segment` new tokens.
    fitted: the convolutions, as `kvjax fit lococo` writes them; they determine how many slots are mixtures
    (half of them in the authors' code). Deviations: slots stay at the positions of their tokens, where the
    authors renumber the slots of a cache; attention is summed over the heads of a group.

    On the shipped model it recovers almost nothing of the loss from dropping: with an eighth kept of half a
    text, the loss on the rest is 2.344 nats a token with all slots, 2.432 if the others are dropped, 2.479 if
    they are mixed by unfitted convolutions, and 2.431 after the fit.
    """
    merge = ConvMerge(newest, as_fitted(fitted))
    keep = Keep(
        AccumulatedAttention(), Budget(budget), Uniform(), (Recent(newest),), when=Every(segment), merge=merge
    )
    return Method(keep)


@paper(
    "Compressive Transformers for Long-Range Sequence Modelling",
    arxiv="1911.05507",
    family="merge-token",
    exact="deviates",
)
def compressive_transformer(budget: Amount, *, rate: Together = 3, recent: Share = 0.5) -> Method:
    """Compressive Transformer (Rae et al., 2019, arXiv:1911.05507), section 3.1: older tokens are pooled.

    The newest tokens stay as they are, the share `recent` of the budget and up to `rate` - 1 more. Every
    `rate` tokens before them become one, with their mean key and value, at the position of the last of them;
    the oldest of these are evicted if the budget is full. In steps, `rate` tokens are pooled at a time.
    Deviation: keys and values are pooled, keys as they are rotated, where the paper pools hidden states of a
    model that was trained to read them; of its pooling functions, this is the mean.
    """
    score, merge = LastOfGroup(rate, recent), MeanOfGroup(rate)
    return Method(Keep(score, Budget(budget), Uniform(), when=Every(rate), merge=merge))


@paper(
    "FreqKV: Key-Value Compression in Frequency Domain for Context Window Extension",
    arxiv="2505.00570",
    family="merge-token",
    exact="deviates",
)
def freqkv(
    budget: Amount,
    *,
    every: Annotated[int, Range(2)] = 2040,
    sinks: Tokens = 8,
    newest: Tokens = 8,
) -> Method:
    """FreqKV (Kai et al., 2025, arXiv:2505.00570): slots become the low frequencies of more slots.

    The first `sinks` and the `newest` tokens stay as they are. All slots between them, with keys before
    rotation, are transformed along the tokens by a DCT, channel by channel; its lowest frequencies are
    transformed back to as many slots as the budget leaves, and all slots are rotated by their rank
    (`LowPass`). It acts at the end of prompts and whenever `every` further tokens have come, so older tokens
    are compressed again and again. The authors' cache of 4096 slots is budget=2056 with `every`=2040.
    Deviation: a prompt beyond the budget is compressed once, at its end, after it attended to all of itself
    (`in_chunks` for chunks), where the paper compresses whenever 4096 slots are full, and its models are
    trained to read such slots.
    """
    score, protect = -1.0 * Position(), (Sink(sinks), Recent(newest))
    keep = Keep(
        score, Budget(budget), Uniform(), protect, when=Every(every), phase=ByRank(),
        merge=LowPass(sinks, newest),
    )  # fmt: skip
    return Method(keep)


@paper(
    "Hierarchical Context Merging: Better Long Context Understanding for Pre-trained LLMs",
    arxiv="2404.10308",
    family="merge-token",
    exact="deviates",
)
def homer(
    chunk: Annotated[int, Range(2)] = 512,
    *,
    height: Annotated[int, Range(1, 6)] = 2,
    shared_prefix: Tokens = 16,
    layers: Share = 0.625,
    fitted: Fit | None = None,
) -> Method:
    """HOMER (Song et al., 2024, arXiv:2404.10308), section 3: chunks are halved and merged, level by level.

    The first `shared_prefix` tokens are followed by 2^height chunks of `chunk` tokens at the same positions,
    which attend to the prefix and themselves, and these by the rest of the prompt. After each level of the
    lower `layers`, every block keeps the half of a chunk that the last token attends to most
    (`TokenReduction`), and neighbouring blocks merge; above, a single block is left. Tokens evicted from
    a layer are evicted from those below it, too. fitted: the mean logit at each distance, as `kvjax fit
    homer` writes it, which is subtracted. Source: the authors' code. Deviations: the rest of the prompt,
    the paper's suffix, is read once and sees all chunks, where the paper reads a copy with every chunk
    and averages copies when chunks merge; the number and length of chunks are hyper-parameters, so a
    shorter prompt fills fewer of them; a later turn, or the text after the first chunk of `prefill(...,
    chunk=)`, is read whole; and keys are stored before rotation.

    On the shipped model it does little: with a third kept of 512 tokens in four chunks, it finds 9 of 32
    records whose question was in the prompt (random tokens: 4, SnapKV: 28), copies worse than random tokens
    do, and finds 5 with biases subtracted. With two chunks, with 56 % kept, it finds 14.
    """
    word = Hierarchy(shared_prefix, chunk, height, layers, as_fitted(fitted))
    return Method(Keep(None, Budget(1.0), Uniform(), phase=word.phase, narrow=word))


@paper(
    "Dynamic Memory Compression: Retrofitting LLMs for Accelerated Inference",
    arxiv="2403.09636",
    family="merge-token",
    exact="deviates",
)
def dmc(*, fitted: Fit | None = None, page: Page | None = None) -> Method:
    """DMC (Nawrot et al., 2024, arXiv:2403.09636), section 3: a token opens a slot or joins the last.

    For every token each head decides whether it opens a slot (`Opening`); a slot holds the weighted mean of
    its tokens (`RunMerge`), in the prompt and while decoding, so the number of slots depends on the text.
    fitted: decisions and weights, as `kvjax fit dmc` writes them. Source: the authors' code (Megatron-LM's).
    Deviations: decisions and weights are linear maps of the layer's input, where the paper uses one channel
    of a key and of a query, which its training of all weights frees for this; a token attends to the others,
    and to itself, before it is merged, and tokens of a prompt to all of it; a slot has the position of its
    first token, where the paper's has that of its last; a slot's number of tokens is added to its logits; and
    the first generated token after a prompt opens a slot. `DynamicMerging` is a layer that computes as the
    paper does.

    On the shipped model 39 % of the slots of 512 tokens are left, with which it finds 22 of 32 records (all
    slots: 32).
    """
    arrays = as_fitted(fitted)
    keep = Keep(
        Opening(arrays), Budget(1.0), Threshold(0.0), when=STEP, merge=RunMerge(arrays), page=page
    )  # fmt: skip
    return Method(keep)


@paper(
    "Fast KV Compaction via Attention Matching",
    arxiv="2602.16284",
    family="merge-token",
    exact="deviates",
)
def attention_matching(budget: Amount, *, queries: Window = 64, turns: Turns = 2) -> Method:
    """Attention Matching (Zweiger et al., 2026, arXiv:2602.16284), section 3: AM-HighestAttnKeys.

    The slots of a prompt with the largest root mean square of the attention from reference queries are kept.
    They get biases, so that these queries' total attention to them equals that to all slots, and new values,
    so that the output is the same: both by least squares (`AttentionMatching`). Deviation: reference
    queries are the prompt's last `queries`, where the paper also has the model repeat the prompt or talk
    about it; all heads have the same budget, where the paper gives some more; layers are compacted by
    queries of the whole prompt, not of that compacted by lower layers; of several solutions, the one with
    the smallest change is taken.
    """
    score, merge = RootMeanSquare(queries), AttentionMatching(queries, turns)
    return Method(Keep(score, Budget(budget), Uniform(), merge=merge))

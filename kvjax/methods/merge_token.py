"""Merging: tokens that leave are folded into tokens that stay."""

from __future__ import annotations

from typing import Annotated, Literal

from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.fitted import as_fitted
from kvjax.grammar.when import STEP, Every
from kvjax.keep.algebra import OverPeak, Pool
from kvjax.keep.budgets.budget import Threshold, Uniform
from kvjax.keep.merges.matched import Matched
from kvjax.keep.merges.merge import ZipMerge
from kvjax.keep.merges.merge_cam import ValueMerge
from kvjax.keep.merges.merge_conv import ConvMerge
from kvjax.keep.merges.merge_counted import CountedMerge, GaussianMerge, Pivots, Runs, Standing
from kvjax.keep.merges.merge_d2o import SimilarMerge
from kvjax.keep.merges.merge_runs import Opening, RunMerge
from kvjax.keep.merges.pooled import LastOfEach, MeanOfEach
from kvjax.keep.patterns import Recent, Sink
from kvjax.keep.prompts.hierarchy import Hierarchy
from kvjax.keep.scores.matched import RootMeanSquare
from kvjax.keep.scores.score import AccumulatedAttention, DecayedAttention, Position, WindowAttention
from kvjax.methods.papers import Press, paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Amount, Fit, Kernel, Page, Seed, Share, Tokens, Window, pick

# How many tokens become one.
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
    """D2O (Wan et al., 2024, arXiv:2406.13035), token level: what leaves joins what stays, or is dropped.

    Heavy hitters and recent tokens stay as in H2O, and the first `sinks` ones; `SimilarMerge` decides about
    the others, by a threshold that every layer and row carries; `smoothing` is the weight of what leaves now
    in it. Deviations: every layer has the same budget, where the paper gives more to layers of even
    attention. A token is merged if its own similarity reaches the threshold; the authors' code asks for the
    mean of those that the heads evict in the same place, and weighs by the similarity itself and not by its
    exponential.
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
    """CaM (Zhang et al., ICML 2024): the value of an evicted token is shared out among those that follow it.

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
    """ZeroMerge (Liu et al., 2025, arXiv:2503.10714): some slots stand for all evicted ones, and count them.

    Heavy hitters and recent tokens stay as in H2O, by F[j] = sum_i fading^(t - i) p_ij. Of the budget,
    `share` are slots that take up evicted ones (at least one), each those with the most similar keys, as a
    running mean; a slot that stands for w tokens has `bonus` log w added to its logits, keeps the largest F
    of the slots that it took up, and stays (`CountedMerge`). The defaults are those of the authors'
    experiments: one such slot, a tail of 0.4 and a bonus of 0.6 (exam/exam_rouge.py), where the class itself
    has a tail of 0.1 and a bonus of 1; both fade by 0.98 with every query. Deviations: the residual slots are
    those of the least attention among the heavy hitters when the first token is evicted, where the authors'
    code pools runs of a prompt's other tokens; similarity is that of directions, not the code's product of
    keys.
    """
    score = AccumulatedAttention() if fading == 1 else DecayedAttention(fading)
    merge = CountedMerge(takers=share, newest=recent, fading=fading, bonus=bonus, largest=True)
    keep = Keep(Standing(score), Budget(budget), Uniform(), (Recent(recent),), when=STEP, merge=merge)
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
    """EMS (Li et al., 2024, arXiv:2412.08521): what leaves joins what it resembles, or the class of nothing.

    score = G / max G + L / max L of the attention of all queries (global) and of the last `window` ones
    (local, smoothed by the maximum); the first `sinks` tokens and the window stay. A token that leaves joins
    the kept one of the most similar key if their cosine reaches `threshold`, and is dropped otherwise
    (`CountedMerge`). Deviations: which tokens merge follows from the threshold alone, where the paper allots
    a number of them to every head by its redundancy; counts go to the logits.
    """
    local = WindowAttention(window) >> Pool(kernel)
    score = OverPeak(AccumulatedAttention()) + OverPeak(local)
    protect = (Sink(sinks), Recent(window))
    return Method(Keep(score, Budget(budget), Uniform(), protect, merge=CountedMerge(threshold)))


@paper(
    "Model Tells You Where to Merge: Adaptive KV Cache Merging for LLMs on Long-Context Tasks",
    arxiv="2407.08454",
    family="merge-token",
    exact="deviates",
)
def kvmerger(budget: Amount, *, threshold: Cosine = 0.75, sinks: Tokens = 4, window: Window = 32) -> Method:
    """KVMerger (Wang et al., 2024, arXiv:2407.08454), section 4: neighbours of similar keys become one.

    Tokens that follow each other and whose keys have a cosine above `threshold` are a run (`Runs`), of which
    the one of the most attention is the pivot. Pivots stay before others, both by the attention that they
    received, and the other tokens of a run join its pivot with Gaussian weights (`GaussianMerge`). The first
    `sinks` and the `window` newest tokens stay. Deviations: a budget is given, where the paper's follows from
    the threshold, so that what it leaves goes to further tokens, and pivots beyond it are dropped; heavy
    hitters are not set apart; the size of a run goes to its logits, where the paper multiplies by it; runs do
    not grow over tokens that are written.
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
    """LoCoCo (Cai et al., 2024, arXiv:2406.05317): a convolution mixes what leaves into a few slots.

    The slots of the most attention so far stay, and the `newest` tokens; those that stay with the least of it
    become mixtures of themselves and all that leaves (`ConvMerge`, section 3), at the end of a prompt or of
    its chunks (`prefill(..., chunk=512)` in the paper) and after every `segment` new tokens. fitted: the
    convolutions, as `kvjax fit lococo` writes them; they say how many slots are mixtures (half of them in the
    authors' code). Deviations: slots stay at the positions of their tokens, where the authors number the
    slots of a cache anew; attention is summed over the heads of a group.

    On the shipped model it wins back next to nothing of what dropping costs: with an eighth kept of half a
    text, the rest of it takes 2.344 nats a token with all slots, 2.432 where the others are dropped, 2.479
    where they are mixed by convolutions that were not fitted, and 2.431 behind the fit.
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
    """Compressive Transformer (Rae et al., 2019, arXiv:1911.05507), section 3.1: an older memory is pooled.

    The newest tokens stay as they are, the share `recent` of the budget and up to `rate` - 1 more. Of those
    before them every `rate` of a text become one, of their mean key and value, which stands where the last of
    them stood; the oldest of these leave where the budget is full. In steps, `rate` tokens are pooled at a
    time. Deviation: keys and values are pooled, keys as they are rotated, where the paper pools hidden states
    of a model that was trained to read them; of its ways of pooling this is the mean.
    """
    score, merge = LastOfEach(rate, recent), MeanOfEach(rate)
    return Method(Keep(score, Budget(budget), Uniform(), when=Every(rate), merge=merge))


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
    which see the prefix and themselves, and these by the rest of the prompt. Behind each level of the lower
    `layers`, the half of a chunk stays in every block that the last token asks for most (`Thinning`), and
    neighbouring blocks merge; above, all that is left is one block. What leaves a layer leaves those below
    it, too. fitted: what a logit is at a distance, as `kvjax fit homer` writes it, which is taken off.
    Read: the authors' code. Deviations: the rest of the prompt, the paper's suffix, is read once and sees
    all chunks, where a copy is read with every chunk and copies are averaged when these merge; the number and
    length of chunks are part of the sentence, so a shorter prompt fills fewer of them; a later turn, or what
    comes behind the first chunk of `prefill(..., chunk=)`, is read whole; and keys are stored as they are
    before rotation.

    On the shipped model it does little: with a third kept of 512 tokens in four chunks, it finds 9 of 32
    records that it was asked for before it chose (random tokens: 4, SnapKV: 28), copies worse than random
    tokens do, and finds 5 where biases are taken off. Of two chunks, with 56 % kept, it finds 14.
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
    """DMC (Nawrot et al., 2024, arXiv:2403.09636), section 3: a token opens a slot or joins the last one.

    Every head decides of a token whether it opens a slot (`Opening`), and the tokens that join one become
    their mean by weights (`RunMerge`), in the prompt and while decoding, so how much stays follows from the
    text. fitted: decisions and weights, as `kvjax fit dmc` writes them. Read: the authors' code
    (Megatron-LM's). Deviations: decisions and weights are linear maps of the layer's input, where the paper
    takes a channel of a key and of a query, which its training of all weights sets free; a token attends to
    the others, and to itself, before it joins them, and those of a prompt to all of it; a slot stands where
    its first token stood, where the paper's stands at its last; what weighs more than one token does so in
    the logits; and the first token that is written behind a prompt opens a slot. `DynamicMerging` is a layer
    that computes as the paper does.

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
def attention_matching(budget: Amount, *, queries: Window = 64, turns: Tokens = 2) -> Method:
    """Attention Matching (Zweiger et al., 2026, arXiv:2602.16284), section 3: AM-HighestAttnKeys.

    Of a prompt the slots stay that have the largest root mean square of the attention of reference queries.
    They get biases, so that these queries' attention to all of them together is as large as to all slots, and
    values, so that what it gives is the same: both by least squares (`Matched`). Deviation: reference queries
    are the prompt's last `queries`, where the paper also has the model repeat the prompt or talk about it;
    all heads have the same budget, where the paper gives some more; layers are compacted by queries of the
    whole prompt, not of what lower layers leave; where solutions are many, the one that changes least is
    taken.
    """
    score, merge = RootMeanSquare(queries), Matched(queries, turns)
    return Method(Keep(score, Budget(budget), Uniform(), merge=merge))

"""Retrieval by slots: every token is kept in the cache, and each query reads the tokens that may matter."""

from __future__ import annotations

from typing import Annotated

from kvjax.grammar import Budget, Method
from kvjax.methods.papers import paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Amount, Depth, Layers, Rank, Seed, Share, Tokens, Turns, Window
from kvjax.place.host import Host, HostValues
from kvjax.read.centroids import Clusters, ProductCodes, WeighedClusters
from kvjax.read.channels import LargestChannels
from kvjax.read.estimated import EstimatedClusters
from kvjax.read.exact import TopValues
from kvjax.read.hashed import HashSampling
from kvjax.read.narrow_keys import HeavyChannels, PrincipalKeys
from kvjax.read.persistent import PersistentSlots
from kvjax.read.ranked import SoftVotes
from kvjax.read.recycled import RecycledSlots
from kvjax.read.thresholds import AboveThreshold

# How many channels of every key are used.
Channels = Annotated[int, Range(1)]
# Planes: the hyperplanes of a hash table, whose code is a word of 32 bits. Tables: their number; a token is a
# candidate if it collides in two, so there are at least two.
Planes = Annotated[int, Range(1, 32)]
Tables = Annotated[int, Range(2, 4096)]
# Every how many tokens a selection is made anew.
Stride = Annotated[int, Range(1)]
# How many times the budget a step has buffers for.
Times = Annotated[int, Range(1)]
# Centroids of a head's keys, whose index has 16 bits; parts of a key, and the bits of a part's code.
Many = Annotated[int, Range(1, 65536)]
Parts = Annotated[int, Range(1)]
CodeBits = Annotated[int, Range(1, 8)]


@paper(
    "SparQ Attention: Bandwidth-Efficient LLM Inference",
    arxiv="2312.04985",
    family="retrieval-sparse",
    exact="deviates",
)
def sparq(budget: Amount, *, channels: Channels = 32, newest: Window = 32, skip_layers: Layers = 0) -> Method:
    """SparQ (Ribar et al., 2023, arXiv:2312.04985), section 4: few channels select the tokens to read.

    The `channels` largest channels of a query give approximate logits of all tokens. It attends to the tokens
    with the largest ones, and the mean of all values replaces the others, with their approximate probability.
    `budget` is the share (or number) of older tokens that a query reads. Deviation: the `newest` tokens and
    the token itself are read beside this budget, where the authors count them in. As in the authors' code,
    the query heads of a group share channels and tokens, those of the largest sums over the heads. Prompts
    and several tokens at once are read in full.
    """
    return Method(read=LargestChannels(Budget(budget), channels, newest, skip_layers))


@paper(
    "TidalDecode: Fast and Accurate LLM Decoding with Position Persistent Sparse Attention",
    arxiv="2410.05076",
    family="retrieval-sparse",
    exact="deviates",
)
def tidaldecode(
    budget: Amount, *, reselect: Depth = 0.44, newest: Window = 32, skip_layers: Layers = 2
) -> Method:
    """TidalDecode (Yang et al., 2024, arXiv:2410.05076), section 3: layers reuse the picks of lower layers.

    The first `skip_layers` layers attend to all tokens. So do the next one and layer `reselect` (its number,
    or the share of the layers up to it), and each picks the tokens with the largest q k_j, which all layers
    above read until the next picks. `budget` is the share (or number) of older tokens that those read.
    Deviation: the `newest` tokens are read beside this budget, where the authors rank them, too; the query
    heads of a group share picks, by the sum of their logits, where the authors' code picks for each head; and
    the paper's correction of the cache, which recomputes some tokens, is left out. Prompts and several tokens
    at once are read in full.
    """
    return Method(read=PersistentSlots(Budget(budget), reselect, newest, skip_layers))


@paper(
    "MagicPIG: LSH Sampling for Efficient LLM Generation",
    arxiv="2410.16179",
    family="retrieval-sparse",
    exact="deviates",
)
def magicpig(
    budget: Amount,
    *,
    planes: Planes = 10,
    tables: Tables = 150,
    sinks: Tokens = 4,
    newest: Window = 64,
    skip_layers: Layers = 1,
    seed: Seed = 0,
) -> Method:
    """MagicPIG (Chen et al., 2024, arXiv:2410.16179): tokens are sampled by hash tables instead of ranked.

    Each query head attends to the tokens whose centred keys collide with it in two of L = `tables` tables of
    K = `planes` random hyperplanes, and -log u_j is added to their logits, where u_j = 1 - (1 - p^K)^L - L
    p^K (1 - p^K)^(L - 1) is the probability of that: full attention is estimated by sampling, not truncated.
    The first `sinks` and the `newest` tokens are read in full, and so are the first `skip_layers` layers.
    `budget` is the share (or number) of older tokens that a step has buffers for, and bounds what it reads:
    how many collide depends on `planes` and `tables`. With 1.0 all of them fit; if fewer fit than collide, a
    random subset is chosen with larger weights (`HashSampling`).

    Deviation: the authors read all generated tokens in full; here they are hashed once they are older than
    `newest`, about the centre of the prompt's keys. A further turn is a prompt: then the centre is that of
    all older tokens. The authors add 1e-4 to u_j, keep the keys on the host, give each KV head other
    hyperplanes and also read layer 16 in full (`kvjax.by_layer` can). Prompts and several tokens at once are
    read in full.
    """
    return Method(read=HashSampling(Budget(budget), planes, tables, sinks, newest, skip_layers, seed))


@paper(
    "TokenSelect: Efficient Long-Context Inference and Length Extrapolation for LLMs via Dynamic Token-Level "
    "KV Cache Selection",
    arxiv="2411.02886",
    family="retrieval-sparse",
    exact="deviates",
)
def tokenselect(
    budget: Amount, *, sinks: Tokens = 128, newest: Window = 512, skip_layers: Layers = 0
) -> Method:
    """TokenSelect (Wu et al., 2024, arXiv:2411.02886), section 4: a layer's heads vote for tokens to read.

    Every query head votes for older tokens by its softmax over them, the votes of all heads of a layer are
    added, and all heads attend to the tokens with the most votes (`SoftVotes`), always including the first
    `sinks`, and to the `newest` ones. `budget` is the share (or number) of older tokens that are read.
    Deviation: every token has its own vote, where the paper reuses one for similar queries; prompts and
    several tokens at once are read in full, where the paper reads chunks of a prompt by the same rule.
    """
    return Method(read=SoftVotes(Budget(budget), newest, skip_layers, sinks))


@paper(
    "Loki: Low-rank Keys for Efficient Sparse Attention",
    arxiv="2406.02542",
    family="retrieval-sparse",
    exact="deviates",
)
def loki(budget: Amount, *, rank: Rank = 32, newest: Window = 32, skip_layers: Layers = 0) -> Method:
    """Loki (Singhania et al., 2024, arXiv:2406.02542), section 4: ranks tokens in few dimensions.

    Tokens are ranked by <q, k> in the `rank` largest principal components of a head's keys, and the best are
    attended to with whole keys. `budget` is the share (or number) of older tokens that a query reads.
    Deviation: components are those of the prompt's own keys (`PrincipalKeys`), while the paper fits them to
    other texts; keys are unchanged, and the components are stored beside them, where the paper stores keys in
    the basis of the components; the `newest` tokens are read beside the budget; the query heads of a group
    share tokens, by the sum of their products. Prompts and several tokens at once are read in full.
    """
    return Method(read=PrincipalKeys(Budget(budget), newest, skip_layers, rank))


@paper(
    "Post-Training Sparse Attention with Double Sparsity",
    arxiv="2408.07092",
    family="retrieval-sparse",
    exact="deviates",
)
def double_sparsity(
    budget: Amount, *, channels: Channels = 32, newest: Window = 32, skip_layers: Layers = 0
) -> Method:
    """Double Sparsity (Yang et al., 2024, arXiv:2408.07092), section 3: heavy channels rank the tokens.

    The `channels` heaviest channels of a head's keys are stored separately (the paper's label cache); <q, k>
    in these selects the tokens to attend to. `budget` is the share (or number) of older tokens that a query
    reads. Deviation: heavy channels are those of the prompt's own keys (`HeavyChannels`), while the paper
    fits them to other texts, by keys or by products with queries; labels have all bits, the paper's 4; the
    `newest` tokens are read beside the budget; the query heads of a group share tokens, by the sum of their
    products. Prompts and several tokens at once are read in full.
    """
    return Method(read=HeavyChannels(Budget(budget), newest, skip_layers, channels))


@paper(
    "PQCache: Product Quantization-based KVCache for Long Context LLM Inference",
    arxiv="2407.12820",
    family="retrieval-sparse",
    exact="deviates",
)
def pqcache(
    budget: Amount,
    *,
    parts: Parts = 2,
    code_bits: CodeBits = 6,
    turns: Turns = 10,
    newest: Window = 32,
    skip_layers: Layers = 0,
) -> Method:
    """PQCache (Zhang et al., 2024, arXiv:2407.12820), section 3: a product quantiser finds the tokens.

    Keys are cut into `parts`, each of which has a code of `code_bits` bits for the nearest of the prompt's
    centroids (`ProductCodes`). Products with centroids approximate those with keys, and the tokens with the
    largest ones are attended to. `budget` is the share (or number) of older tokens that a query reads.
    Deviation: all is in device memory, where the paper has keys and values on the host and prefetches them;
    codes take a byte; centroids start from evenly spaced tokens; the query heads of a group share tokens, by
    the sum of their products. Prompts and several tokens at once are read in full.
    """
    return Method(read=ProductCodes(Budget(budget), newest, skip_layers, parts, code_bits, turns))


@paper(
    "ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression",
    arxiv="2412.03213",
    family="retrieval-sparse",
    exact="deviates",
)
def clusterkv(
    budget: Amount,
    *,
    clusters: Many = 64,
    turns: Turns = 10,
    sinks: Tokens = 16,
    newest: Window = 32,
    skip_layers: Layers = 2,
) -> Method:
    """ClusterKV (Liu et al., 2024, arXiv:2412.03213), section 3: tokens are recalled by clusters of keys.

    Keys are clustered by their directions, and clusters are read in the order of <q, centroid> until the
    budget is filled (`Clusters`), after the first `sinks` tokens. `budget` is the share (or number) of older
    tokens that a query reads; the first `skip_layers` layers read all. Deviation: there are `clusters` of
    them, where the paper has one for every 80 tokens of a prompt; generated tokens join the cluster of the
    nearest centroid, where the paper clusters every 320 of them; all is in device memory; the query heads of
    a group share clusters, by the sum of their products. Prompts and several tokens at once are read in full.
    """
    return Method(read=Clusters(Budget(budget), newest, skip_layers, clusters, turns, sinks))


@paper(
    "Squeezed Attention: Accelerating Long Context Length LLM Inference",
    arxiv="2411.09688",
    family="retrieval-sparse",
    exact="deviates",
)
def squeezed_attention(
    budget: Amount,
    *,
    clusters: Many = 64,
    turns: Turns = 10,
    sinks: Tokens = 0,
    newest: Window = 32,
    skip_layers: Layers = 0,
) -> Method:
    """Squeezed Attention (Hooper et al., 2024, arXiv:2411.09688), section 3: clusters by expected attention.

    Keys are clustered by their directions, and a centroid is the mean of its keys. A softmax over centroids,
    weighted by their numbers of keys, estimates the attention to a key of each cluster (`WeighedClusters`),
    which is the order in which clusters are read. `budget` is the share (or number) of older tokens that a
    query reads. Deviation: clusters are read until the budget is filled, where the paper reads those above
    one threshold, calibrated on the last tokens of a fixed context; there are `clusters` of them, where the
    paper has one for every 20 keys; there is one level of clusters; tokens after a fixed context are
    clustered, too, where the paper reads them all; the query heads of a group share tokens, by the mean of
    their shares. Prompts and several tokens at once are read in full.
    """
    read = WeighedClusters(Budget(budget), newest, skip_layers, clusters, turns, sinks)
    return Method(read=read)


@paper(
    "Efficient LLM Inference with Kcache",
    arxiv="2404.18057",
    family="retrieval-sparse",
    exact="deviates",
)
def kcache(
    budget: Amount, *, newest: Window = 32, skip_layers: Layers = 0, resident: Share | None = None
) -> Method:
    """KCache (He and Wu, 2024, arXiv:2404.18057), section 3: all keys are read, and few values.

    Softmax runs over all tokens, and the values of its largest probabilities are read, without
    renormalisation (`TopValues`). `budget` is the share (or number) of older values that a query reads. With
    `resident`, values are in host memory, as in the paper, and the device caches this share of them, those
    that were read last, at least as many as one step reads; without it, all are in device memory.
    Deviation: the `newest` tokens are read beside the budget; the query heads of a group share tokens, by the
    sum of their probabilities among older tokens, which ranks them as the paper does where a group has one
    head. There was no code of the authors to compare with. Prompts and several tokens at once are read in
    full.
    """
    host = None if resident is None else HostValues(resident)
    return Method(read=TopValues(Budget(budget), newest, skip_layers), host=host)


@paper(
    "Recycled Attention: Efficient inference for long-context language models",
    arxiv="2411.05787",
    family="retrieval-sparse",
    exact="deviates",
)
def recycled_attention(
    budget: Amount, *, stride: Stride = 10, newest: Window = 32, skip_layers: Layers = 0
) -> Method:
    """Recycled Attention (Xu et al., 2024, arXiv:2411.05787), section 3: tokens reuse an earlier selection.

    Every `stride` tokens one attends to everything, and the tokens with the most attention from it are those
    that the following ones attend to, with all that come since (`RecycledSlots`; the paper's later title is
    RefreshKV). `budget` is the share (or number) of older tokens that are read between two selections.
    Deviation: the `newest` tokens are selected beside the budget; the first token after a prompt selects,
    where the paper selects with the prompt's last one; the query heads of a group share tokens, by the sum of
    their shares of older tokens. Of the paper's schedules this is the fixed one. There was no code of the
    authors to compare with. Prompts and several tokens at once are read in full.
    """
    return Method(read=RecycledSlots(Budget(budget), newest, skip_layers, stride))


@paper(
    "Top-Theta Attention: Sparsifying Transformers by Compensated Thresholding",
    arxiv="2502.08363",
    family="retrieval-sparse",
    exact="deviates",
)
def top_theta(
    budget: Amount, *, window: Window = 64, room: Times = 4, newest: Window = 32, skip_layers: Layers = 0
) -> Method:
    """Top-Theta (Berestizshevsky et al., 2025, arXiv:2502.08363), section 3: thresholds say what is read.

    A query reads the values whose logits exceed a threshold of its head, calibrated so that about `budget`
    slots do; probabilities keep the denominator over all slots, and the mean of all values has the weight of
    what is not read (`AboveThreshold`). `budget` is the share (or number) of older tokens that exceed a
    threshold on average, and a step has buffers for `room` times as many.
    Deviation: thresholds are calibrated on the `window` newest queries of a row's own prompt, where the paper
    calibrates one per head and length on other texts; the denominator is exact; the `newest` tokens are read
    beside the budget; the heads of a group read what any of them does. There was no code of the authors to
    compare with. Prompts and several tokens at once are read in full.
    """
    return Method(read=AboveThreshold(Budget(budget), newest, skip_layers, asks=window, room=room))


@paper(
    "RetroInfer: A Vector-Storage Approach for Scalable Long-Context LLM Inference",
    arxiv="2505.02922",
    family="retrieval-sparse",
    exact="deviates",
)
def retroinfer(
    budget: Amount,
    *,
    estimate: Share = 0.25,
    clusters: Many = 64,
    turns: Turns = 10,
    sinks: Tokens = 4,
    newest: Window = 64,
    skip_layers: Layers = 0,
    resident: Share | None = None,
) -> Method:
    """RetroInfer (Chen et al., 2025, arXiv:2505.02922), section 4: clusters are read, estimated or left out.

    The clusters whose mean keys match a query best are read, the next ones count by their centroids, numbers
    of keys and sums of values, and the others not at all (`EstimatedClusters`). The first `sinks` and the
    `newest` tokens are always read. `budget` is the share (or number) of older tokens that a query reads at
    most, and `estimate` the share of the clusters that are estimated. With `resident`, keys and values are in
    host memory, as in the paper, and the device caches this share of them, those that were read last, at
    least as many as one step reads; without it, all are in device memory. Deviation: a prompt is clustered as
    one, where the authors cluster segments of it, and generated tokens join the nearest
    cluster, where they cluster every 1024; there are `clusters` of them, where they have one for every 16
    keys; the query heads of a group share clusters, by the sum of their products. Prompts and several
    tokens at once are read in full.
    """
    read = EstimatedClusters(Budget(budget), newest, skip_layers, clusters, turns, sinks, estimate)
    return Method(read=read, host=None if resident is None else Host(resident))

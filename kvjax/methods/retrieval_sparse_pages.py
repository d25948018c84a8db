"""Retrieval by pages: the cache keeps every token, and each query reads the pages that may matter."""

from __future__ import annotations

from typing import Annotated

from kvjax.base.errors import InputError
from kvjax.grammar import Budget, Keep, Method, Store
from kvjax.grammar.fitted import as_fitted
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.patterns import Recent
from kvjax.methods.budget_head import duoattention
from kvjax.methods.papers import paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import (
    Amount,
    Bits,
    Fit,
    Group,
    Kernel,
    Layers,
    Page,
    Ratio,
    Share,
    Tokens,
    Window,
    window_score,
)
from kvjax.place.host import Host
from kvjax.read.blocks import RepresentativeKeys
from kvjax.read.pages import LargestChannelBounds, PageBounds, PageMeans
from kvjax.read.placed import PlacedSegments
from kvjax.read.pooled_blocks import CompressedBlocks
from kvjax.read.sub_pages import SubPageBounds
from kvjax.store.affine import Affine

# How many keys represent a block, how many channels of a query rank blocks, and how many tokens a part has.
Representatives = Annotated[int, Range(1)]
Channels = Annotated[int, Range(1)]
Size = Annotated[int, Range(1, 65536)]


@paper(
    "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference",
    arxiv="2406.10774",
    family="retrieval-sparse",
    exact="deviates",
)
def quest(
    budget: Amount, *, page: Page = 16, skip_layers: Layers = 2, resident: Share | None = None
) -> Method:
    """Quest (Tang et al., 2024, arXiv:2406.10774), section 3.3: only pages that may matter to this query.

    `budget` is the share (or number) of tokens visited per decoded token; the first `skip_layers` layers and
    the newest, not yet full page are always read. Deviation: the query heads of a group share their pages
    (the largest bound among them decides), since keys and values of a group are stored once. Prompts and
    several tokens at once are read in full. With `resident`, keys and values are in host memory, and the
    device caches this share of the pages, at least those that a step visits.
    """
    host = None if resident is None else Host(resident)
    return Method(read=PageBounds(Budget(budget), page, skip_layers), host=host)


@paper(
    "MoBA: Mixture of Block Attention for Long-Context LLMs",
    arxiv="2502.13189",
    family="retrieval-sparse",
    exact="deviates",
)
def moba(
    budget: Amount, *, page: Page = 512, skip_layers: Layers = 0, fitted: Fit | None = None,
    resident: Share | None = None,
) -> Method:  # fmt: skip
    """MoBA (Lu et al., 2025, arXiv:2502.13189), section 2.2: the blocks whose mean keys match a query best.

    Of the full blocks of `page` tokens, a decoded token attends to those with the largest dot product of its
    query with the mean of their keys, as many as `budget` says, and to the block that is not yet full.
    Deviation: the query heads of a group share their blocks (the sum of their products decides); prompts and
    several tokens at once are read in full. A model that was not trained for it is not changed; `kvjax
    convert --to moba` makes one whose prompts read blocks, too. fitted: weights of the means, as `kvjax fit
    moba` writes them, for a model that was trained with full attention. resident: as of `quest`.
    """
    host = None if resident is None else Host(resident)
    return Method(read=PageMeans(Budget(budget), page, skip_layers, as_fitted(fitted)), host=host)


@paper(
    "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention",
    arxiv="2502.11089",
    family="retrieval-sparse",
    exact="deviates",
)
def nsa(
    budget: Amount, *, page: Page = 64, newest: Window = 512, sinks: Tokens = 64, compress: Size = 32,
    stride: Size = 16, skip_layers: Layers = 0, fitted: Fit | None = None, resident: Share | None = None,
) -> Method:  # fmt: skip
    """NSA (Yuan et al., 2025, arXiv:2502.11089), section 3.3: the selected blocks of native sparse attention.

    A decoded token attends to the first `sinks` tokens, the `newest` ones and, of the blocks of `page` tokens
    between them, to those to whose compressed keys the heads of a group attend most (`CompressedBlocks`).
    `budget` is the share (or number) of older tokens that are read beside these. fitted: how keys are
    compressed, as `kvjax fit nsa` writes it; without one, by their mean. Deviation: this is the selection for
    a model that was trained with full attention. One softmax runs over selected and newest tokens, where the
    paper gates three; compressed values are not attended to; compressed keys are weighted means within one
    block, where the paper has an MLP, and some that cross a border. Prompts and several tokens at once are
    read in full; `kvjax convert --to nsa` makes a model with all of it. resident: as of `quest`.
    """
    if page < compress or page % stride or compress % stride:
        raise InputError(
            f"nsa: page must be at least compress, and both multiples of stride={stride}, got page={page} "
            f"and compress={compress}"
        )
    host = None if resident is None else Host(resident)
    read = CompressedBlocks(
        Budget(budget), page, newest, sinks, compress, stride, skip_layers, as_fitted(fitted)
    )
    return Method(read=read, host=host)


@paper(
    "InfLLM: Training-Free Long-Context Extrapolation for LLMs with an Efficient Context Memory",
    arxiv="2402.04617",
    family="retrieval-sparse",
    exact="deviates",
)
def infllm(
    budget: Amount, *, page: Page = 128, newest: Window = 4096, sinks: Tokens = 128,
    keys: Representatives = 4, skip_layers: Layers = 0, resident: Share = 0.0,
) -> Method:  # fmt: skip
    """InfLLM (Xiao et al., 2024, arXiv:2402.04617), section 3: blocks of older tokens, found by a few keys.

    A token attends to the first `sinks` tokens, the `newest` ones and, of the blocks between them, to those
    whose `keys` representative keys have the largest logits with its queries, summed over the heads of a
    layer. Representatives are the keys with the largest logits from the `newest` tokens after them, as in the
    paper. `budget` is the share (or number) of older tokens that are read, the authors' 16 blocks of 128
    being 2048. Blocks are in host memory; the device caches the share `resident` of them that was read last,
    at least those that a step reads.

    Deviation: this is the paper's decoding. Prompts and several tokens at once are read in full, where the
    paper reads a long prompt by the same rule; and tokens keep their own positions, where it gives all those
    beyond the window one distance. The query heads of a group share representatives, and sinks are whole
    blocks; up to a block more than the newest tokens is read, until it is full.
    """
    read = RepresentativeKeys(Budget(budget), page, newest, sinks, keys, skip_layers)
    return Method(read=read, host=Host(resident))


@paper(
    "RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression",
    arxiv="2502.14051",
    family="retrieval-sparse",
    exact="deviates",
)
def rocketkv(
    budget: Amount,
    *,
    read: Ratio = 0.25,
    window: Window = 32,
    kernel: Kernel = 63,
    page: Page = 4,
    channels: Channels = 32,
) -> Method:
    """RocketKV (Behnam et al., 2025, arXiv:2502.14051), section 3: kept tokens are read in part.

    SnapKV's choice of a prompt is kept, `budget` of it, and each query attends to the share `read` of the
    kept tokens, in pages selected by bounds in its `channels` largest channels alone
    (`LargestChannelBounds`). The paper splits a compression evenly: `read` is then as large as the
    budget. Deviation: the paper derives page and channels from the compression ratio, and scales the
    kernel with the prompt, while here all are given; pages are ranked for all heads of a group at once,
    by the largest bound among them.
    """
    keep = Keep(window_score(window, kernel, "grouped"), Budget(budget), Uniform(), (Recent(window),))
    return Method(keep, read=LargestChannelBounds(Budget(read), page, 0, channels))


@paper(
    "ArkVale: Efficient Generative LLM Inference with Recallable Key-Value Eviction",
    family="retrieval-sparse",
)
def arkvale(
    budget: Amount, *, page: Page = 32, skip_layers: Layers = 2, resident: Share | None = None
) -> Method:
    """ArkVale (Chen et al., NeurIPS 2024), section 4: evicted pages are recalled when they matter.

    A page's digest is the cuboid of its keys, and its score the largest product that a key in there could
    have with the query; the pages of the largest scores are read. `budget` is the share (or number) of tokens
    visited per decoded token; the first `skip_layers` layers and the newest, not yet full page are always
    read. With `resident`, all pages are in host memory, and the device caches this share of them, those read
    last. The query heads of a group share their pages (the largest score among them decides). Of the paper's
    digests, spheres are left out, as the authors' kernel leaves them. Prompts and several tokens at once are
    read in full.
    """
    host = None if resident is None else Host(resident)
    return Method(read=PageBounds(Budget(budget), page, skip_layers), host=host)


@paper(
    "ReAttention: Training-Free Infinite Context with Finite Attention Scope",
    arxiv="2407.15176",
    family="retrieval-sparse",
    exact="deviates",
)
def reattention(
    budget: Amount, *, page: Page = 32, newest: Window = 4096, sinks: Tokens = 32, skip_layers: Layers = 0
) -> Method:
    """ReAttention (Liu et al., 2024, arXiv:2407.15176), section 3: attention before attention, without RoPE.

    Products of unrotated queries and keys pick segments of `page` tokens; these, the first `sinks` and the
    `newest` tokens are attended to at positions without gaps (`PlacedSegments`), so that no distance exceeds
    what is read. `budget` is the share (or number) of older tokens that are read. Deviation: segments begin
    at multiples of `page`, where the authors' code takes a span around each of the best tokens; the query
    heads of a group share segments, those of the largest product among them, where it takes the union of what
    each picks. Prompts and several tokens at once are read in full and at their own positions, where the
    paper reads chunks of a prompt by the same rule.
    """
    read = PlacedSegments(Budget(budget), page, newest, sinks, skip_layers)
    return Method(store=Store(unrotated=True), read=read)


@paper(
    "LServe: Efficient Long-sequence LLM Serving with Unified Sparse Attention",
    arxiv="2502.14866",
    family="retrieval-sparse",
    exact="deviates",
)
def lserve(
    budget: Amount, *, fitted: Fit | None = None, retrieval: Share = 0.5, sinks: Tokens = 64,
    window: Window = 256, page: Page = 64, part: Page = 16, bits: Bits = 4, group: Group | None = 32,
) -> Method:  # fmt: skip
    """LServe (Yang et al., 2025, arXiv:2502.14866), section 3: streaming heads, and pages for the others.

    The share `retrieval` of the KV heads, those of the largest gates, keeps every token, and a query attends
    to the pages of `page` tokens that could matter most, ranked by their parts of `part` tokens
    (`SubPageBounds`), and to the newest tokens that fill no page. All other heads keep, and read, the first
    `sinks` and the newest `window` tokens, as in DuoAttention. Keys and values have `bits` bits, with a range
    of `group` channels. `budget` is the share (or number) of older tokens that are read. fitted:
    DuoAttention's gates, as `kvjax fit duoattention` writes them. Deviation: pages are picked in every step,
    where the paper does so in every fourth; a prompt is read with the whole attention of all heads, where the
    paper's streaming heads compute few of its blocks; a head that keeps every token reads all of them as long
    as they are no more than a streaming head holds; the query heads of a group share pages, those of the
    largest bound among them.
    """
    keep = duoattention(fitted=fitted, retrieval=retrieval, sinks=sinks, window=window, page=page).keep
    if page is None or page % part:
        raise InputError(f"lserve: part must be a divisor of page, which is {page}, got {part}")
    read = SubPageBounds(Budget(budget), page, 0, part, sinks + window)
    return Method(keep, Store(Affine(bits, group=group), Affine(bits, group=group)), read)

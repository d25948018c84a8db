"""Retrieval for caches in host memory: what a step brings to the device is chosen before it is needed."""

from __future__ import annotations

from typing import Annotated

from kvjax.base.errors import InputError
from kvjax.grammar import Budget, Method, Store
from kvjax.methods.papers import paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Amount, Bits, Group, Layers, Rank, Ratio, Share, Tokens, Window
from kvjax.place.host import Host, HostValues
from kvjax.read.exact import ValuesOfMass
from kvjax.read.foreseen import ForeseenSlots
from kvjax.read.landmarks import Landmarks
from kvjax.read.low_bits import CopiesInFewBits
from kvjax.read.narrow_keys import HeavyProducts
from kvjax.store.affine import Affine
from kvjax.store.first_layers import FirstLayers
from kvjax.store.truncated import Truncated

# How many first layers read everything: at least one, because the first layer has none below it.
ReadWhole = Annotated[int, Range(1)]
# How far a logit may lie below the largest.
Below = Annotated[float, Range(0)]
# How many channels of every key are used.
Channels = Annotated[int, Range(1)]
# Tokens of a chunk; tokens whose keys have a basis together.
Chunk = Annotated[int, Range(1)]


@paper(
    "InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV Cache Management",
    arxiv="2406.19707",
    family="retrieval-sparse",
    exact="deviates",
)
def infinigen(
    budget: Amount,
    *,
    alpha: Below = 5.0,
    columns: Ratio = 0.3,
    window: Window = 64,
    newest: Window = 32,
    skip_layers: ReadWhole = 2,
    resident: Share | None = None,
) -> Method:
    """InfiniGen (Lee et al., 2024, arXiv:2406.19707), section 4: a layer's slots are chosen a layer ahead.

    The input of the layer below, times this layer's query weights, predicts its queries; in a few columns of
    skewed queries and keys they rank the older tokens, and those whose logit is at most `alpha` below the
    largest one are read (`ForeseenSlots`). `budget` is the share (or number) of older tokens that a query
    reads at most. With `resident`, keys and values are in host memory, as in the paper, and the device caches
    this share of them, those that were read last, at least as many as one step reads; what a layer lacks can
    be copied while the layer below computes. Without it, all are in device memory. Deviation: the skew is
    that of the prompt's `window` newest queries, where the authors fit it to a sample text; the `newest`
    tokens are read beside the budget, and the largest logit is that of older tokens; every KV head counts for
    itself, where the authors read as many tokens in all heads as heads count on average; the query heads of a
    group read what any of them needs; nothing is dropped from host memory, where the paper bounds it. Prompts
    and several tokens at once are read in full.
    """
    read = ForeseenSlots(Budget(budget), newest, skip_layers, alpha, columns, window)
    return Method(read=read, host=None if resident is None else Host(resident))


@paper(
    "ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference",
    arxiv="2410.21465",
    family="retrieval-sparse",
    exact="deviates",
)
def shadowkv(
    budget: Amount,
    *,
    rank: Rank = 32,
    segment: Chunk = 1024,
    chunk: Chunk = 8,
    outliers: Tokens = 48,
    newest: Window = 32,
    skip_layers: Layers = 0,
    resident: Share | None = None,
) -> Method:
    """ShadowKV (Sun et al., 2024, arXiv:2410.21465), section 4: low-rank keys, and values on the host.

    Keys are stored before rotation, in the `rank` largest directions of every `segment` of them
    (`Truncated`), and rebuilt and rotated where they are read. Chunks of `chunk` tokens are read by their
    landmarks, the means of their rotated keys, and the `outliers` chunks that a mean describes worst always
    (`Landmarks`). `budget` is the share (or number) of older tokens that a query reads beside outliers and
    the `newest` tokens. With `resident`, values are in host memory, as in the paper, and the device caches
    this share of them, those that were read last, at least as many as one step reads; without it, all are in
    device memory. Deviation: a basis is that of one KV head and of `segment` tokens, where the authors have
    one for all heads and the whole prompt, so that rank counts per head; landmarks are those of rebuilt keys,
    and outliers are rebuilt, too, where the authors keep them as computed; generated tokens are encoded when
    they fill a segment, where the authors keep them as computed. Prompts and several tokens at once are read
    in full.
    """
    if segment % chunk:
        raise InputError(f"shadowkv: segment must be a multiple of chunk, which is {chunk}, got {segment}")
    read = Landmarks(Budget(budget), chunk, outliers, newest, skip_layers)
    store = Store(Truncated(rank, segment), None, unrotated=True)
    return Method(store=store, read=read, host=None if resident is None else HostValues(resident))


@paper(
    "HCAttention: Extreme KV Cache Compression via Heterogeneous Attention Computing for LLMs",
    arxiv="2507.19823",
    family="retrieval-sparse",
    exact="deviates",
)
def hcattention(
    budget: Amount,
    *,
    mass: Ratio = 0.9,
    bits: Bits = 4,
    group: Group = 32,
    newest: Window = 32,
    skip_layers: Layers = 0,
    resident: Share | None = None,
) -> Method:
    """HCAttention (Yang et al., 2025, arXiv:2507.19823): codes of keys, and values on the host.

    Keys are stored in `bits` bits, and attention weights are computed from these codes. A step reads the
    values of the tokens with the largest weights, as few as hold the share `mass` of a layer's attention to
    older tokens (`ValuesOfMass`), so that layers with flat attention read more; nothing is evicted for good.
    `budget` is the share (or number) of older values that a query reads at most. With `resident`, values are
    in host memory, as in the paper, and the device caches this share of them, those that were read last, at
    least as many as one step reads; without it, all are in device memory. Source: the abstract and figures;
    there was no code of the authors to compare with. Deviation: codes are those of a grid for each `group`
    channels of a token, where the paper has a codebook; values are brought to the device, where the paper
    weighs them on the host; the `newest` tokens are as computed and read beside the budget; weights are not
    renormalised; the query heads of a group share tokens, by the sum of their weights. Prompts and several
    tokens at once are read in full.
    """
    read = ValuesOfMass(Budget(budget), newest, skip_layers, mass=mass)
    host = None if resident is None else HostValues(resident)
    return Method(store=Store(Affine(bits, group=group), None), read=read, host=host)


@paper(
    "TailorKV: A Hybrid Framework for Long-Context Inference via Tailored KV Cache Optimization",
    arxiv="2505.19586",
    family="retrieval-sparse",
    exact="deviates",
)
def tailorkv(
    budget: Amount,
    *,
    quantised: Layers = 1,
    bits: Bits = 2,
    group: Group = 32,
    channels: Channels = 12,
    window: Window = 64,
    newest: Window = 128,
    resident: Share | None = None,
) -> Method:
    """TailorKV (Yao et al., 2025, arXiv:2505.19586): few bits in dense layers, few tokens in sparse ones.

    The first `quantised` layers, whose attention is spread over many tokens, store everything in `bits` bits,
    keys channel by channel and values token by token. In the others a query reads the tokens with the largest
    products in the `channels` channels that matter most for queries and keys (`HeavyProducts`). `budget` is
    the share (or number) of older tokens that it reads there; the `newest` ones are stored as computed and
    always read. With `resident`, keys and values of these layers are in host memory, as in the paper, and the
    device caches this share of them, those that were read last, at least as many as one step reads; without
    it, all are in device memory. Source: the abstract, and what is known of the authors' code, in which the
    first layer or the first two of a model are dense. Deviation: channels are those of the prompt's `window`
    newest queries, and kept until the next prompt; the query heads of a group share tokens, by the sum of
    their products; `group` tokens are encoded together. Prompts and several tokens at once are read in full.
    """
    keys, values = Affine(bits, axis="channel", group=group), Affine(bits, group=group, together=group)
    store = Store(FirstLayers(quantised, keys, None), FirstLayers(quantised, values, None), newest)
    read = HeavyProducts(Budget(budget), newest, quantised, channels, window)
    host = None if resident is None else Host(resident)
    return Method(store=store if quantised else None, read=read, host=host)


@paper(
    "SpeCache: Speculative Key-Value Caching for Efficient Generation of LLMs",
    arxiv="2503.16163",
    family="retrieval-sparse",
    exact="deviates",
)
def specache(
    budget: Amount,
    *,
    bits: Bits = 2,
    group: Group = 32,
    newest: Window = 32,
    skip_layers: Layers = 0,
    resident: Share | None = None,
) -> Method:
    """SpeCache (Jie et al., 2025, arXiv:2503.16163): a step selects what the next one reads exactly.

    A copy of keys and values in `bits` bits ranks the older tokens in every step, and the best are read as
    they are by the next step, whose copies from host memory can thus begin before it does; to all others it
    attends by the copy (`CopiesInFewBits`). `budget` is the share (or number) of older tokens that are read
    as they are, beside the `newest` ones. With `resident`, keys and values are in host memory, as in the
    paper, and the device caches this share of them, those that were read last, at least as many as one step
    reads; without it, all are in device memory, beside the copy. Source: the abstract and summaries of the
    paper; there was no code of the authors to compare with. Deviation: the token itself selects for the next
    one, where the paper decodes a speculative next token beside it and takes that one's selection; the first
    token after a prompt reads its own; codes are grids of `group` channels of a token; the query heads of a
    group share tokens, by the sum of their attention. Prompts and several tokens at once are read in full.
    """
    read = CopiesInFewBits(Budget(budget), newest, skip_layers, copies=Affine(bits, group=group))
    return Method(read=read, host=None if resident is None else Host(resident))

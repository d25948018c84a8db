"""Retrieval by slots: everything stays in the cache, and each query reads the tokens that may matter."""

from __future__ import annotations

from typing import Annotated

from kvjax.grammar import Budget, Method
from kvjax.methods.papers import paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Amount, Depth, Layers, Seed, Tokens, Window
from kvjax.read.channels import LargestChannels
from kvjax.read.hashed import HashSampling
from kvjax.read.persistent import PersistentSlots

# How many channels of every key are looked at.
Channels = Annotated[int, Range(1)]
# Hyperplanes of a hash table, whose code lies in a word of 32 bits, and how many tables there are: two must
# have a token.
Planes = Annotated[int, Range(1, 32)]
Tables = Annotated[int, Range(2, 4096)]


@paper(
    "SparQ Attention: Bandwidth-Efficient LLM Inference",
    arxiv="2312.04985",
    family="retrieval-sparse",
    exact="deviates",
)
def sparq(budget: Amount, *, channels: Channels = 32, newest: Window = 32, skip_layers: Layers = 0) -> Method:
    """SparQ (Ribar et al., 2023, arXiv:2312.04985), section 4: few channels say which tokens to read.

    The `channels` largest channels of a query give all its logits by guess. The tokens of the largest ones
    are attended to, and the mean of all values stands for the others, with their probability by guess.
    budget is the share (or number) of older tokens that a query reads. Deviation: the `newest` tokens and the
    token itself are read beside this budget, where the authors count them in. As in the authors' code, the
    query heads of a group share channels and tokens, those of the largest sums over the heads. Prompts and
    several tokens at once are read in full.
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
    """TidalDecode (Yang et al., 2024, arXiv:2410.05076), section 3: picks persist from layer to layer.

    The first `skip_layers` layers attend to all tokens. So do the next one and layer `reselect` (its number,
    or the share of the layers up to it), and each picks the tokens of the largest q k_j, which all layers
    above read until picks are made anew. budget is the share (or number) of older tokens that those read.
    Deviation: the `newest` tokens are read beside this budget, where the authors rank them, too; the query
    heads of a group share picks, by the sum of their logits, where the authors' code picks for each head;
    and the paper's correction of the cache, which computes some tokens anew, is left out. Prompts and several
    tokens at once are read in full.
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
    K = `planes` random hyperplanes, and -log u_j is added to their logits, where u_j = 1 - (1 - p^K)^L -
    L p^K (1 - p^K)^(L - 1) is how likely that was: attention is estimated, not cut. The first `sinks` and the
    `newest` tokens are read in full, and so are the first `skip_layers` layers. budget is the share (or
    number) of older tokens for which a step has room, and says what it reads: how many collide is up to
    `planes` and `tables`. With 1.0 all of them fit; where fewer fit than collide, some are chosen by chance
    and weigh more (`HashSampling`).

    Deviation: the authors read all generated tokens in full; here they are hashed once they are older than
    `newest`, about the centre of the prompt's keys. A further turn is a prompt: then the centre is that of
    all older tokens. The authors add 1e-4 to u_j, keep the keys on the host, give each KV head other
    hyperplanes and also read layer 16 in full (`kvjax.by_layer` can). Prompts and several tokens at once are
    read in full.
    """
    return Method(read=HashSampling(Budget(budget), planes, tables, sinks, newest, skip_layers, seed))

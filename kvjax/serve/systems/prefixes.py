"""Systems that share the pages of common prefixes."""

from __future__ import annotations

from kvjax.serve.grammar import System
from kvjax.serve.grammar.words import (
    LRU,
    Blocks,
    ByNode,
    Chunked,
    LongestPrefix,
    PrefillFirst,
    PrefixGroups,
    Spans,
    Tree,
)
from kvjax.serve.systems.papers import paper


@paper(
    "SGLang: Efficient Execution of Structured Language Model Programs (section 3, RadixAttention)",
    arxiv="2312.07104",
    claim="at least 95% of an infinite tree's hits with a tenth of its blocks",
    reverses="prompts without a common prefix: no hit",
    tested="test_a_tree_of_a_tenth_of_the_blocks_has_nearly_all_hits",
)
def radixattention(page: int = 16, rows: int = 256, tokens: int = 8192, window: int = 128) -> System:
    """RadixAttention (Zheng et al., 2023, arXiv:2312.07104), section 3: a tree, longest match first.

    Deviation: the tree is one of whole pages; the paper's pages are single tokens.
    """
    batch = PrefillFirst(rows, tokens)
    return System(place=Blocks(page), share=Tree(), evict=LRU(), order=LongestPrefix(window), batch=batch)


@paper(
    "SGLang: Efficient Execution of Structured Language Model Programs",
    arxiv="2312.07104",
    claim="the first token of requests with a common prefix comes sooner than in chunks without a tree",
    reverses="prompts without a common prefix: the iterations of sarathi",
    tested="test_a_tree_brings_first_tokens_sooner",
)
def sglang(tokens: int = 2048, page: int = 16, rows: int = 256, window: int = 128) -> System:
    """SGLang (Zheng et al., 2023, arXiv:2312.07104) as it runs today: that tree, and chunks."""
    batch = Chunked(tokens, rows)
    return System(place=Blocks(page), share=Tree(), evict=LRU(), order=LongestPrefix(window), batch=batch)


@paper(
    "BatchLLM: Optimizing Large Batched LLM Inference with Global Prefix Sharing and Throughput-oriented "
    "Token Batching",
    arxiv="2412.03594",
    claim="fewer tokens read than first come, first served, where prefixes alternate and the tree is small",
    reverses="a tree that holds all prefixes: no fewer tokens are read than in order of arrival",
    tested="test_groups_of_one_prefix_read_it_once",
)
def batchllm(tokens: int = 2048, page: int = 16, rows: int = 1024) -> System:
    """BatchLLM (Zheng et al., 2024, arXiv:2412.03594), sections 4 and 5: groups of requests with one prefix.

    Groups with the most output tokens per input token run first. Deviation: groups share the first page
    alone, while the paper chooses the level by dynamic programming.
    """
    batch = Chunked(tokens, rows)
    return System(place=Blocks(page), share=Tree(), evict=LRU(), order=PrefixGroups(), batch=batch)


@paper(
    "vTensor: Flexible Virtual Tensor Management for Efficient LLM Serving",
    arxiv="2407.15309",
    claim="chunks of a common prefix, mapped into several requests, are prefilled once",
    reverses="prefixes shorter than a chunk: nothing is shared",
    tested="test_whole_chunks_of_a_prefix_are_mapped_into_every_request",
)
def vtensor(page: int = 128, ahead: int = 1, rows: int = 256, tokens: int = 8192) -> System:
    """VTensor (Xu et al., 2024, arXiv:2407.15309), section 4: chunks of memory mapped behind virtual tensors.

    page: tokens of a chunk. Deviation: mapping takes no time, so that doing it beside the computation gains
    nothing, and the kernels are those of tables.
    """
    place, batch = Spans(page, ahead), PrefillFirst(rows, tokens)
    return System(place=place, share=Tree(), evict=LRU(), batch=batch)


@paper(
    "ChunkAttention: Efficient Self-Attention with Prefix-Aware KV Cache and Two-Phase Partition",
    arxiv="2402.15220",
    claim="a step reads each page of a common prompt once: 32 requests take less time per token than apart",
    reverses="prompts without a common prefix: every page has one reader, and nothing changes",
    tested="test_pages_that_rows_share_are_read_once",
)
def chunkattention(page: int = 64, rows: int = 256, tokens: int = 8192) -> System:
    """ChunkAttention (Ye et al., 2024, arXiv:2402.15220), section 3: the first phase by chunk, then by row.

    page: tokens of a chunk, a node of the paper's tree. Deviation: each chunk is attended to apart, and all
    parts merge at the end; the paper merges shared chunks while it goes through them.
    """
    batch = PrefillFirst(rows, tokens)
    return System(place=Blocks(page), share=Tree(), evict=LRU(), batch=batch, attend=ByNode(1))


@paper(
    "DeFT: Decoding with Flash Tree-attention for Efficient Tree-structured LLM Inference",
    arxiv="2404.00242",
    claim="nodes are read once; of ten pieces or more, the largest is at most 1.1 of the mean",
    reverses="branches shorter than ten pieces: pieces are as unequal as branches",
    tested="test_nodes_are_cut_into_nearly_equal_pieces",
)
def deft(pages: int = 8, page: int = 16, rows: int = 256, tokens: int = 8192) -> System:
    """DeFT (Yao et al., 2024, arXiv:2404.00242), section 3: grouped by node, and nodes are cut evenly.

    pages: the most pages of a piece. Deviation: a piece lies in one node; DeFT-Flatten's may span several,
    with a mask.
    """
    batch = PrefillFirst(rows, tokens)
    return System(place=Blocks(page), share=Tree(), evict=LRU(), batch=batch, attend=ByNode(pages))

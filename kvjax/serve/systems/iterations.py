"""Systems that decide anew every iteration."""

from __future__ import annotations

from kvjax.serve.grammar import System
from kvjax.serve.grammar.words import (
    Blocks,
    Chunked,
    Iterations,
    Lanes,
    LeastWaste,
    MemoryTime,
    Never,
    PrefillFirst,
    Recompute,
    Reserved,
    Shortest,
    SkipJoin,
    Spans,
    Swap,
)
from kvjax.serve.systems.papers import paper


@paper(
    "Orca: A Distributed Serving System for Transformer-Based Generative Models (OSDI 2022)",
    claim="at most 0.55 of the iterations of static batches of as many rows, where outputs differ",
    reverses="outputs of one length: as many iterations as static batches",
    tested="test_orca_needs_about_half_of_the_iterations_of_static_batches",
)
def orca(rows: int = 8, longest: int = 8192) -> System:
    """Orca (Yu et al., OSDI 2022), section 3: scheduling by iterations, memory for the longest request."""
    return System(place=Lanes("max", longest), batch=Iterations(rows), preempt=Never())


@paper(
    "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    arxiv="2309.06180",
    claim="waste below 4% at pages of 16 to 64; more requests per second than with worst-case memory",
    reverses="memory for every request at once: paging admits nobody more",
    tested="test_pages_serve_more_than_worst_case_room_in_equal_bytes",
)
def vllm(page: int = 16, rows: int = 256, tokens: int = 8192) -> System:
    """PagedAttention (Kwon et al., 2023, arXiv:2309.06180): pages on demand, prompts first.

    The paper's swapping, in place of recomputation, is `System(..., preempt=Swap())`.
    """
    return System(place=Blocks(page), batch=PrefillFirst(rows, tokens), preempt=Recompute())


@paper(
    "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve",
    arxiv="2403.02310",
    claim="a lower p99 of the time between tokens than prompts first",
    reverses="one prompt alone: its first token comes later, because weights are read for every chunk",
    tested="test_chunks_shorten_the_longest_gap_between_tokens",
)
def sarathi(tokens: int = 512, page: int = 16, rows: int = 256) -> System:
    """Sarathi-Serve (Agrawal et al., 2024, arXiv:2403.02310), section 4: chunks of prompts beside decodes."""
    return System(place=Blocks(page), batch=Chunked(tokens, rows))


@paper(
    "Fast Distributed Inference Serving for Large Language Models",
    arxiv="2305.05920",
    claim="a lower mean completion than first come, first served, where prompts are short, outputs differ",
    reverses="long prompts with short outputs (Azure code), and outputs of one length: completion is later",
    tested="test_skip_join_queues_shorten_the_mean_completion",
)
def fastserve(rows: int = 8, levels: int = 6, quantum: int = 16, tokens: int = 512, page: int = 16) -> System:
    """FastServe (Wu et al., 2023, arXiv:2305.05920), section 4: skip-join multi-level feedback queues.

    Deviation: requests are not promoted after a long wait, and swaps are not started ahead of need.
    """
    order = SkipJoin(levels, quantum, tokens)
    return System(place=Blocks(page), order=order, batch=Iterations(rows), preempt=Swap())


@paper(
    "Fast Inference for Augmented Large Language Models",
    arxiv="2410.18248",
    claim="a lower mean completion than in order of arrival, whatever a call does with the slots there",
    reverses="no calls, and requests of one length: the iterations of vllm",
    tested="test_memory_over_time_and_the_least_waste_shorten_the_mean_completion",
)
def lamps(page: int = 16, rows: int = 256, tokens: int = 8192) -> System:
    """LAMPS (Shahout et al., 2024, arXiv:2410.18248), section 4: calls of other programs, memory over time.

    Requests are ordered by the token-seconds that they will hold, and a call preserves, discards or swaps the
    slots, whichever wastes least. Deviation: lengths and calls are predicted exactly unless a request says
    otherwise, what a call costs others is seen when it begins, a call adds no tokens, and nobody is promoted
    after a long wait.
    """
    place, batch = Blocks(page), PrefillFirst(rows, tokens)
    return System(place=place, order=MemoryTime(), batch=batch, calls=LeastWaste())


@paper(
    "S3: Increasing GPU Utilization during Generative Inference for Higher Throughput",
    arxiv="2306.06000",
    claim="more requests per second than with worst-case memory, in equal bytes and with exact predictions",
    reverses="outputs as long as the worst case: predictions free no memory",
    tested="test_predicted_room_serves_more_than_worst_case_room",
)
def s3(rows: int = 256, page: int = 16) -> System:
    """S3 (Jin et al., 2023, arXiv:2306.06000), section 3: memory for the predicted bucket, shortest first.

    Deviation: batching is per iteration, without first-fit packing; a request that outgrows its bucket keeps
    its place if the next bucket fits.
    """
    return System(place=Lanes("predicted", page=page), order=Shortest(), batch=Iterations(rows))


@paper(
    "vAttention: Dynamic Memory Management for Serving LLMs without PagedAttention",
    arxiv="2405.04437",
    claim="pages of 64 KB waste less than 4%, of 2 MB more than four times as much",
    reverses="short chats: a request needs less than 2 MB of each layer's keys; small pages admit more",
    tested="test_small_physical_pages_waste_less_than_large_ones",
)
def vattention(page: int = 32, ahead: int = 1, rows: int = 256, tokens: int = 8192) -> System:
    """VAttention (Prabhu et al., 2024, arXiv:2405.04437), sections 5 and 6: memory mapped behind one address.

    page: tokens of a physical page, its bytes over those of a token's keys in a layer: with 8 KV heads of 128
    channels in 16 bits 64 KB are 32 tokens, and 2 MB are 1,024. ahead: tokens for which pages are mapped
    early, while an iteration computes. Deviation: mapping takes no time, and pages of ended requests are not
    kept mapped.
    """
    return System(place=Spans(page, ahead), batch=PrefillFirst(rows, tokens), preempt=Recompute())


@paper(
    "TensorRT-LLM: in-flight batching with a paged cache (NVIDIA, 2023)",
    claim="admitting only what surely ends preempts nobody, where admitting all that fits now preempts",
    reverses="memory for every request at once: both admit the same, and take as many iterations",
    tested="test_room_for_the_longest_output_preempts_nobody",
)
def tensorrt_llm(page: int = 64, rows: int = 64) -> System:
    """TensorRT-LLM (NVIDIA, 2023): iterations, pages of 64 tokens, and `GUARANTEED_NO_EVICT`, its default.

    Its other mode, `MAX_UTILIZATION`, is `System(..., preempt=Recompute())`.
    """
    return System(place=Blocks(page), batch=Iterations(rows), preempt=Reserved())

"""Systems whose batches start and end together."""

from __future__ import annotations

from kvjax.serve.grammar import System
from kvjax.serve.grammar.words import Bins, Brought, Lanes, Never, Whole
from kvjax.serve.systems.papers import paper


@paper(
    "FasterTransformer: batches of requests, each with memory for the longest",
    claim="the baseline: iterations and waste of static batches with worst-case memory",
    reverses="outputs of one length leave no row idle, and continuous batching saves no step",
    tested="test_orca_needs_about_half_of_the_iterations_of_static_batches",
)
def fastertransformer(rows: int = 8, longest: int = 8192) -> System:
    """FasterTransformer (NVIDIA, 2021): static batches, and memory for `longest` tokens in each row.

    Deviation: prompts of a batch are not padded to the longest, and tokens are streamed, not returned when
    the batch has ended, so times are better than the real system's.
    """
    return System(place=Lanes("max", longest), batch=Whole(rows), preempt=Never())


@paper(
    "Multi-Bin Batching for Increasing LLM Inference Throughput",
    arxiv="2412.04504",
    claim="more bins by predicted output need fewer iterations, as k bins of a uniform length do by E[max]",
    reverses="outputs of one length all lie in one bin, and nothing changes",
    tested="test_more_bins_need_fewer_iterations_as_the_closed_form_says",
)
def multi_bin_batching(bins: int = 4, rows: int = 8, longest: int = 1024, room: int = 8192) -> System:
    """Multi-Bin Batching (Guldogan et al., 2024, arXiv:2412.04504), section 3: a batch is of one bin.

    longest: the largest predicted output, at which bins of equal width end. Deviation: if no bin fills a
    batch, an incomplete one starts.
    """
    return System(place=Lanes("max", room), order=Bins(bins, longest), batch=Whole(rows), preempt=Never())


@paper(
    "Hugging Face Accelerate: big model inference, modules in host memory until they are called",
    claim="a step takes as long for 8 rows as for one, and over ten times as long as with resident weights",
    reverses="a prompt of 16,000 tokens: its computation hides most of what bringing the weights takes",
    tested="test_weights_in_host_memory_cost_every_step_as_much_whatever_its_rows",
)
def hf_accelerate(rows: int = 8, longest: int = 8192) -> System:
    """Accelerate's `cpu_offload` under `transformers`' generate: static batches, weights from host memory.

    Deviation: all weights are brought for an iteration at once, not module by module, and by the engine once
    for up to 16 decode steps; prompts of a batch are not padded; memory is for `longest` tokens, where
    `transformers` lets caches grow.
    """
    return System(place=Lanes("max", longest), batch=Whole(rows), preempt=Never(), weights=Brought())

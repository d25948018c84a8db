"""Papers on how many requests are computed: none has a policy, and something here does what they do.

Each names what runs in its place, and a claim about a count of that, not about seconds.
"""

from __future__ import annotations

from typing import NamedTuple


class KernelPaper(NamedTuple):
    """A paper, what runs in its place (`runs`), its claim as a count, where that reverses, and the test."""

    id: str
    title: str
    arxiv: str
    runs: str
    claim: str
    reverses: str
    tested: str

    @property
    def url(self) -> str:
        return f"https://arxiv.org/abs/{self.arxiv}" if self.arxiv else ""


_ROWS = (
    KernelPaper(
        "flashattention",
        "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness",
        "2205.14135",
        "kvjax.ops.attention.flash_prefill",
        "the largest array of a prompt's attention grows with its length, not with the square",
        "a prompt of one block: no smaller than the logits",
        "test_no_array_of_a_prompts_attention_grows_with_the_square_of_its_length",
    ),
    KernelPaper(
        "flashattention2",
        "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
        "2307.08691",
        "pallas_kernels.flash_prefill.plan",
        "a causal prompt of n blocks visits n (n + 1) / 2 pairs of blocks, and masks only n of them",
        "queries that are all newer than the slots: every pair is visited",
        "test_a_causal_prompt_visits_half_of_the_blocks_and_masks_the_diagonal",
    ),
    KernelPaper(
        "flashattention3",
        "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision",
        "2407.08608",
        'kvjax.words: Rotate("hadamard") >> Float8()',
        "attention of float8 operands has 1.1 to 1.3 times less error if a Hadamard matrix rotates "
        "queries and keys with outliers; the paper has 2.6, and its asynchrony is not here",
        "numbers without outliers: the same error",
        "test_a_rotation_before_float8_makes_the_error_of_outliers_smaller",
    ),
    KernelPaper(
        "flashinfer",
        "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving",
        "2501.01005",
        "kvjax.ops.decode: paged_decode, ragged_decode, stacked_decode",
        "pages of any size, ragged rows and rectangles of one cache give one attention; a table of pages of "
        "16 tokens weighs 1/2,048 of them (128 channels, bfloat16)",
        "pages of one token with 8 channels: the table weighs 1/64 of them",
        "test_one_cache_in_four_layouts_gives_one_attention",
    ),
    KernelPaper(
        "flash-decoding",
        "Flash-Decoding for long-context inference (Dao et al., 2023)",
        "",
        "kvjax.ops.attention.union.merge",
        "slots split among workers give the same attention; each hands on as much as one token, however many",
        "as many workers as slots: they hand on more than the slots weigh",
        "test_parts_of_the_slots_merge_to_all_of_them",
    ),
    KernelPaper(
        "tree-attention",
        "Tree Attention: Topology-aware Decoding for Long-Context Attention on GPU clusters",
        "2408.04093",
        "kvjax.ops.attention.union.merge",
        "parts merge in any order: log2(n) rounds for n devices, where a ring takes n - 1",
        "two devices: one round, as a ring",
        "test_parts_merge_in_a_tree_of_few_rounds",
    ),
    KernelPaper(
        "hydragen",
        "Hydragen: High-Throughput LLM Inference with Shared Prefixes",
        "2402.05099",
        "kvjax.fork(cache, copies, room=...)",
        "a step of n samples reads the keys and values of their prompt once, not n times",
        "prompts shorter than what a sample may write: nearly nothing is saved",
        "test_samples_of_a_prompt_hold_and_read_it_once",
    ),
    KernelPaper(
        "bifurcated-attention",
        "Bifurcated Attention: Accelerating Massively Parallel Decoding with Shared Prefixes in LLMs",
        "2403.08845",
        "kvjax.fork(cache, copies, room=...)",
        "attention of n samples is two products, one over the prompt and one over what each wrote",
        "prompts shorter than what a sample may write: nearly nothing is saved",
        "test_samples_of_a_prompt_hold_and_read_it_once",
    ),
    KernelPaper(
        "megatron-tp",
        "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
        "1909.08053",
        'kvjax.serve.run, model kvjax.load(..., mesh="model=4", rules="tensor")',
        "each of n devices has 1/n of the bytes of weights and pages; a step has two all-reduces a layer",
        "one device: no all-reduce, and all bytes",
        "test_a_step_on_a_mesh_has_two_all_reduces_per_layer_and_a_share_of_the_bytes",
    ),
    KernelPaper(
        "bitdecoding",
        "BitDecoding: Unlocking Tensor Cores for Long-Context LLMs with Low-Bit KV Cache",
        "2503.18773",
        "kvjax.serve, method kivi(bits=4)",
        "pages of 4-bit codes with an uncoded residual weigh at most 0.35 of uncoded pages at 32k tokens",
        "texts shorter than the residual: no page less",
        "test_pages_of_codes_weigh_a_share_of_uncoded_ones",
    ),
)
KERNELS = {one.id: one for one in _ROWS}

"""Systems that divide prompts, or prefill and decoding, among devices."""

from __future__ import annotations

from kvjax.serve.grammar import System
from kvjax.serve.grammar.words import Apart, Blocks, Chain, PrefillFirst
from kvjax.serve.systems.papers import paper


@paper(
    "DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large Language Model Serving",
    arxiv="2401.09670",
    claim="more requests meet a tight time per token than with prompts first, at equal rates per device",
    reverses="a loose time per token: more requests meet it on devices that do both",
    tested="test_devices_apart_meet_a_tight_time_per_token_more_often",
)
def distserve(
    prefill: int = 1, decode: int = 1, page: int = 16, rows: int = 256, tokens: int = 8192
) -> System:
    """DistServe (Zhong et al., 2024, arXiv:2401.09670), section 4: prefill and decoding on other devices.

    `kvjax.serve.run` takes a device, or a model's mesh of them, for every instance. Deviation: instances take
    requests in turn, slots move through host memory, all at once and pushed, and parallelism and placement
    are not searched.
    """
    return System(place=Blocks(page), batch=PrefillFirst(rows, tokens), split=Apart(prefill, decode))


@paper(
    "KV-Runahead: Scalable Causal LLM Inference by Parallel Key-Value Cache Generation",
    arxiv="2405.05329",
    claim="the first token of a long prompt comes 1.4 times as soon on two devices, later with equal parts",
    reverses="a slow link: the chain is slower than one device",
    tested="test_a_chain_of_devices_brings_the_first_token_sooner",
)
def kv_runahead(devices: int = 2, page: int = 16, rows: int = 256, tokens: int = 8192) -> System:
    """KV-Runahead (Cho et al., 2024, arXiv:2405.05329), section 3: a prompt on a chain of devices.

    In each layer a device waits for the keys and values before its part, without an all-gather. Parts are the
    best of a few between equal tokens and equal seconds. Deviation: slots move at the rate to host memory,
    and the paper's search is hierarchical, on measured times.
    """
    return System(place=Blocks(page), batch=PrefillFirst(rows, tokens), split=Chain(devices))

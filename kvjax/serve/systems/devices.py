"""Systems that give prefill and decoding devices of their own."""

from __future__ import annotations

from kvjax.serve.grammar import System
from kvjax.serve.grammar.words import Apart, Blocks, PrefillFirst
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

    Deviation: instances take requests in turn, slots move at the rate to host memory, all at once and pushed,
    and parallelism and placement are not searched.
    """
    return System(place=Blocks(page), batch=PrefillFirst(rows, tokens), split=Apart(prefill, decode))

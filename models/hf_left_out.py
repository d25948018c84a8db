"""Well-known families that do not load, and why: what errors and the table of families say of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NamedTuple

ADDING = 'docs/how-to/own-architecture.md, "A family of checkpoints", says how to add one'


class LeftOut(NamedTuple):
    """A family that does not load: what people call it, why, and its names in config.json and in GGUF."""

    title: str
    reason: str
    names: tuple[str, ...]
    gguf: tuple[str, ...] = ()


LEFT_OUT = (
    LeftOut(
        "DeepSeek-V4",
        "its layers cache entries that pool 4 or 128 tokens by learned weights beside a window, which no "
        "mixer of kvjax does",
        ("deepseek_v4",), ("deepseek4",),
    ),
    LeftOut(
        "MiniMax-M3",
        "each KV head picks blocks of 128 tokens by index keys of its own, which no mixer of kvjax does",
        ("minimax_m3_vl", "minimax_m3_vl_text", "minimax_m3"), ("minimax-m3",),
    ),
    LeftOut(
        "Mistral Large 4",
        "layers with an indexer read the latents of other layers (kv_source_layers), which no mixer of kvjax "
        "does",
        ("mistral_large4", "mistral_large4_text"),
    ),
)  # fmt: skip


def why_not(name: str, known: Iterable[str]) -> str:
    """Say why a name outside `known` is left out, or which one is nearest to it, for errors.

    >>> why_not("deepseek_v4", ["deepseek_v3"])[:57]
    'is DeepSeek-V4 and left out: its layers cache entries tha'
    >>> why_not("lama", ["llama"])
    'is not supported (the nearest is llama)'
    """
    for one in LEFT_OUT:
        if name in one.names + one.gguf:
            return f"is {one.title} and left out: {one.reason}"
    near = difflib.get_close_matches(name, known, 1)
    return "is not supported" + (f" (the nearest is {near[0]})" if near else "")

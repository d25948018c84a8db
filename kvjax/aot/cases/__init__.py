"""Programs to compile for TPUs: kernels at typical shapes. One file per operation.

Every module here has a dict `CASES`, from a name that begins with the operation's to a function that makes
the `Case` for a device.
"""

from __future__ import annotations

from collections.abc import Callable

from kvjax.aot.case import Case
from kvjax.aot.cases import (
    attention_stats,
    bundled,
    decoder,
    flash_prefill,
    gated_delta,
    grouped_decode,
    mla_decode,
    page_scores,
    paged_append,
    paged_decode,
    picked_decode,
    ragged_decode,
    shapes,
    sparse_prompt,
    stacked_decode,
)
from kvjax.aot.hardware import Device

CASES: dict[str, Callable[[Device], Case]] = {
    **paged_decode.CASES,
    **bundled.CASES,
    **stacked_decode.CASES,
    **ragged_decode.CASES,
    **picked_decode.CASES,
    **grouped_decode.CASES,
    **mla_decode.CASES,
    **paged_append.CASES,
    **flash_prefill.CASES,
    **sparse_prompt.CASES,
    **attention_stats.CASES,
    **page_scores.CASES,
    **gated_delta.CASES,
    **decoder.CASES,
    **shapes.CASES,
}

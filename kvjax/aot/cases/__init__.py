"""Programs to compile for TPUs: kernels at the shapes that count. One file per operation.

Every module here has a dict `CASES`, from a name that begins with the operation's to a function that makes
the `Case` for a device.
"""

from __future__ import annotations

from collections.abc import Callable

from kvjax.aot.case import Case
from kvjax.aot.cases import attention_stats, page_scores, paged_decode
from kvjax.aot.hardware import Device

CASES: dict[str, Callable[[Device], Case]] = {
    **attention_stats.CASES,
    **page_scores.CASES,
    **paged_decode.CASES,
}

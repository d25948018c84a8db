"""Programs to compile for GPUs: the cases of a TPU with the same operands, through the public operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvjax.aot.case import Case
from kvjax.aot.cases import (
    decoder,
    grouped_decode,
    page_scores,
    paged_append,
    paged_decode,
    picked_decode,
    ragged_decode,
    sparse_prompt,
    stacked_decode,
)
from kvjax.aot.hardware import DEVICES, Gpu
from kvjax.ops.attention.sparse_prompt import Options, gpu_sparse_prompt
from kvjax.ops.decode.grouped_decode import grouped_decode as grouped
from kvjax.ops.decode.page_scores import best_pages, gpu_page_scores
from kvjax.ops.decode.paged_append import paged_append as append
from kvjax.ops.decode.paged_decode import paged_decode as paged
from kvjax.ops.decode.picked_decode import picked_decode as picked
from kvjax.ops.decode.ragged_decode import ragged_decode as ragged
from kvjax.ops.decode.stacked_decode import stacked_decode as stacked

SCALE = 128**-0.5
# Only its operands are used.
NOMINAL = DEVICES["v5e"]
Make = Callable[..., Case]


def _same(make: Make, call: Callable[..., Any], gpu: Gpu, **options: Any) -> Case:
    """Build a TPU's case with `call` on its operands, `options` of both."""
    return make(NOMINAL, **options)._replace(run=partial(call, **options))


def _paged(*operands: Any, mass: bool = False, **_: Any) -> Any:
    return paged(*operands, scale=SCALE, mass=mass, implementation="gpu")


def _append(k: Any, v: Any, side: Any, pool: Any, table: Any, lengths: Any, layer: Any, **_: Any) -> Any:
    return append(pool, table, lengths, k, v, layer, numbers=side, implementation="gpu")


def _stacked(*operands: Any, width: int = 128, packed: bool = False, mass: bool = False, **_: Any) -> Any:
    *rest, sides = operands
    first = width if packed else 0
    return stacked(*rest, scale=SCALE, values=width, first=first, mass=mass, implementation="gpu", **sides)


def _ragged(*operands: Any, page: int = 128, **_: Any) -> Any:
    *rest, bias = operands
    return ragged(*rest, most=ragged_decode.SLOTS, aligned=page, scale=SCALE, bias=bias, implementation="gpu")


def _picked(*operands: Any, page: int, **_: Any) -> Any:
    return picked(*operands, page=page, scale=SCALE, implementation="gpu")


def _grouped(*operands: Any, bits: int, group: int = 32, **_: Any) -> Any:
    return grouped(*operands, bits=bits, group=group, scale=SCALE, implementation="gpu")


def _scores(q: Any, summary: Any, counts: Any, **_: Any) -> Any:
    return gpu_page_scores(q, summary, counts)


def _chosen(scores: Any, counts: Any, **_: Any) -> Any:
    return best_pages(scores, counts, most=scores.shape[-1] // 4, implementation="gpu")


def _sparse(q: Any, k: Any, v: Any, lengths: Any, blocks: Any, width: int = 128, **_: Any) -> Any:
    return gpu_sparse_prompt(q, k, v, lengths, blocks, Options(width**-0.5, None))


CALLS: dict[Make, Callable[..., Any]] = {
    paged_append.alone: _append,
    paged_decode.paged_decode: _paged,
    stacked_decode.stacked_decode: _stacked,
    ragged_decode.ragged_decode: _ragged,
    picked_decode.picked_decode: _picked,
    grouped_decode.grouped_decode: _grouped,
    page_scores.page_scores: _scores,
    page_scores.best_pages: _chosen,
    sparse_prompt.sparse_prompt: _sparse,
}


def _registry() -> dict[str, Make]:
    """Return every case of these operations that the GPU's kernels take, and all decoders."""
    cases: dict[str, Make] = {}
    modules = (
        paged_decode, stacked_decode, ragged_decode, picked_decode, grouped_decode, page_scores, paged_append,
        sparse_prompt,
    )  # fmt: skip
    for module in modules:
        for name, case in (module.CASES | getattr(module, "GPU_CASES", {})).items():
            make = case.func if isinstance(case, partial) else case
            options = case.keywords if isinstance(case, partial) else {}
            # Unrotated keys, and pages of several parts, have a kernel for TPUs alone.
            parted = module is paged_decode and {"rope", "packed", "groups"} & set(options)
            if make in CALLS and not parted:
                cases[name] = partial(_same, make, CALLS[make], **options)
    return {**cases, **decoder.CASES}


CASES = _registry()

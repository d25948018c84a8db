"""The table of ops in docs/architectures.md: the size of each op's state, by formula and by shapes.

python -m scripts.studies.ops            # prints the table
python -m scripts.studies.ops --write    # puts it into docs/architectures.md
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax.ops.recurrent import (
    features,
    gau,
    infini,
    lattice,
    log_linear,
    mesa,
    rwkv,
    selective_scan,
    slot_attention,
    transformer_vq,
)
from kvjax.ops.recurrent import linear_attention as linear
from kvjax.state.cache import nbytes
from scripts.studies.runner import Page, parser

HEADS = WIDTH = 64
SLOTS, LEVELS, SEGMENT, CODES = 16, 13, 256, 512
HKV = HEADS * WIDTH * WIDTH


class Row(NamedTuple):
    """An op, shapes of its operands in letters (t: tokens of one row), and the numbers of its state."""

    name: str
    paper: str
    op: Callable[..., Any]
    shapes: str
    words: str
    numbers: int


SIZES = {"h": HEADS, "k": WIDTH, "v": WIDTH, "m": SLOTS, "l": LEVELS, "c": CODES, "d": HEADS * WIDTH, "1": 1}
QKV = "thk thk thv"
ROWS = [
    Row("linear attention", "2006.16236", linear.linear_attention, QKV, "H K V", HKV),
    Row(
        "linear attention, normalised", "2006.16236", linear.normalised_linear_attention, QKV,
        "H K (V + 1)", HKV + HEADS * WIDTH,
    ),
    Row("RetNet", "2307.08621", linear.retention, QKV, "H K V", HKV),
    Row("GLA", "2312.06635", linear.gla, f"{QKV} thk", "H K V", HKV),
    Row("HGRN2", "2404.07904", linear.hgrn2, f"{QKV} hk", "H K V", HKV),
    Row("Mamba-2 (SSD)", "2405.21060", linear.ssd, "thv th t1k t1k h h h", "H V K", HKV),
    Row(
        "Mamba, 4096 channels", "2312.00752", selective_scan.selective_scan, "td td dm tm tm d", "D N",
        HEADS * WIDTH * SLOTS,
    ),
    Row("MesaNet", "2506.05233", mesa.mesa, f"{QKV} th th hk", "H K (K + V)", 2 * HKV),
    Row("DeltaNet", "2406.06484", linear.delta_rule, f"{QKV} th", "H K V", HKV),
    Row("Gated DeltaNet", "2412.06464", linear.gated_delta_rule, f"{QKV} th th", "H K V", HKV),
    Row("KDA", "2510.26692", linear.gated_delta_rule, f"{QKV} thk th", "H K V", HKV),
    Row("GDN-2", "2605.22791", linear.gdn2, f"{QKV} th thk thv", "H K V", HKV),
    Row("Comba", "2506.02475", linear.comba, f"{QKV} thk th th", "H K V", HKV),
    Row("RWKV-6", "2404.05892", rwkv.rwkv6, f"{QKV} thk hk", "H K V", HKV),
    Row("RWKV-7", "2503.14456", rwkv.rwkv7, f"{QKV} thk thk thk", "H K V", HKV),
    Row("GSA", "2409.07146", slot_attention.gsa, f"{QKV} thm thm", "H m (K + V)", HEADS * SLOTS * 2 * WIDTH),
    Row(
        "log-linear attention", "2506.04761", log_linear.log_linear_attention, f"{QKV} th thl",
        "levels H K V", LEVELS * HKV,
    ),
    Row(
        "log-linear Gated DeltaNet", "2506.04761", log_linear.log_linear_gated_delta, f"{QKV} th th thl",
        "levels H K V", LEVELS * HKV,
    ),
    Row(
        "Infini-attention", "2404.07143", partial(infini.infini_attention, segment_tokens=SEGMENT),
        f"{QKV} h", "H (2 K (V + 1) + s (K + V))", HEADS * (2 * WIDTH * (WIDTH + 1) + SEGMENT * 2 * WIDTH),
    ),
    Row(
        "GAU, mixed chunk", "2202.10447", partial(gau.mixed_chunk_attention, chunk=SEGMENT), "tk tk tk tk tv",
        "K V + c (2 K + V)", WIDTH * WIDTH + SEGMENT * 3 * WIDTH,
    ),
    Row(
        "Lattice", "2504.05646", partial(lattice.lattice, slots=jnp.zeros((HEADS, SLOTS, WIDTH))),
        "thm thm thv th", "H m V", HEADS * SLOTS * WIDTH,
    ),
    Row(
        "Performer", "2009.14794", features.performer_attention, f"{QKV} mk", "H M (V + 2)",
        HEADS * SLOTS * (WIDTH + 2),
    ),
    Row(
        "Based", "2402.18668", features.based_attention, QKV,
        "H (1 + K + K (K + 1) / 2) (V + 1)", HEADS * (1 + WIDTH + WIDTH * (WIDTH + 1) // 2) * (WIDTH + 1),
    ),
    Row(
        "Transformer-VQ", "2309.16354", partial(transformer_vq.transformer_vq, block=SEGMENT), f"{QKV} hck",
        "H (C + 2 b) (V + 1)", HEADS * (CODES + 2 * SEGMENT) * (WIDTH + 1),
    ),
]  # fmt: skip


def state_bytes(row: Row, tokens: int) -> int:
    """Bytes of the state that the op leaves, from shapes alone, without a row's token counter."""
    sizes = SIZES | {"t": tokens}
    operands = [
        jax.ShapeDtypeStruct(((1,) if "t" in word else ()) + tuple(sizes[c] for c in word), jnp.bfloat16)
        for word in row.shapes.split()
    ]
    state = jax.eval_shape(lambda *x: row.op(*x)[1], *operands)
    return nbytes([x for x in jax.tree.leaves(state) if x.ndim > 1])


def table() -> str:
    lines = [
        "| op | arXiv | function | numbers kept | bytes, formula | at 2048 tokens | at 4096 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        function = getattr(row.op, "func", row.op)
        lines.append(
            f"| {row.name} | {row.paper} | `{function.__module__.split('.')[-1]}.{function.__name__}` | "
            f"{row.words} | {4 * row.numbers:,} | {state_bytes(row, 2048):,} | {state_bytes(row, 4096):,} |"
        )
    return "\n".join(lines)


PAGE = Page("architectures.md", {"ops": table})

if __name__ == "__main__":
    PAGE.show(parser(__doc__).parse_args())

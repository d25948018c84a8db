"""The rows of field.py, a method each, and which rows answer a question."""

from __future__ import annotations

from typing import NamedTuple

from kvjax.grammar import Method
from kvjax.methods.parse import parse_method
from kvjax.methods.shared import window_score
from kvjax.words import AcrossLayers, Affine, Budget, Keep, Pool, Recent, Store, Uniform, WindowAttention

# Tokens after which some rows compress a second time, as at the start of a second turn.
AGAIN = 64
QUARTER, WINDOW, KERNEL = 0.25, 16, 5


class Row(NamedTuple):
    """A method, as text or as words. again: whether it compresses once more after `AGAIN` tokens."""

    method: str | Method
    again: bool = False


def sentence(row: Row) -> Method:
    if isinstance(row.method, Method):
        return row.method
    return parse_method(row.method, {})[1](None)


def _codes(keys: int, values: int) -> Method:
    """Min-max quantisation per token, in groups of 32 channels."""
    return Method(store=Store(Affine(keys, group=32), Affine(values, group=32)))


def _snapkv(budget: float, window: int) -> Row:
    return Row(f"snapkv(budget={budget}, window={window})")


def _layer() -> Method:
    """SnapKV's score averaged over a layer's heads, so that all keep the same tokens."""
    score = WindowAttention(WINDOW, heads="layer") >> Pool(KERNEL)
    return Method(Keep(score, Budget(QUARTER), Uniform(), (Recent(WINDOW),)))


def _anywhere() -> Method:
    """SnapKV's score with one selection over the whole stack."""
    score = window_score(WINDOW, KERNEL, "grouped")
    return Method(Keep(score, Budget(QUARTER), AcrossLayers(), (Recent(WINDOW),)))


# The order of measurement: what compiles fastest and is needed first comes first.
ROWS = {
    "int8": Row("int8"),
    "int4": Row("int4"),
    "kivi": Row("kivi"),
    "turboquant": Row("turboquant"),
    "turboquant, no sketch": Row("turboquant(sketch=False)"),
    "per-token-head": Row("per-token-head"),
    "int4, keys per channel": Row("int4(keys='channel')"),
    "mxfp4": Row("mxfp4"),
    "mxint8": Row("mxint8"),
    "mxfp8": Row("mxfp8"),
    "MX4": Row("mx(bits=4)"),
    "MX6": Row("mx(bits=6)"),
    "nvfp4": Row("nvfp4"),
    "four-over-six": Row("four-over-six"),
    "kvarn": Row("kvarn"),
    "kvarn, 2 bits": Row("kvarn(keys=2, values=2)"),
    "nsnquant": Row("nsnquant"),
    "nsnquant, 1 bit": Row("nsnquant(bits=1)"),
    "qrazor": Row("qrazor"),
    "xquant": Row("xquant"),
    "quarot": Row("quarot"),
    "atom": Row("atom"),
    "llm-int8": Row("llm-int8"),
    "keys 4, values 2": Row(_codes(4, 2)),
    "keys 2, values 4": Row(_codes(2, 4)),
    "no sinks": Row("sink-recent(budget=0.25, sinks=0)"),
    "1 sink": Row("sink-recent(budget=0.25, sinks=1)"),
    "4 sinks": Row("sink-recent(budget=0.25, sinks=4)"),
    "per head": _snapkv(QUARTER, WINDOW),
    "per layer": Row(_layer()),
    "unequal heads": Row(f"adakv(budget=0.25, window={WINDOW})"),
    "unequal layers": Row(f"pyramidkv(budget=0.25, window={WINDOW})"),
    "unequal anywhere": Row(_anywhere()),
    "window 4": _snapkv(QUARTER, 4),
    "window 64": _snapkv(QUARTER, 64),
    "half, window 4": _snapkv(0.5, 4),
    "half, window 64": _snapkv(0.5, 64),
    "keydiff": Row("keydiff(budget=0.25)"),
    "expected attention": Row("expected-attention(budget=0.25)"),
    "kvzip": Row("kvzip(budget=0.25)"),
    "per head, again": Row(_snapkv(QUARTER, WINDOW).method, again=True),
    "keydiff, again": Row("keydiff(budget=0.25)", again=True),
    "expected attention, again": Row("expected-attention(budget=0.25)", again=True),
    "kvzip, again": Row("kvzip(budget=0.25)", again=True),
}

# The first row is the one that others are compared with.
TOPICS = {
    "codes": ("int4", "int8", "kivi", "turboquant", "turboquant, no sketch"),
    "formats": (
        "int4",
        "per-token-head",
        "mxint8",
        "mxfp8",
        "MX6",
        "MX4",
        "mxfp4",
        "nvfp4",
        "four-over-six",
    ),
    "encodings": (
        "int4",
        "int4, keys per channel",
        "quarot",
        "atom",
        "qrazor",
        "xquant",
        "llm-int8",
        "kvarn",
        "kvarn, 2 bits",
        "nsnquant",
        "nsnquant, 1 bit",
    ),
    "bits": ("keys 4, values 2", "keys 2, values 4"),
    "sinks": ("4 sinks", "1 sink", "no sinks"),
    "heads": ("per head", "per layer", "unequal heads", "unequal layers", "unequal anywhere"),
    "windows": ("per head", "window 4", "window 64"),
    "windows of half": ("half, window 64", "half, window 4"),
}
SECOND = ("per head", "keydiff", "expected attention", "kvzip")
assert all(name in ROWS for names in (*TOPICS.values(), SECOND) for name in names)

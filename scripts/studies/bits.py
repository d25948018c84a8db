"""Bits against KL on a real model: keys and values apart, axes, rotations, sinks, and rows of all layers.

    kvjax get smollm2-135m
    python -m scripts.studies.bits run                # measures what the data lacks; goes on after a stop
    python -m scripts.studies.bits                    # prints the tables
    python -m scripts.studies.bits --write            # writes them into docs/bits.md
    python -m scripts.studies.bits picture            # draws docs/bits.png

A window of prose is read once. Each row replaces its keys or its values by what comes back of codes
(`bit_schemes.py`), and the tokens after the window are read over them. What is fitted is fitted to other
windows of the same text. Seeds are fixed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

import kvjax
from kvjax.base.atomic_files import write_atomic
from kvjax.models.model import Model
from kvjax.ops.base.rope import angles, rotate
from kvjax.state.cache import Cache, Slots
from scripts.docs_tables import DOCS
from scripts.studies import codes
from scripts.studies.bit_schemes import Numbers, Rows, Scheme, learnt, principal, ranges, rotated
from scripts.studies.bits_picture import picture
from scripts.studies.runner import Data, Page, parser, progress

DATA = Data(DOCS / "bits.json", {"about": {}, "rows": {}})
START, LENGTH, AFTER, WINDOWS, FITTED = 2000, 512, 64, 2, 4
SEEDS = 10


def schemes() -> dict[str, tuple[str, Scheme]]:
    """By name, the part of the cache that is coded, and how; the first ones matter most."""
    found: dict[str, tuple[str, Scheme]] = {}
    for part in ("keys", "values", "unrotated keys"):
        for bits in (8, 4, 3, 2, 1):
            for axis in ("token", "channel"):
                if part != "unrotated keys" or axis == "channel":
                    found[f"{part}, per {axis}, {bits}"] = part, ranges(bits, axis)
    for part in ("unrotated keys", "values"):
        for over in ("head", "layer", "all layers"):
            for sinks, after in ((0, ""), (4, " after four sinks")):
                rows = Rows(over, sinks)
                for level in (4.0, 3.0, 2.0, 1.0, 0.5):
                    found[f"{part}, rows of {over}{after}, {level:g}"] = part, principal(level, rows)
    for part in ("keys", "values"):
        for bits in (4, 3, 2, 1):
            found[f"{part}, rotated, {bits}"] = part, rotated(bits, 0)
        for bits in (4, 2):
            found[f"{part}, four sinks, {bits}"] = part, ranges(bits, "token", 4)
            found[f"{part}, learnt, {bits}"] = part, learnt(bits)
        for seed in range(1, SEEDS):
            found[f"{part}, rotated by seed {seed}, 2"] = part, rotated(2, seed)
    return found


def main() -> None:
    asked = parser(__doc__, ("run", "picture"))
    asked.add_argument("--model", default="smollm2-135m", metavar="MODEL", help="(default: smollm2-135m)")
    args = asked.parse_args()
    if args.what == "run":
        run(kvjax.load(args.model))
    elif args.what == "picture":
        write_atomic(DOCS / "bits.png", picture(shared(DATA.read()["rows"])))
    else:
        PAGE.show(args)


# --- measuring -------------------------------------------------------------------------------------------


class Window(NamedTuple):
    """A window in a cache, the tokens after it, the model's log p of these, and numbers [L, K, S, H]."""

    cache: Cache
    after: list[int]
    logp: Float[np.ndarray, "T V"]
    parts: dict[str, Numbers]


def run(model: Model) -> None:
    """Measure the rows that the data lacks, window by window, and write each when it is done."""
    about = {"model": model.name, "fingerprint": model.fingerprint, "text": codes.TEXT.name}
    about |= {"tokens": LENGTH, "after": AFTER, "fitted": FITTED * LENGTH}
    known: dict[str, Numbers] = {}
    for at in range(WINDOWS):
        todo = schemes()
        lacks = [n for n in todo if len(DATA.read()["rows"].get(n, {}).get("kl", ())) <= at]
        if not lacks:
            continue
        known, window = known or fitted_numbers(model), read(model, at)
        for name in progress(lacks):
            part, scheme = todo[name]
            row = measured(model, window, part, scheme, known[part])
            DATA.change(lambda data, n=name, row=row: data.update(about=about, rows=_added(data, n, row)))


def _added(data: Mapping[str, Any], name: str, row: Mapping[str, float]) -> dict[str, Any]:
    """Add one more window of a row to the rows, in the order of the schemes."""
    old = data["rows"].get(name, {})
    rows = data["rows"] | {name: {key: [*old.get(key, ()), value] for key, value in row.items()}}
    return {n: rows[n] for n in schemes() if n in rows}


def _window(model: Model, at: int) -> list[int]:
    found, span = model.tokenizer.encode(codes.TEXT.read_text()[START:]), LENGTH + AFTER
    return list(getattr(found, "ids", found))[at * span : (at + 1) * span]


def read(model: Model, at: int) -> Window:
    ids = _window(model, at)
    _, cache = kvjax.prefill(model, [ids[:LENGTH]], room=AFTER)
    logp = codes.said(model, codes.with_slots(cache, lambda x: x), ids[LENGTH:])
    return Window(cache, ids[LENGTH:], np.asarray(logp, np.float64), numbers(model, cache))


def fitted_numbers(model: Model) -> dict[str, Numbers]:
    """Keys and values of windows that are not measured."""
    found: dict[str, list[Numbers]] = {}
    for at in range(WINDOWS, WINDOWS + FITTED):
        _, cache = kvjax.prefill(model, [_window(model, at)[:LENGTH]])
        for part, x in numbers(model, cache).items():
            found.setdefault(part, []).append(x.astype(np.float32))
    return {part: np.concatenate(each, 2).astype(np.float64) for part, each in found.items()}


def numbers(model: Model, cache: Cache) -> dict[str, Numbers]:
    """Keys, keys before RoPE, and values of a cache of one row."""
    slots = codes.slots_of(cache)
    k, v = (
        np.concatenate([np.asarray(getattr(s, n)[:, 0, :, :LENGTH], np.float64) for s in slots]) for n in "kv"
    )
    return {"keys": k, "unrotated keys": turned(model, k, back=True), "values": v}


def turned(model: Model, x: Numbers, back: bool = False) -> Numbers:
    """Keys rotated by their positions, or rotated back."""
    rope = model.config.rope
    cos, sin = angles(rope, jnp.arange(x.shape[2]), x.shape[-1])
    sin = -sin if back else sin
    return np.asarray(
        rotate(jnp.asarray(x, jnp.float32), cos[None, None], sin[None, None], rope.start), np.float64
    )


def measured(model: Model, window: Window, part: str, scheme: Scheme, known: Numbers) -> dict[str, float]:
    """Bits per number, the relative squared error, and KL of a scheme; fitted numbers per number."""
    x = window.parts[part]
    back = scheme(x, known)
    found = turned(model, back.x) if part == "unrotated keys" else back.x
    rows = iter(found.astype(np.float32))

    def change(slots: Slots) -> Slots:
        name = "v" if part == "values" else "k"
        old = getattr(slots, name)
        new = np.stack([next(rows) for _ in range(old.shape[0])])[:, None]
        return dataclasses.replace(slots, **{name: old.at[:, :, :, :LENGTH].set(jnp.asarray(new, old.dtype))})

    logp = np.asarray(codes.said(model, codes.with_slots(window.cache, change), window.after), np.float64)
    kl = (np.exp(window.logp) * (window.logp - logp)).sum(-1).mean()
    error = np.square(back.x - x).sum() / np.square(x).sum()
    each = {"bits": back.bits, "coded": back.coded, "error": error, "kl": kl, "fitted": back.fitted}
    return {name: float(f"{value:.5g}") for name, value in each.items()}


# --- tables ----------------------------------------------------------------------------------------------


def shared(rows: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    """Means over the windows that all rows have, so that rows are compared on the same tokens."""
    many = min((len(row["kl"]) for row in rows.values()), default=0)
    return {name: {n: float(np.mean(x[:many])) for n, x in row.items()} for name, row in rows.items()}


def table(rows: Mapping[str, Mapping[str, float]], part: str) -> str:
    """Bits, error and KL of the schemes of a part."""
    lines = ["| scheme | bits | with entropy coding | error | KL |", "|---|--:|--:|--:|--:|"]
    for name, row in rows.items():
        if name.startswith(f"{part}, ") and "seed" not in name:
            shown = name.removeprefix(f"{part}, ").rpartition(",")[0]
            numbers = f"{row['bits']:.2f} | {row['coded']:.2f} | {row['error']:.2g} | {row['kl']:.2g}"
            lines.append(f"| {shown} | {numbers} |")
    # Components of all layers reach a most number of bits, where more asked for bits change nothing.
    return "\n".join(dict.fromkeys(lines))


def seeds_table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """KL of the seeds of a rotation at 2 bits, beside none and a learnt one."""
    lines = [
        "| 2 bits | not rotated | rotated: smallest, median, largest of the seeds | seeds | learnt |",
        "|---|--:|--:|--:|--:|",
    ]
    for part in ("keys", "values"):
        names = [n for n in rows if n.startswith(f"{part}, rotated") and n.endswith(", 2")]
        drawn = np.sort([rows[n]["kl"] for n in names])
        plain, best = (rows.get(f"{part}, {how}, 2") for how in ("per token", "learnt"))
        cells = ["not measured yet" if row is None else f"{row['kl']:.3g}" for row in (plain, best)]
        middle = "not measured yet"
        if len(drawn):
            middle = f"{drawn[0]:.3g}, {np.median(drawn):.3g}, {drawn[-1]:.3g}"
        lines.append(f"| {part} | {cells[0]} | {middle} | {len(drawn)} | {cells[1]} |")
    return "\n".join(lines)


def setting(found: Mapping[str, Any]) -> str:
    """Say what was measured on what."""
    about, rows = found["about"], found["rows"]
    if not rows:
        return "No rows yet."
    many = min(len(row["kl"]) for row in rows.values())
    windows = f"{many} {'window' if many == 1 else 'windows'}"
    return (
        f"{about['model']} (fingerprint {about['fingerprint']}) in float32, {windows} of "
        f"{about['tokens']} tokens of `{about['text']}`, KL over the {about['after']} tokens after each, in "
        f"nats per token; fitted to {about['fitted']} other tokens of the text; {len(rows)} of "
        f"{len(schemes())} rows so far."
    )


PAGE = Page(
    "bits.md",
    {
        "setting": lambda: setting(DATA.read()),
        "keys": lambda: table(shared(DATA.read()["rows"]), "keys"),
        "unrotated keys": lambda: table(shared(DATA.read()["rows"]), "unrotated keys"),
        "values": lambda: table(shared(DATA.read()["rows"]), "values"),
        "seeds": lambda: seeds_table(shared(DATA.read()["rows"])),
    },
)

if __name__ == "__main__":
    main()

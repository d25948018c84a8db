"""Codecs on a real model's keys and values: total bits, error, KL, and bits in an entropy-coded file.

    python -m scripts.studies.codes run --rows int4 mxfp4    # measures rows (default: those that are missing)
    python -m scripts.studies.codes                          # prints the table
    python -m scripts.studies.codes --write                  # writes it into docs/methods.md

Keys and values are those of a window of prose, which is read once. Each row encodes them with its method's
codecs; the tokens after the window are then read over the decoded keys and values.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import kvjax
from kvjax.io.entropy_coding import coded, decoded
from kvjax.methods.parse import parse_method
from kvjax.models.model import Model
from kvjax.state.cache import Cache, Slots
from kvjax.state.codes import Codec, Codes, at_layer, encode
from scripts.docs_tables import DOCS
from scripts.studies.runner import Data, Page, parser, progress

DATA = Data(DOCS / "codes.json", {"about": {}, "rows": {}})
TEXT = DOCS.parent / "kvjax" / "eval" / "tasks" / "ruler" / "data" / "alice29.txt"
START, LENGTH, AFTER = 2000, 1024, 128
ROWS = (
    "int8", "per-token-head", "mxint8", "mxfp8", "mx(bits=9)", "mx(bits=6)", "int4", "int4(keys='channel')",
    "mxfp4", "mx(bits=4)", "nvfp4", "four-over-six", "ultraquant", "cachegen", "quarot", "qrazor",
    "turboquant", "kvarn", "kivi", "kvarn(keys=2, values=2)", "nsnquant", "nsnquant(bits=1)",
)  # fmt: skip


def main() -> None:
    asked = parser(__doc__, ("run",))
    asked.add_argument("--model", default="smollm2-135m", metavar="MODEL", help="(default: smollm2-135m)")
    asked.add_argument("--rows", nargs="+", metavar="ROW", help="methods (default: those that are missing)")
    args = asked.parse_args()
    if args.what == "run":
        run(kvjax.load(args.model), args.rows)
    else:
        PAGE.show(args)


class Reading(NamedTuple):
    """A window of the text in a cache, the tokens after it, and the model's log-probabilities of these."""

    model: Model
    cache: Cache
    behind: list[int]
    logp: Float[Array, "T V"]


def run(model: Model, rows: Sequence[str] | None) -> None:
    """Measures rows, and writes each to the data when it is done."""
    about = {"model": model.name, "text": TEXT.name, "tokens": LENGTH, "behind": AFTER}
    read = reading(model)
    for name in progress(rows or [name for name in ROWS if name not in DATA.read()["rows"]]):
        row = {name: measured(name, read)}
        DATA.change(lambda data, row=row: data.update(about=about, rows=data["rows"] | row))


def reading(model: Model) -> Reading:
    """Reads the text's first tokens from `START` on."""
    tokens = model.tokenizer.encode(TEXT.read_text()[START : START + 16 * LENGTH])
    ids = list(getattr(tokens, "ids", tokens))[: LENGTH + AFTER]
    _, cache = kvjax.prefill(model, [ids[:LENGTH]], room=AFTER)
    return Reading(model, cache, ids[LENGTH:], said(model, with_slots(cache, lambda x: x), ids[LENGTH:]))


def said(model: Model, cache: Cache, tokens: list[int]) -> Float[Array, "T V"]:
    """Computes log p of every next token; consumes the cache."""
    return jax.nn.log_softmax(kvjax.verify(model, cache, [tokens])[0][0])


def slots_of(cache: Cache) -> list[Slots]:
    found = [group.tail for group in cache.groups]
    assert all(isinstance(slots, Slots) for slots in found)
    return found  # type: ignore[return-value]


def with_slots(cache: Cache, change: Callable[[Slots], Slots]) -> Cache:
    """A copy of the cache with changed slots."""
    copied = jax.tree.map(jnp.copy, cache)
    groups = [dataclasses.replace(group, tail=change(group.tail)) for group in copied.groups]
    return dataclasses.replace(copied, groups=tuple(groups))


def measured(name: str, read: Reading) -> dict[str, Any]:
    """Relative squared errors, KL, bits per number, and bits and seconds of an entropy-coded file."""
    store = parse_method(name, {})[1](None).store
    assert store is not None
    bits, small, count, write, seconds, errors, back = 0, 0, 0, 0.0, 0.0, [], []
    for of, codec in (("k", store.keys), ("v", store.values)):
        x = jnp.concatenate([getattr(slots, of)[..., :LENGTH, :] for slots in slots_of(read.cache)])
        assert codec is not None
        # Layers of the same codec in a row, together.
        runs = [list(run) for _, run in groupby(range(len(x)), lambda i, codec=codec: at_layer(codec, i))]
        codes = [_encode(x[run[0] : run[-1] + 1], at_layer(codec, run[0])) for run in runs]
        back.append(jnp.concatenate([_decode(one) for one in codes]))
        errors.append(float(jnp.square(back[-1] - x).sum() / jnp.square(x).sum()))
        for array in (np.asarray(array) for one in codes for array in one.data.values()):
            start = time.perf_counter()
            made = coded(array)
            write += time.perf_counter() - start
            start = time.perf_counter()
            if made is not None:
                assert (decoded(*made) == array).all()
            seconds += time.perf_counter() - start
            bits, small = bits + 8 * array.nbytes, small + 8 * (array if made is None else made[0]).nbytes
        count += x.size
    logp = said(read.model, _encoded(read.cache, *back), read.behind)
    return {
        "keys": round(errors[0], 7), "values": round(errors[1], 7), "bits": round(bits / count, 3),
        "kl": round(float((jnp.exp(read.logp) * (read.logp - logp)).sum(-1).mean()), 6),
        "coded": round(small / count, 3), "write": round(write, 1), "read": round(seconds, 1),
    }  # fmt: skip


def _encoded(cache: Cache, keys: Array, values: Array) -> Cache:
    """The cache with these keys and values of its first tokens, layer by layer."""
    layers = iter(range(len(keys)))

    def change(slots: Slots) -> Slots:
        at = jnp.array([next(layers) for _ in range(len(slots.k))])
        k, v = (x.at[..., :LENGTH, :].set(y[at]) for x, y in ((slots.k, keys), (slots.v, values)))
        return dataclasses.replace(slots, k=k, v=v)

    return with_slots(cache, change)


@partial(jax.jit, static_argnames="codec")
def _encode(x: Array, codec: Codec) -> Codes:
    found = encode(x, codec)
    assert isinstance(found, Codes)
    return found


_decode = jax.jit(Codes.decode)


def table() -> str:
    """A table of the data, sorted by bits."""
    found = DATA.read()["rows"]
    out = [
        "| method | bits | error of keys | error of values | KL | bits, coded file | s to write, to read |"
    ]
    out.append("|---|--:|--:|--:|--:|--:|--:|")
    for name, row in sorted(found.items(), key=lambda item: -item[1]["bits"]):
        times = f"{row['write']:.1f}, {row['read']:.1f}"
        errors = f"{row['keys']:.2g} | {row['values']:.2g} | {row['kl']:.2g}"
        out.append(f"| `{name}` | {row['bits']:.2f} | {errors} | {row['coded']:.2f} | {times} |")
    return "\n".join(out)


PAGE = Page("methods.md", {"coded": table})

if __name__ == "__main__":
    main()

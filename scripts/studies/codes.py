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
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import kvjax
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted, of_layer, sees_below, with_fitted
from kvjax.io.entropy_coding import coded, decoded
from kvjax.methods.parse import parse_method
from kvjax.models.model import Model
from kvjax.ops.base.rope import angles, rotate
from kvjax.state.cache import Cache, Slots
from kvjax.state.codes import BELOW, Codec, CodecArrays, Codes, at_layer, encode, with_arrays
from scripts.docs_tables import DOCS
from scripts.studies.runner import Data, Page, progress, study

DATA = Data(DOCS / "codes.json", {"about": {}, "rows": {}})
TEXT = DOCS.parent / "kvjax" / "eval" / "tasks" / "ruler" / "data" / "alice29.txt"
START, LENGTH, AFTER = 2000, 1024, 128
ROWS = (
    "int8", "per-token-head", "mxint8", "mxfp8", "mx(bits=9)", "mx(bits=6)", "int4", "int4(keys='channel')",
    "mxfp4", "mx(bits=4)", "nvfp4", "four-over-six", "ultraquant", "cachegen", "quarot", "qrazor",
    "turboquant", "kvarn", "kivi", "kvarn(keys=2, values=2)", "nsnquant", "nsnquant(bits=1)", "zeroquant",
    "llm-int8", "atom", "duquant", "decoquant", "qjl", "asymkv",
)  # fmt: skip
# Coders of files, by name: the kind, options of its fit, and the quality.
CODERS: dict[str, tuple[str, dict[str, Any], int]] = {
    "KVTC's coder, ratio 8": ("kvtc", dict(ratio=8, newest=0), 0),
    "KVTC's coder, ratio 16": ("kvtc", dict(ratio=16, newest=0), 0),
    "CacheGen's coder, best": ("cachegen", {}, 0),
    "CacheGen's coder, middle": ("cachegen", {}, 1),
    "CacheGen's coder, least": ("cachegen", {}, 2),
}
# Texts and tokens to which coders are fitted; a prompt, and steps after it, of which the shortest counts.
FITTED, FIRST, REPEATS = (4, 512), 16, 12


class Reading(NamedTuple):
    """A window of the text in a cache, the tokens after it, and the model's log-probabilities of these."""

    model: Model
    cache: Cache
    behind: list[int]
    logp: Float[Array, "T V"]


def run(model: Model, rows: Sequence[str] | None) -> None:
    """Measure rows, and write each to the data when it is done."""
    known, coders = DATA.read()["rows"], {}
    read = reading(model)
    for name in progress(rows or [n for n in (*ROWS, *CODERS) if n not in known]):
        add(name, coded_file(name, read, coders) if name in CODERS else measured(name, read), model)
    for name in progress([n for n in ROWS if n in DATA.read()["rows"] and (rows is None or n in rows)]):
        if "step" not in DATA.read()["rows"][name]:
            add(name, {"step": step_time(model, parse_method(name, {})[1](None))}, model)


def add(name: str, row: dict[str, Any], model: Model) -> None:
    """Add a row to the data, or more numbers to it."""
    about = {"model": model.name, "text": TEXT.name, "tokens": LENGTH, "behind": AFTER}
    row = DATA.read()["rows"].get(name, {}) | row
    DATA.change(lambda data: data.update(about=about, rows=data["rows"] | {name: row}))


def reading(model: Model) -> Reading:
    """Read the text's first tokens from `START` on."""
    ids = window(model)
    _, cache = kvjax.prefill(model, [ids[:LENGTH]], room=AFTER)
    return Reading(model, cache, ids[LENGTH:], said(model, with_slots(cache, lambda x: x), ids[LENGTH:]))


def window(model: Model) -> list[int]:
    tokens = model.tokenizer.encode(TEXT.read_text()[START : START + 16 * LENGTH])
    return list(getattr(tokens, "ids", tokens))[: LENGTH + AFTER]


def said(model: Model, cache: Cache, tokens: list[int]) -> Float[Array, "T V"]:
    """Compute log p of every next token; consume the cache. What evicts in steps gets tokens one by one."""
    keep = None if cache.method is None else cache.method.keep
    if keep is None or not keep.when.in_steps:
        return jax.nn.log_softmax(kvjax.verify(model, cache, [tokens])[0][0])
    logits = []
    for token in tokens:
        each, cache = kvjax.step(model, cache, np.asarray([token]))
        logits.append(each[0])
    return jax.nn.log_softmax(jnp.stack(logits))


def slots_of(cache: Cache) -> list[Slots]:
    found = [group.tail for group in cache.groups]
    assert all(isinstance(slots, Slots) for slots in found)
    return found  # type: ignore[return-value]


def numbers(cache: Cache, of: str) -> Float[Array, "L B K T H"]:
    """Keys or values ("k", "v") of the window's tokens in all layers."""
    return jnp.concatenate([getattr(slots, of)[..., :LENGTH, :] for slots in slots_of(cache)])


def with_slots(cache: Cache, change: Callable[[Slots], Slots]) -> Cache:
    """Copy the cache, with changed slots."""
    copied = jax.tree.map(jnp.copy, cache)
    groups = [dataclasses.replace(group, tail=change(group.tail)) for group in copied.groups]
    return dataclasses.replace(copied, groups=tuple(groups))


def measured(name: str, read: Reading, fitted: Fitted | None = None) -> dict[str, Any]:
    """Relative squared errors, KL, bits per number, and bits and seconds of an entropy-coded file.

    fitted: the arrays of a method that is fitted; they are not counted, since they belong to the model.
    """
    method = parse_method(name, {} if fitted is None else {name: {"fitted": fitted}})[1](None)
    sides = _sides(read, method)
    arrays = [np.asarray(array) for side in sides for codes in side.codes for array in codes.data.values()]
    bits = small = 0
    write = seconds = 0.0
    for array in arrays:
        start = time.perf_counter()
        made = coded(array)
        write += time.perf_counter() - start
        start = time.perf_counter()
        if made is not None:
            assert (decoded(*made) == array).all()
        seconds += time.perf_counter() - start
        bits, small = bits + 8 * array.nbytes, small + 8 * (array if made is None else made[0]).nbytes
    count = sum(side.x.size for side in sides)
    errors = [float(jnp.square(side.back - side.x).sum() / jnp.square(side.x).sum()) for side in sides]
    back = [side.whole for side in sides]
    logp = said(read.model, _encoded(read.cache, *back), read.behind)
    return {
        "keys": round(errors[0], 7), "values": round(errors[1], 7), "bits": round(bits / count, 3),
        **_predicted(read, logp),
        "coded": round(small / count, 3), "write": round(write, 1), "read": round(seconds, 1),
    }  # fmt: skip


def _predicted(read: Reading, logp: Float[Array, "T V"]) -> dict[str, float]:
    """KL of predictions, and the squared error of logits relative to their variance over the vocabulary."""
    true, other = (x - x.mean(-1, keepdims=True) for x in (read.logp, logp))
    error = jnp.square(other - true).sum() / jnp.square(true).sum()
    return {"logits": round(float(error), 7), "kl": kl(read.logp, logp)}


def kl(true: Float[Array, "T V"], other: Float[Array, "T V"]) -> float:
    return round(float((jnp.exp(true) * (true - other)).sum(-1).mean()), 6)


class Side(NamedTuple):
    """Keys or values of the tokens that are coded, their codes by layer, what these give, and all tokens."""

    x: Float[Array, "L B K S H"]
    codes: list[Codes]
    back: Float[Array, "L B K S H"]
    whole: Float[Array, "L B K T H"]


def _sides(read: Reading, method: Method) -> tuple[Side, Side]:
    """Keys and values in the codes of a method, layer by layer; first tokens that it leaves stay out."""
    store, params = method.store, with_fitted(read.model.params, method)
    assert store is not None and store.keys is not None and store.values is not None
    given = [numbers(read.cache, of) for of in "kv"]
    given[0] = turned(read.model, given[0], back=True) if store.unrotated else given[0]
    end = store.sinks + (LENGTH - store.sinks) // store.granule * store.granule
    coded = [x[..., store.sinks : end, :] for x in given]
    codes: list[list[Codes]] = [[], []]
    back: list[list[Array]] = [[], []]
    for i in range(len(given[0])):
        known = jax.tree.map(lambda a: a[None], of_layer(params, i))
        if sees_below(store) and i:
            known[BELOW] = {"key": back[0][-1], "value": back[1][-1]}
        for j, codec in enumerate((store.keys, store.values)):
            if j and BELOW in known:
                known[BELOW] = known[BELOW] | {"own key": back[0][-1]}
            found = _encode(coded[j][i : i + 1], at_layer(codec, i), known)
            codes[j].append(found)
            back[j].append(_decode(found, known))
    sides = []
    for x, part, made, found in zip(given, coded, codes, back, strict=True):
        whole = x.at[..., store.sinks : end, :].set(jnp.concatenate(found))
        sides.append(Side(part, made, jnp.concatenate(found), whole))
    if store.unrotated:
        sides[0] = sides[0]._replace(whole=turned(read.model, sides[0].whole))
    return sides[0], sides[1]


def turned(model: Model, x: Float[Array, "*b T H"], back: bool = False) -> Float[Array, "*b T H"]:
    """Keys rotated by their positions, or rotated back."""
    rope = model.config.rope
    cos, sin = angles(rope, jnp.arange(x.shape[-2]), x.shape[-1])
    lead = (None,) * (x.ndim - 2)
    return rotate(x, cos[lead], (-sin if back else sin)[lead], rope.start)


def coded_file(name: str, read: Reading, coders: dict[str, Fitted]) -> dict[str, Any]:
    """Measure the same of a fitted coder of files: bits in its file, and seconds to write and to read it.

    coders: those that were fitted before, by kind and options.
    """
    kind, options, quality = CODERS[name]
    if (key := f"{kind} {options}") not in coders:
        coders[key] = kvjax.fit_coder(read.model, prose(read.model, *FITTED), kind, **options)
    coder, start = coders[key], time.perf_counter()
    sent = list(kvjax.send_cache(jax.tree.map(jnp.copy, read.cache), coder, quality=quality))
    write, start = time.perf_counter() - start, time.perf_counter()
    back = kvjax.receive_cache(read.model, sent, coder)
    seconds, errors, count = time.perf_counter() - start, [], 0
    for of in "kv":
        x, y = (numbers(cache, of) for cache in (read.cache, back))
        errors.append(float(jnp.square(y - x).sum() / jnp.square(x).sum()))
        count += x.size
    return {
        "keys": round(errors[0], 7), "values": round(errors[1], 7),
        **_predicted(read, said(read.model, back, read.behind)),
        "coded": round(8 * sum(map(len, sent[1:])) / count, 3), "write": round(write, 1),
        "read": round(seconds, 1),
    }  # fmt: skip


def prose(model: Model, rows: int, tokens: int) -> list[list[int]]:
    """Texts to fit to: the language reference that comes with Python (`help("assert")`), in pieces."""
    found = model.tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)))
    ids = list(getattr(found, "ids", found))
    return [ids[i * tokens : (i + 1) * tokens] for i in range(rows)]


def step_time(model: Model, method: Method) -> float:
    """How long a step over a cache of `LENGTH` slots takes, relative to one without a method.

    In seconds of the process on all cores, because other processes take turns on them; the least of several
    runs, in turns with those without a method.
    """
    spans: tuple[list[float], list[float]] = [], []
    caches = [kvjax.prefill(model, [[1] * FIRST], room=LENGTH, method=m)[1] for m in (method, None)]
    for _ in range(REPEATS):
        for i, times in enumerate(spans):
            start = time.process_time()
            logits, caches[i] = kvjax.step(model, caches[i], np.array([1], np.int32))
            jax.block_until_ready(logits)
            times.append(time.process_time() - start)
    return round(float(np.min(spans[0][2:]) / np.min(spans[1][2:])), 2)


def _encoded(cache: Cache, keys: Array, values: Array) -> Cache:
    """Return the cache with these keys and values of its first tokens, layer by layer."""
    layers = iter(range(len(keys)))

    def change(slots: Slots) -> Slots:
        at = jnp.array([next(layers) for _ in range(len(slots.k))])
        k, v = (x.at[..., :LENGTH, :].set(y[at]) for x, y in ((slots.k, keys), (slots.v, values)))
        return dataclasses.replace(slots, k=k, v=v)

    return with_slots(cache, change)


@partial(jax.jit, static_argnames="codec")
def _encode(x: Array, codec: Codec, arrays: CodecArrays) -> Codes:
    found = encode(x, codec, arrays)
    assert isinstance(found, Codes)
    return found


@jax.jit
def _decode(codes: Codes, arrays: CodecArrays) -> Array:
    return with_arrays(codes, arrays).decode()


def table() -> str:
    """Write a table of the data, sorted by bits."""
    rows = DATA.read()["rows"]
    out = [
        "| method | bits | error of keys | error of values | error of logits | KL | step | bits, coded file "
        "| s to write, to read |"
    ]
    out.append("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name, row in sorted(rows.items(), key=lambda item: -item[1].get("bits", item[1]["coded"])):
        times = f"{row['write']:.1f}, {row['read']:.1f}"
        found = [f"{row[key]:.2g}" if key in row else "" for key in ("keys", "values", "logits", "kl")]
        errors = " | ".join(found)
        bits, step = (f"{row[key]:.2f}" if key in row else "" for key in ("bits", "step"))
        shown = f"`{name}`" if name not in CODERS else name
        out.append(f"| {shown} | {bits} | {errors} | {step} | {row['coded']:.2f} | {times} |")
    return "\n".join(out)


PAGE = Page("methods.md", {"coded": table})

if __name__ == "__main__":
    study(__doc__, run, PAGE, rows=True)

"""Recall of reads on a real model: which of the tokens with the most attention a step reads, layer by layer.

    kvjax get smollm2-135m
    python -m scripts.studies.recall run              # measures the rows that the data lacks
    python -m scripts.studies.recall run --rows quest # or these
    python -m scripts.studies.recall --write          # writes the table into docs/recall.md

A window of prose is read in full, and the tokens after it are read one by one under each method. In every
layer that reads a part of its slots, what it reads is compared with the same number of slots that receive the
most attention there, and pages with as many pages. Rows "..., fitted" are fitted first, to other prose, or to
questions where gates of heads are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

import kvjax
from kvjax.commands.texts import read_texts
from kvjax.grammar import Budget, Method
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.read_kinds import Placing
from kvjax.methods.parse import parse_method
from kvjax.models.attending import rotated
from kvjax.models.model import Model
from kvjax.ops.attention.union import merge
from kvjax.plan.cache_sizes import CacheSizes
from kvjax.state.codes import dense
from kvjax.steps.decoding import attend
from kvjax.steps.decoding.picks import picked_from
from kvjax.steps.shared.rotate import rope_of_keys
from scripts.docs_tables import DOCS
from scripts.studies import codes
from scripts.studies.runner import Data, Page, progress, study

DATA = Data(DOCS / "recall.json", {"about": {}, "rows": {}})
START, LENGTH, AFTER = 2000, 1024, 32
BUDGET = 0.1
# The share of the full cache's bytes that steps of all methods read, and how often a budget for it is halved.
BYTES, HALVINGS = 0.4, 7
NSA = "page=16, compress=8, stride=4, newest=32, sinks=4"
# Settings for a prompt of this length: all read the newest 32 tokens, and 4 first ones if they have sinks.
ROWS = {
    "kcache": "", "tokenselect": "sinks=4, newest=32", "quest": "skip_layers=0",
    "quest, skip_layers=2": "", "arkvale": "skip_layers=0", "sparq": "", "loki": "", "double-sparsity": "",
    "pqcache": "", "clusterkv": "sinks=4, skip_layers=0", "squeezed-attention": "sinks=4",
    "retroinfer": "sinks=4, newest=32", "magicpig": "skip_layers=0, newest=32", "recycled-attention": "",
    "tidaldecode": "", "top-theta": "", "retrievalattention": "sinks=4, newest=32",
    "a2ats": "sinks=4, newest=32", "em-llm": "sinks=4, newest=32",
    "reattention": "page=16, newest=32, sinks=16", "infinigen": "", "hcattention": "",
    "shadowkv": "segment=128, outliers=4", "tailorkv": "newest=32", "specache": "", "moba": "page=16",
    "moba, fitted": "page=16", "nsa": NSA, "nsa, fitted": NSA,
    "lserve, retrieval=1.0": "sinks=4, window=32, page=16, part=4",
    "lserve, fitted": "sinks=4, window=32, page=16, part=4",
    "infllm": "page=16, newest=32, sinks=16", "sentencekv": "budget=1.0, read=0.1, sinks=4",
    "retroinfer, estimate=0.0": "sinks=4, newest=32", "recycled-attention, stride=32": "",
}  # fmt: skip
# Texts of `LENGTH` tokens to which fitted rows are fitted, and how: one by one, in one pass.
TEXTS, FIT = 8, dict(batch=1, epochs=1, rate=0.01, steps=8)
# Questions about contexts of `ASKED` tokens to which LServe's gates are fitted, and how.
ASKED, GATES = 512, dict(batch=1, epochs=4, sinks=4, recent=32)


# --- measuring -------------------------------------------------------------------------------------------


class LayerRead(NamedTuple):
    """One layer in one step.

    recall, held: as `judged` gives them, means over KV heads that read anything. error: the distance of the
    layer's output from that over all of its slots, as a share of the length of the latter. pages: recall of
    pages, by the attention that their slots receive together.
    """

    layer: int
    read: float
    recall: float
    held: float
    error: float
    pages: float


def run(model: Model, rows: Sequence[str] | None = None) -> None:
    """Measure rows, and write each to the data when it is done."""
    about = {"model": model.name, "fingerprint": model.fingerprint, "text": codes.TEXT.name}
    about |= {"tokens": LENGTH, "after": AFTER, "budget": BUDGET}
    ids = _tokens(model)
    full, _ = said(model, ids, kvjax.method("full"))
    known = DATA.read()["rows"]
    for name in progress(rows or [name for name in ROWS if "equal" not in known.get(name, {})]):
        method = method_of(model, name)
        row = measured(model, ids, method, full) | at_equal_bytes(model, ids, method, full)
        DATA.change(lambda data, new={name: row}: data.update(about=about, rows=data["rows"] | new))


def sentence(name: str) -> str:
    """Write a row's method as text."""
    own, _, setting = name.partition(", ")
    more = [x for x in (setting, ROWS.get(name)) if x and x != "fitted"]
    # The budget of a method that evicts, too, is another: what it keeps is read in part.
    budget = [] if "budget=" in ROWS.get(name, "") else [f"budget={BUDGET}"]
    return f"{own}({', '.join([*budget, *more])})"


def method_of(model: Model, name: str) -> Method:
    """Build a row's method, with what is fitted for it."""
    if name.startswith("lserve"):
        return parse_method(sentence(name), {"lserve": {"fitted": _gates(model, name)}})[1](None)
    # What is seen are picks among all slots, so they lie together, wherever the method would put them.
    method = dataclasses.replace(kvjax.method(sentence(name)), host=None)
    if not name.endswith(", fitted"):
        return method
    found = kvjax.fit(model, method, codes.prose(model, TEXTS, LENGTH), **FIT)
    read = dataclasses.replace(method.read, fitted=found)  # type: ignore[type-var]
    return dataclasses.replace(method, read=read)


def _gates(model: Model, name: str) -> Fitted:
    """Return which heads read pages: those that questions need, or all of them."""
    if name.endswith(", fitted"):
        asked = read_texts(model, text=None, tasks=None, rows=TEXTS, length=ASKED, seed=0, questions=True)
        return kvjax.fit(model, "duoattention", asked, **GATES)
    gates = np.ones((model.config.layers, model.config.kv_heads), np.float32)
    return Fitted({"gates": gates}, "HeadGates", model.signature)


def _tokens(model: Model) -> list[int]:
    found = model.tokenizer.encode(codes.TEXT.read_text()[START : START + 16 * LENGTH])
    return list(getattr(found, "ids", found))[: LENGTH + AFTER]


def measured(model: Model, ids: list[int], method: Method, full: Float[np.ndarray, "T V"]) -> dict[str, Any]:
    """Recall, share of the best attention and error by layer and in the mean, and KL over the tokens."""
    logp, seen = said(model, ids, method)
    # Layers in which all heads stream pick nothing.
    seen = [x for x in seen if x.read < 1] or seen
    layers = sorted({x.layer for x in seen})
    by_layer = {i: np.nanmean([x[1:] for x in seen if x.layer == i], axis=0) for i in layers}
    plain = kvjax.method("full")
    sizes = CacheSizes(model.config, "bfloat16", LENGTH, [method, plain])
    share, recall, held, error, pages = np.mean(list(by_layer.values()), axis=0)
    kl = (np.exp(full) * (full - logp)).sum(-1).mean()
    each = {"slots": share, "recall": recall, "held": held, "error": error, "kl": kl, "pages": pages}
    each |= {"bytes": sizes.read_bytes(method) / sizes.read_bytes(plain)}
    found = {n: float(f"{x:.4g}") for n, x in each.items()}
    return found | {"layers": {str(i): [float(f"{x:.3g}") for x in row[1:4]] for i, row in by_layer.items()}}


def at_equal_bytes(
    model: Model, ids: list[int], method: Method, full: Float[np.ndarray, "T V"]
) -> dict[str, Any]:
    """KL at the largest budget at which a step reads no more than `BYTES`, and what is held for it.

    "equal" is None for a read that exceeds these bytes at any budget.
    """
    plain, read = kvjax.method("full"), method.read
    low, high, found = 0.0, 1.0, None
    assert read is not None
    for _ in range(HALVINGS if hasattr(read, "budget") else 0):
        budget = (low + high) / 2
        tried = dataclasses.replace(method, spec=(), read=dataclasses.replace(read, budget=Budget(budget)))
        sizes = CacheSizes(model.config, "bfloat16", LENGTH, [tried, plain])
        if sizes.read_bytes(tried) <= BYTES * sizes.read_bytes(plain):
            low, found = budget, (budget, tried, sizes)
        else:
            high = budget
    if found is None:
        return {"equal": None}
    budget, tried, sizes = found
    _, cache = kvjax.prefill(model, [ids[:-AFTER]], method=tried, room=AFTER)
    logp = []
    for token in ids[-AFTER:]:
        logits, cache = kvjax.step(model, cache, np.asarray([token]))
        logp.append(np.asarray(jax.nn.log_softmax(logits[0].astype(jnp.float32)), np.float64))
    kl = (np.exp(full) * (full - np.stack(logp))).sum(-1).mean()
    each = {"budget": budget, "kl": kl, "holds": sizes.nbytes(tried) / sizes.nbytes(plain)}
    return {"equal": {n: float(f"{x:.3g}") for n, x in each.items()}}


def said(
    model: Model, ids: Sequence[int], method: Method, after: int = AFTER
) -> tuple[Array, list[LayerRead]]:
    """Log p of what follows each of the last `after` tokens, and what their steps read, layer by layer."""
    found: list[LayerRead] = []
    with observed(lambda *x: found.append(LayerRead(int(x[0]), *map(float, x[1:])))):
        _, cache = kvjax.prefill(model, [ids[:-after]], method=method, room=after)
        logp = []
        for token in ids[-after:]:
            logits, cache = kvjax.step(model, cache, np.asarray([token]))
            logp.append(np.asarray(jax.nn.log_softmax(logits[0].astype(jnp.float32)), np.float64))
        jax.effects_barrier()
    return np.stack(logp), found


@contextmanager
def observed(report: Callable[..., object]) -> Iterator[None]:
    """Call `report` with the fields of `LayerRead` for every layer that reads part of its slots."""
    parts_of = attend._parts

    def tapped(here, x):
        out, past, found = parts_of(here, x), here.past, here.found
        if found is not None:
            every = past._replace(gm=past.gm.replaced(read=None))
            whole, lse = merge(parts_of(here._replace(past=every, found=None), x)[0])
            p, live = _received(past, here.layer, x.q, lse, here.pools, here.token.at)
            granule = past.gm.read.granule
            read = _chosen(found.whole, granule, p.shape[-1]) & live
            whole_lists = ~(live & ~read).any(-1)
            # Heads that stream read their lists whole, beside lists from which a read picks.
            picked = ~whole_lists | whole_lists.all()
            each = [jnp.where(picked, x, jnp.nan) for x in judged(p, live, read)]
            pages = judged(
                _in_pages(p, granule, jnp.sum), *(_in_pages(x, granule, jnp.any) for x in (live, read))
            )
            error = jnp.linalg.norm(merge(out[0])[0] - whole) / jnp.linalg.norm(whole)
            jax.debug.callback(
                report,
                here.layer.number,
                *(jnp.nanmean(x) for x in each),
                error,
                jnp.nanmean(jnp.where(picked, pages[1], jnp.nan)),
            )
        return out

    # A program keeps the function that it was traced with, so those of other methods that are equal to this
    # one, and those made here, must not be reused.
    jax.clear_caches()
    with mock.patch.object(attend, "_parts", tapped):
        yield
    jax.clear_caches()


def _received(past: Any, layer: Any, q: Array, lse: Array, pools: Any, at: Array) -> tuple[Array, Array]:
    """Compute the attention [B, K, S] that slots from which a read picks receive, and which hold a token."""
    body, index = picked_from(past, pools)
    k, pos = dense(jax.tree.map(lambda x: x[index], body.k)), body.pos[index]
    if isinstance(past.gm.read, Placing):
        k = rotated(rope_of_keys(layer), k, jnp.maximum(pos, 0), at + 1)
    b, heads, _, h = k.shape
    s = jnp.einsum("bkgh,bksh->bkgs", q.reshape(b, heads, -1, h), k.astype(q.dtype)) * layer.scale
    p = jnp.exp(s - lse.reshape(b, heads, -1)[..., None]).sum(2)
    return jnp.where(pos >= 0, p, 0.0), pos >= 0


def _in_pages(x: Array, granule: int, reduce: Callable[..., Array]) -> Array:
    return reduce(x.reshape(*x.shape[:-1], -1, granule), axis=-1)


def _chosen(picks: Any, granule: int, slots: int) -> Bool[Array, "B K S"]:
    used = jnp.arange(picks.pages.shape[2])[None, None] < picks.counts[..., None]
    pages = (jax.nn.one_hot(picks.pages, slots // granule, dtype=bool) & used[..., None]).any(2)
    return jnp.repeat(pages, granule, axis=-1)


def judged(
    p: Float[Array, "*b S"], live: Bool[Array, "*b S"], read: Bool[Array, "*b S"]
) -> tuple[Float[Array, "*b"], Float[Array, "*b"], Float[Array, "*b"]]:
    """Compute the share of slots read, recall of the best as many, and attention as a share of theirs.

    Where nothing is read the latter two are no number.

    >>> p, live = jnp.asarray([4.0, 3.0, 2.0, 1.0]), jnp.ones(4, bool)
    >>> [round(float(x), 3) for x in judged(p, live, jnp.asarray([True, False, True, False]))]
    [0.5, 0.5, 0.857]
    """
    many = read.sum(-1, keepdims=True)
    order = jnp.argsort(jnp.argsort(-jnp.where(live, p, -1.0), axis=-1), axis=-1)
    best = order < many
    recall = (read & best).sum(-1) / many[..., 0]
    held = jnp.where(read, p, 0).sum(-1) / jnp.where(best, p, 0).sum(-1)
    return many[..., 0] / live.sum(-1), recall, held


# --- the page --------------------------------------------------------------------------------------------


def setting() -> str:
    about = DATA.read()["about"]
    return (
        f"{about['model']} (fingerprint {about['fingerprint']}) in float32, {about['tokens']} tokens of "
        f"`{about['text']}`, steps of the next {about['after']}; budget {about['budget']} of older tokens."
    )


def table() -> str:
    """Write a row for each method, the one with the highest recall first."""
    lines = [
        "| method | older tokens read, % | recall | recall of pages | attention, of the best | output error "
        f"| KL | bytes read, % | budget for {100 * BYTES:.0f}% | its KL | holds, % |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, row in sorted(DATA.read()["rows"].items(), key=lambda x: -x[1]["recall"]):
        pages = f"{row['pages']:.2f}" if "pages" in row and granule_of(name) > 1 else ""
        shown = f"{100 * row['slots']:.0f} | {row['recall']:.2f} | {pages} | {row['held']:.2f}"
        shown += f" | {row['error']:.2f}"
        at = " | | " if "equal" not in row else "– | – | –"
        if equal := row.get("equal"):
            at = f"{equal['budget']:.2f} | {equal['kl']:.3f} | {100 * equal['holds']:.0f}"
        lines.append(f"| `{name}` | {shown} | {row['kl']:.3f} | {100 * row['bytes']:.0f} | {at} |")
    return "\n".join(lines)


def granule_of(name: str) -> int:
    """How many tokens a row's method picks together."""
    read = kvjax.method(sentence(name)).read
    assert read is not None
    return read.granule


def by_layer() -> str:
    """Recall in thirds of the layers that read a part of their slots."""
    lines = ["| method | layers | lower third | middle | upper third |", "|---|--:|--:|--:|--:|"]
    for name, row in sorted(DATA.read()["rows"].items(), key=lambda x: -x[1]["recall"]):
        recall = [x[0] for x in row["layers"].values()]
        shown = " | ".join(f"{part.mean():.2f}" for part in np.array_split(np.asarray(recall), 3))
        lines.append(f"| `{name}` | {len(recall)} | {shown} |")
    return "\n".join(lines)


PAGE = Page("recall.md", {"setting": setting, "table": table, "layers": by_layer})

if __name__ == "__main__":
    study(__doc__, run, PAGE, rows=True)

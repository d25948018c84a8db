"""Compares the kinds of compression on one model: losses, bytes held and read, and what a prefill computes.

    python -m scripts.studies.what_buys sizes     # bytes of every row of the board, from shapes alone
    python -m scripts.studies.what_buys --write   # the tables of docs/what-buys-what.md
    python -m scripts.studies.what_buys picture   # draws docs/what-buys-what.png

The board (`scripts.studies.board`) measured the losses, with a cache in float32. Bytes are compared with a
cache in bfloat16, as models are served; compared with float32, codes would look half as large.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

import kvjax
from kvjax.base.atomic_files import write_atomic
from kvjax.base.errors import InputError
from kvjax.eval.report.cells import budget_label
from kvjax.grammar import Method
from kvjax.methods import METHODS
from kvjax.models.config import Config, Rope
from kvjax.plan.cache_sizes import CacheSizes
from kvjax.state.cache import Cache, lies_far
from scripts.docs_tables import DOCS
from scripts.studies import board
from scripts.studies.real_model_picture import PANELS
from scripts.studies.runner import Data, Page, parser, progress

TOKENS = 1024
# The kinds in the order of the tables, with the families of methods that each holds.
KINDS = {
    "evict tokens": ("selection-static", "selection-dynamic", "budget-layer", "budget-head"),
    "merge tokens": ("merge-token", "merge-head", "merge-layer"),
    "store fewer bits": ("quant", "quant-mixed", "outlier-transform"),
    "store fewer numbers": ("low-rank", "pruning"),
    "read part of the cache": ("retrieval-sparse",),
    "compute part of the prompt": ("prefill-sparse",),
    "keep in host memory": (),
}
# Baselines have no family of their own.
BASELINES = {
    "int8": "store fewer bits",
    "int4": "store fewer bits",
    "fp8": "store fewer bits",
    "per-token-head": "store fewer bits",
    "offloaded": "keep in host memory",
}
BASELINES |= {"random": "evict tokens", "sink-recent": "evict tokens"}
COLOURS = {
    "evict tokens": "#d55e00",
    "merge tokens": "#cc79a7",
    "store fewer bits": "#0072b2",
    "store fewer numbers": "#56b4e9",
    "read part of the cache": "#009e73",
    "compute part of the prompt": "#e69f00",
    "keep in host memory": "#000000",
}
# Those of the page's bytes, and of the board's caches.
DTYPES = ("bfloat16", "float32")
# The top of the picture in nats, and how far above a point its label is.
TOP, BESIDE = 3.6, {"evict tokens": -8, "read part of the cache": 9, "merge tokens": 6}
DATA = Data(DOCS / "what-buys-what.json", {"tokens": TOKENS, "sizes": {}})


class Row(NamedTuple):
    """A method at a budget: its bytes and computations in percent of the full cache's, and its losses.

    held: bytes of the cache. near: those in device memory. read: bytes that a step reads. computed: (token,
    layer) pairs that a prefill computes. losses: nats per token above the full cache, by protocol.
    """

    kind: str
    label: str
    held: float
    near: float
    read: float
    computed: float
    losses: dict[str, float]


def main() -> None:
    args = parser(__doc__, ("sizes", "picture")).parse_args()
    if args.what == "sizes":
        make()
    elif args.what == "picture":
        write_atomic(DATA.path.with_suffix(".png"), picture(rows()))
    else:
        PAGE.show(args)


# --- data ------------------------------------------------------------------------------------------------


def make() -> None:
    """Add what the data lacks: bytes held and read, pairs computed, bytes in device memory."""
    config = of_the_board()
    measured = board.at_1024()
    lines = {line["sentence"]: kvjax.method(line["sentence"]) for line in measured}
    kept = {line["sentence"]: line["kept"] for line in measured}
    known = DATA.read()["sizes"]
    full, as_measured = (CacheSizes(config, d, TOKENS, [Method()]).nbytes(Method()) for d in DTYPES)
    for sentence in progress(sorted(lines.keys() - known.keys())):
        method = lines[sentence]
        try:
            sizes, wide = (CacheSizes(config, dtype, TOKENS, [method]) for dtype in DTYPES)
            held, read = sizes.nbytes(method) / full, sizes.read_bytes(method) / full
            near = held - far_bytes(sizes.cache(method)) / full
            of_shapes = wide.nbytes(method) / as_measured
        except (InputError, ValueError) as error:
            print(f"{sentence}: {error}")
            continue
        if abs(of_shapes - kept[sentence]) > 0.02:
            # What the text decides is in no shape. Without codes its share is that of any dtype.
            if method.store is not None:
                print(f"{sentence}: shapes hold {of_shapes:.0%}, measured were {kept[sentence]:.0%}")
                continue
            held = read = near = kept[sentence]
        found = [round(x, 4) for x in (held, read, computed(method, config.layers), near)]
        DATA.change(lambda data, sentence=sentence, found=found: data["sizes"].update({sentence: found}))


def far_bytes(cache: Cache) -> int:
    """Bytes of a cache's shapes that are in host memory, if there is one."""
    leaves = zip(jax.tree.leaves(cache), jax.tree.leaves(lies_far(cache)), strict=True)
    return sum(x.size * x.dtype.itemsize for x, far in leaves if far)


def of_the_board() -> Config:
    """Return the configuration of SmolLM2-135M."""
    return Config(
        vocab=49152, d_model=576, layers=30, heads=9, kv_heads=3, head_dim=64, d_ff=1536, max_positions=8192,
        rope=Rope(theta=100_000.0), norm_eps=1e-5, tied=True,
    )  # fmt: skip


def computed(method: Method, layers: int) -> float:
    """Compute the share of a prompt's (token, layer) pairs computed; above 1 where tokens are read again."""
    word, narrow = method.reread, None if method.keep is None else method.keep.narrow
    if word is not None and hasattr(word, "stages"):
        ((last, _),) = word.stages(layers, TOKENS)
        return (last + 1) / layers + word.most(TOKENS) / TOKENS
    left, total, stages = TOKENS, 0, {} if narrow is None else dict(narrow.stages(layers, TOKENS))
    for layer in range(layers):
        total += left
        left = stages[layer].most(left) if layer in stages else left
    return total / (layers * TOKENS)


def kind_of(method: str, computes: float) -> str | None:
    """Name the kind of a method; None for a method that saves nothing by itself, such as the full cache."""
    if computes < 1:
        return "compute part of the prompt"
    family = METHODS[method].paper.family if method in METHODS else None
    found = (kind for kind, families in KINDS.items() if family in families)
    return BASELINES.get(method) or next(found, None)


def rows() -> list[Row]:
    """List the methods of the board of which the data has sizes, with their losses."""
    lines, sizes = board.at_1024(), DATA.read()["sizes"]
    sentences = {(line["method"], line["budget"]): line["sentence"] for line in lines}
    lost: dict[tuple[str, float | None], dict[str, float]] = {}
    for protocol in PANELS:
        for x in board.losses(lines, protocol):
            lost.setdefault((x.method, x.budget), {})[protocol] = x.nats.mean
    return [*_rows(lost, sentences, sizes)]


def _rows(lost: dict[Any, dict[str, float]], sentences: dict[Any, str], sizes: Any) -> Iterator[Row]:
    for (method, budget), losses in lost.items():
        held, read, computes, near = sizes.get(sentences[method, budget], (None, None, None, None))
        if held is None or (kind := kind_of(method, computes)) is None:
            continue
        label = method if budget is None else f"{method} {budget_label(budget)}"
        yield Row(kind, label, 100 * held, 100 * near, 100 * read, 100 * computes, losses)


# --- tables ----------------------------------------------------------------------------------------------


def best(found: Sequence[Row], protocol: str) -> str:
    """Write a table with the least loss of each kind among methods that hold or read at most 55% or 30%."""
    limits = (("near", 55), ("near", 30), ("read", 55), ("read", 30))
    head = " | ".join(f"{'holds' if by == 'near' else 'reads'} at most {at}%" for by, at in limits)
    out = [f"| kind | {head} |", f"|---|{'---|' * len(limits)}"]
    for kind in KINDS:
        cells = []
        for by, at in limits:
            fits = [x for x in found if x.kind == kind and getattr(x, by) <= at and protocol in x.losses]
            least = min(fits, key=lambda x: x.losses[protocol], default=None)
            cells.append("–" if least is None else f"{_nats(least.losses[protocol])} ({least.label})")
        out.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(out)


def table(found: Sequence[Row]) -> str:
    """Write a table of all rows, ordered by kind and then by bytes held, the fewest first."""
    out = [
        "| kind | method | holds, % | with host memory, % | reads, % | computes, % | loss, question later "
        "| loss, question first |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for kind in KINDS:
        for x in sorted((x for x in found if x.kind == kind), key=lambda x: (x.near, x.read, x.label)):
            losses = " | ".join(_nats(x.losses[p]) if p in x.losses else "–" for p in PANELS)
            shares = f"{x.near:.0f} | {x.held:.0f} | {x.read:.0f} | {x.computed:.0f}"
            out.append(f"| {kind} | {x.label} | {shares} | {losses} |")
    return "\n".join(out)


def _nats(x: float) -> str:
    return f"{round(x, 2) + 0.0:+.2f}"


def picture(found: Sequence[Row]) -> bytes:
    """Draw a PNG of losses against bytes held and bytes read: a panel per protocol, a colour per kind."""
    from matplotlib.figure import Figure

    figure = Figure((5.6, 12.5), dpi=140, layout="constrained")
    axes = figure.subplots(2 * len(PANELS), 1, sharey=True).reshape(len(PANELS), 2)
    for across, (protocol, title) in zip(axes, PANELS.items(), strict=True):
        for axis, (by, label) in zip(across, (("near", "held"), ("read", "read by a step")), strict=True):
            for kind, colour in COLOURS.items():
                _draw(axis, [x for x in found if x.kind == kind and protocol in x.losses], by, protocol)
                axis.scatter([], [], s=22, color=colour, label=kind)
            axis.axhline(0, color="black", linewidth=1, linestyle=":")
            axis.set(title=title, xlabel=f"bytes {label}, % of the full cache in bfloat16")
            axis.set(xlim=(-3, 125), ylim=(-0.35, TOP + 0.35))
            axis.set_ylabel("-log p above the full cache's, nats")
            axis.title.set_fontsize(10)
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
    marks, kinds = axes[0][0].get_legend_handles_labels()
    figure.legend(marks, kinds, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()


def _draw(axis: Any, mine: Sequence[Row], by: str, protocol: str) -> None:
    """Draw the rows of one kind and name the best; triangles with their losses stand for rows above."""
    named = {x.label for x in front(mine, by, protocol)}
    far = sorted((x for x in mine if x.losses[protocol] > TOP), key=lambda x: getattr(x, by))
    for x in mine:
        at, lost, colour = getattr(x, by), x.losses[protocol], COLOURS[x.kind]
        above = lost > TOP
        axis.scatter(
            at,
            min(lost, TOP),
            22,
            colour,
            marker="^" if above else "o",
            alpha=0.8,
            linewidths=0,
            clip_on=False,
        )
        if above or x.label in named:
            text = f"{x.label} {_nats(lost)}" if above else x.label
            # Every second label above is below its triangle, since those of neighbours would overlap.
            lift = (3, -9)[far.index(x) % 2] if above else BESIDE.get(x.kind, 3)
            axis.annotate(
                text, (at, min(lost, TOP)), (3, lift), textcoords="offset points", fontsize=7, color=colour
            )


def front(found: Sequence[Row], by: str, protocol: str) -> list[Row]:
    """Rows that lose at least 0.02 nats less than every row that holds (or reads) fewer bytes."""
    out: list[Row] = []
    mine = (x for x in found if protocol in x.losses)
    for x in sorted(mine, key=lambda x: (round(getattr(x, by)), x.losses[protocol])):
        if not out or x.losses[protocol] < out[-1].losses[protocol] - 0.02:
            out.append(x)
    return out


PAGE = Page(
    "what-buys-what.md",
    {
        "best agnostic": lambda: best(rows(), "agnostic"),
        "best aware": lambda: best(rows(), "aware"),
        "all": lambda: table(rows()),
    },
)

if __name__ == "__main__":
    main()

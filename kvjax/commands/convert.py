"""`kvjax convert`: converts a trained model to another architecture, and measures the loss at once."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from kvjax.commands.options import add_dtype, add_overwrite, add_refused, whole
from kvjax.commands.programs import keep_programs
from kvjax.commands.texts import read_texts

HELP = "convert a trained model into another architecture, as the start of uptraining"
EXAMPLE = """conversions:
  gqa:kv_heads=2           fewer KV heads, each the mean of neighbours
  mqa                      one KV head
  wgqa:kv_heads=2          fewer KV heads, weighted sums whose weights learn
  cla:every=2              runs of layers read their first one's slots
  mlkv:layers=2            so many layers keep slots for all
  asymgqa:kv_heads=2       groups of like heads; kdgqa:kv_heads=2, dha:heads=12, qcqa:heads=6
                           are others
  drop:layers=[2,3]        layers without attention; drop:count=2 chooses them
  low-rank:rank=0.5        latents of grouped heads (Palu); lorc:most=0.75,least=0.25,
                           matryoshkakv:rank=16 are others
  recurformer:kv_heads=1   KV heads that look nearby become Mamba-2
  eckvh:kv_heads=2         fewer KV heads by singular values
  mla:rank=64,rotary=1     latents of all heads, and so many heads of turning keys
  lckv:own=2               layers between own ones read the topmost
  yoco:window=256          the upper half reads one layer, below are windows
  swiftkv:layer=4          layers from there on project from its input
  moba:block=64,top=3      queries attend to the blocks that they pick
  nsa:compress=16,stride=8,block=32,top=4,window=64
                           native sparse attention, its selection fitted to texts
  xc-cache:before=[1,3]    layers that read what an encoder kept
  cepe:width=64            every layer reads what an encoder that learns kept
  block:length=4           lower layers read blocks, upper ones their tokens
  linear:keep=2,mixer=KimiDelta,steps=200
                           linear attentions that learn from the attention

examples:
  kvjax convert --to gqa:kv_heads=1 recall-tiny runs/mqa
  kvjax uptrain runs/mqa --gin recall-tiny --teacher recall-tiny --out runs/uptrained"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a shipped model or a model directory")
    parser.add_argument("out", metavar="OUT", help="the directory of the converted model")
    parser.add_argument("--to", required=True, metavar="SPEC", help="the conversion, such as gqa:kv_heads=2")
    add_dtype(parser)
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="measure on these tasks (default: all)")
    parser.add_argument("--text", metavar="FILE", help="measure on pieces of a text file instead")
    parser.add_argument("--rows", type=whole(1), default=8, metavar="N", help="texts to read (default: 8)")
    parser.add_argument(
        "--length", type=whole(16), default=512, metavar="T", help="their tokens (default: 512)"
    )
    parser.add_argument("--seed", type=whole(0), default=0, metavar="S", help="of the texts (default: 0)")
    add_overwrite(parser, "the model that OUT holds")
    for name in ("--mesh", "--hosts"):
        add_refused(
            parser,
            name,
            "a conversion rewrites whole weights, once: run kvjax convert in one process, without it; "
            "kvjax uptrain, generate and compare spread the directory that it writes",
        )


def run(args: argparse.Namespace) -> None:
    from kvjax.commands.terminal import console, size
    from kvjax.grammar import Method
    from kvjax.io.checkpoint import MARKER, save_checkpoint
    from kvjax.io.load import load
    from kvjax.models.files import check_replaceable
    from kvjax.plan.cache_sizes import sizes_of
    from kvjax.train.conversion.conversions import convert
    from kvjax.train.conversion.difference import difference
    from kvjax.train.trained import check_finite

    keep_programs()
    check_replaceable(args.out, MARKER, args.overwrite)
    model = load(args.model, dtype=args.dtype)
    out = console()

    def some(seed: int) -> list[Any]:
        return read_texts(
            model, text=args.text, tasks=args.tasks, rows=args.rows, length=args.length, seed=seed,
            questions=False,
        )  # fmt: skip

    # A conversion is not measured on the texts that it was fitted to.
    new, texts = convert(model, args.to, partial(some, args.seed + 1)), some(args.seed)
    check_finite(new.params, f"what {args.to} makes of {args.model}")
    found = difference(model, new, texts)
    before, after = (
        sizes_of(m.config, args.dtype, args.length, [Method()]).nbytes(Method()) for m in (model, new)
    )
    save_checkpoint(new, args.out, overwrite=args.overwrite)
    out.print(
        f"{args.out}: {size(after)} of state at {args.length} tokens, before {size(before)}; before any "
        f"training its predictions are {found.divergence:.4f} nats from the original's, and its best token "
        f"is the original's {found.agreement:.1%} of the time",
        soft_wrap=True,
    )
    out.print(f"uptrain it with {_uptraining(model, new, args)}", soft_wrap=True)


def _uptraining(model: Any, new: Any, args: argparse.Namespace) -> str:
    """Return the command that trains a converted model further."""
    from kvjax.eval.tasks.reader import speaks_recall
    from kvjax.models.mixers.cross_attention import CrossAttention

    language = " data.kind=recall" if speaks_recall(model) else ""
    if any(isinstance(mixer, CrossAttention) for mixer in getattr(new.config, "mixers", ())):
        reads = f"model.encoder=ENCODER train.context=128{language}"
        return f"kvjax uptrain {args.out} --set {reads} --out DIR (docs/training.md, Contexts)"
    language = f" --set{language}" if language else ""
    return f"kvjax uptrain {args.out} --teacher {args.model}{language} --out DIR"

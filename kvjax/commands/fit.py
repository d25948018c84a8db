"""`kvjax fit`: fits the words of a method to a model, and writes the fitted arrays to a file."""

from __future__ import annotations

import argparse

from kvjax.commands.options import (
    add_dtype,
    add_mesh,
    add_model,
    add_overwrite,
    add_refused,
    mesh_options,
    whole,
)
from kvjax.commands.programs import keep_programs
from kvjax.commands.texts import read_texts

HELP = "fit what a method must learn of a model, such as KVzap's gate or HeadKV's profile"
EXAMPLE = """examples:
  kvjax fit kvzap --out kvzap.safetensors
  kvjax fit kvzap --model path/to/model --text book.txt --rows 64 --hidden 512 --out kvzap.safetensors
  kvjax fit headkv --tasks get chase --out headkv.safetensors
  kvjax fit q-filters --text book.txt --out q-filters.safetensors
  kvjax fit palu --text book.txt --out palu.safetensors
  kvjax fit less --budget 0.25 --hidden 64 --out less.safetensors
  kvjax fit locret --rows 64 --hidden 256 --out locret.safetensors
  kvjax fit wg-kv --set recent=64 penalty=0.02 --out wg-kv.safetensors
  kvjax fit dmc --rows 64 --set target=0.75 --out dmc.safetensors
  kvjax fit gisting:tokens=16 --tasks get --length 64 --rows 12000 --batch 16 --epochs 1 --out g.safetensors
  kvjax fit kvquant --text book.txt --set bits=4 --out kvquant.safetensors
  kvjax fit moba:page=16 --text book.txt --out moba.safetensors
  kvjax fit kvlink --text book.txt --set documents=8 --out links.safetensors
  kvjax compare --methods kvzap:fitted=kvzap.safetensors headkv:fitted=headkv.safetensors snapkv"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "method", metavar="METHOD", help="a method that is fitted, such as kvzap, or ccm:tokens=8,chunk=32"
    )
    add_model(parser)
    add_dtype(parser)
    parser.add_argument(
        "--tasks",
        nargs="+",
        metavar="TASK",
        help="fit on these tasks' contexts and questions (default: get chase all copy multikey)",
    )
    parser.add_argument("--text", metavar="FILE", help="fit on pieces of a text file instead")
    parser.add_argument("--rows", type=whole(1), default=32, metavar="N", help="texts to read (default: 32)")
    parser.add_argument(
        "--length", type=whole(16), default=512, metavar="T", help="their tokens (default: 512)"
    )
    parser.add_argument("--batch", type=whole(1), default=4, metavar="N", help="texts at a time (default: 4)")
    parser.add_argument(
        "--hidden",
        type=whole(0),
        metavar="X",
        help="hidden width of a gate or of kernels; a gate is linear with 0, its default",
    )
    parser.add_argument("--rank", type=whole(1), metavar="R", help="of LESS's kernels (default: 8)")
    parser.add_argument("--epochs", type=whole(1), metavar="N", help="readings, where one is not enough")
    parser.add_argument("--budget", metavar="B", help="for methods that learn from evicted slots")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="other options of the fit, as in kvjax.fit: rate=0.01, or DuoAttention's penalty and recent",
    )
    parser.add_argument("--seed", type=whole(0), default=0, metavar="S", help="of the draws (default: 0)")
    parser.add_argument("--out", required=True, metavar="FILE", help="where to write it, as safetensors")
    add_overwrite(parser, "an older file of fitted arrays there")
    add_mesh(parser)
    add_refused(
        parser,
        "--hosts",
        "what words learn is solved in one process, from a few texts: run kvjax fit on one host, with --mesh "
        "for its devices, and give the file to all",
    )


def run(args: argparse.Namespace) -> None:
    if args.method.partition(":")[0] == "kvlink":
        _fit_links(args)
        return
    from functools import partial

    from kvjax.base.atomic_files import check_kind, check_unwritten
    from kvjax.commands.terminal import console, tracked
    from kvjax.fitting import fit, learns_from_questions, options_of
    from kvjax.grammar.fitted import KIND, save_fitted
    from kvjax.io.load import load
    from kvjax.methods import takes
    from kvjax.methods.parse import parse_budget, parse_method, read_options, single, with_file

    parse_method(args.method)
    part = single(args.method)
    check_unwritten(args.out, args.overwrite)
    check_kind(args.out, KIND)
    keep_programs()
    model = load(args.model, dtype=args.dtype, **mesh_options(args))
    texts = read_texts(
        model, text=args.text, tasks=args.tasks, rows=args.rows, length=args.length, seed=args.seed,
        questions=learns_from_questions(args.method),
    )  # fmt: skip
    out = console()
    shown = partial(tracked, description="reading", console=out)
    given = {name: getattr(args, name) for name in ("hidden", "rank", "epochs")}
    options = {name: value for name, value in given.items() if value is not None}
    options |= read_options(args.set)
    options |= {"seed": args.seed} if "seed" in options_of(args.method) else {}
    budget = None if args.budget is None else parse_budget(args.budget)
    found = fit(model, args.method, texts, batch=args.batch, budget=budget, progress=shown, **options)
    save_fitted(args.out, found)
    out.print(f"{args.out}: {found.word}, fitted on {len(texts)} texts")
    # The settings that the fit and the method must share, such as KVQuant's bits.
    also = "".join(
        f",{name}={value}"
        for name, value in options.items()
        if ".py:" not in part.name and takes(part.name, name)
    )
    out.print(f"use it as {with_file(args.method, args.out)}{also}", soft_wrap=True)


def _fit_links(args: argparse.Namespace) -> None:
    """Fit KVLink's link tokens, which no method has: `kvjax.join` takes them."""
    import inspect
    from functools import partial

    from kvjax.base.atomic_files import check_kind, check_unwritten
    from kvjax.base.errors import InputError
    from kvjax.commands.terminal import console, tracked
    from kvjax.fitting.prompts.links import fit_links
    from kvjax.grammar.fitted import KIND, save_fitted
    from kvjax.io.load import load
    from kvjax.methods.parse import read_options

    given = {name: getattr(args, name) for name in ("epochs", "hidden", "rank", "budget")}
    options = {name: value for name, value in given.items() if value is not None} | read_options(args.set)
    _, _, own = args.method.partition(":")
    options |= read_options(own.split(",")) if own else {}
    known = {name for name in inspect.signature(fit_links).parameters} - {"model", "texts", "progress"}
    if unknown := sorted(options.keys() - known):
        raise InputError(f"what is fitted for kvlink has no option {unknown[0]!r}, it takes {sorted(known)}")
    check_unwritten(args.out, args.overwrite)
    check_kind(args.out, KIND)
    keep_programs()
    model = load(args.model, dtype=args.dtype, **mesh_options(args))
    texts = read_texts(
        model, text=args.text, tasks=args.tasks, rows=args.rows, length=args.length, seed=args.seed,
        questions=False,
    )  # fmt: skip
    out = console()
    shown = partial(tracked, description="reading", console=out)
    options = {"seed": args.seed, "batch": args.batch} | options
    save_fitted(args.out, fit_links(model, texts, progress=shown, **options))
    out.print(f"{args.out}: links, fitted on {len(texts)} texts")
    out.print(f"use it as kvjax.join(model, caches, links={args.out!r})", soft_wrap=True)

"""`kvjax compare`: runs methods on the same model, and compares scores and bytes."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvjax.commands.options import add_hosts, add_mesh, add_model, mesh_options, whole
from kvjax.commands.programs import keep_programs

HELP = "run methods side by side on the same questions and print quality against measured bytes"
EXAMPLE = """examples:
  kvjax compare
  kvjax compare --methods well-known --budgets 0.5 0.25 0.125
  kvjax compare --methods all
  kvjax compare --methods snapkv adakv kivi:bits=4 snapkv+int4 --budgets 0.5 0.25
  kvjax compare --methods my_file.py:my_method --tasks get --samples 20 --out results
  kvjax compare --samples 8 --seeds 0 1 2
  kvjax compare --model path/to/model --tasks ruler --length 2048
  kvjax compare --model path/to/model --tasks scbench_kv.jsonl --protocol agnostic multi-turn
  kvjax compare --model path/to/model --text book.txt"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help="ids (see `kvjax methods`), with hyper-parameters as snapkv:window=16, chained as snapkv+kivi, "
        "or your own as my_file.py:my_method; well-known: a few of every family; all: every one that needs "
        "no fit or comes with one (default: h2o snapkv kvzip kivi quest); the full cache, random and "
        "sink-recent run, too",
    )
    parser.add_argument(
        "--budgets",
        nargs="+",
        metavar="BUDGET",
        help="what is kept: a fraction of the tokens, or whole slots per head (default: 0.5 0.25)",
    )
    _add_questions(parser)
    _add_run(parser)
    add_mesh(parser)
    add_hosts(parser)


def _add_questions(parser: argparse.ArgumentParser) -> None:
    """Options of what is asked or read."""
    parser.add_argument(
        "--tasks",
        nargs="+",
        metavar="TASK|FILE",
        help="what is asked: built-in tasks; ruler, or RULER's tasks by name, as niah_single_1 or "
        "qa_1:file=dev-v2.0.json; files of benchmarks: their path, or kvpress:FILE, scbench:FILE and so on "
        "(docs/tasks.md); or your own as my_file.py:my_task (default: get chase all copy multikey; needles "
        "of RULER, whose right answers are fed, for models that read English)",
    )
    parser.add_argument(
        "--protocol",
        nargs="+",
        choices=("agnostic", "aware", "aware-unprotected", "multi-turn"),
        help="when the question is seen: after compression, before it, or several in turn; its tokens stay "
        "in aware, whatever the method and within its budget, and may be dropped in aware-unprotected "
        "(default: agnostic aware; aware for models that read English)",
    )
    parser.add_argument(
        "--samples", type=whole(1), metavar="N", help="contexts per protocol (default: 32; 8)"
    )
    parser.add_argument(
        "--length", type=whole(1), metavar="T", help="tokens per context (default: 512; 1024)"
    )
    parser.add_argument("--text", metavar="FILE", help="measure likelihood on this text instead of asking")


def _add_run(parser: argparse.ArgumentParser) -> None:
    """Options of the run: its folder, its draws, what else is computed."""
    parser.add_argument("--out", metavar="DIR", help="where results go (default: kvjax-results/TIME)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument("--seed", type=whole(0), default=0, metavar="S", help="of the questions (default: 0)")
    parser.add_argument(
        "--seeds", nargs="+", type=whole(0), metavar="S",
        help="several, each of which draws --samples contexts; all count together in one table",
    )  # fmt: skip
    parser.add_argument(
        "--preset",
        metavar="NAME|FILE",
        help="hyper-parameters of the methods: short, long or a .gin file (default: by --length)",
    )
    parser.add_argument(
        "--scores",
        action="store_true",
        help="also show in report.html what every method scores and keeps of the first prompt, by layer and "
        "head; reads it again for each, which takes some seconds per method",
    )
    parser.add_argument(
        "--no-baselines",
        action="store_true",
        help="leave out the full cache, random and sink+recent, which otherwise run, too",
    )
    parser.add_argument(
        "--gold",
        action="store_true",
        help="feed the right answers in one pass (teacher forcing) instead of letting the model write: it is "
        "faster, and also gives -log p of the right answer, which moves before answers break",
    )


def run(args: argparse.Namespace) -> int:
    from kvjax.base.errors import InputError
    from kvjax.methods.parse import parse_budget

    if args.resume and args.out is None:
        raise InputError(
            "--resume was given without --out, expected the directory of the run to go on with: add --out DIR"
        )
    if args.text is not None and not Path(args.text).is_file():
        raise InputError(f"--text {args.text} is no file, expected a text to read: check the path")
    keep_programs()
    budgets = args.budgets and [parse_budget(b) for b in args.budgets]
    from kvjax.eval.compare import compare

    found = compare(
        model=args.model,
        methods=args.methods,
        budgets=budgets,
        tasks=args.tasks,
        protocols=args.protocol and tuple(args.protocol),
        samples=args.samples,
        length=args.length,
        text=args.text,
        out=args.out,
        resume=args.resume,
        seed=args.seed,
        seeds=args.seeds,
        preset=args.preset,
        scores=args.scores,
        baselines=not args.no_baselines,
        gold=args.gold or None,
        **mesh_options(args),
    )
    return 1 if found.metrics.get("failed") else 0

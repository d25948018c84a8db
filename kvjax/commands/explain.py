"""`kvjax explain`: what a method does to a prompt and in every step, and how large its cache is."""

from __future__ import annotations

import argparse

from kvjax.commands.options import add_dtype, add_model, whole

HELP = "explain what a method does with a prompt and at each step, and how many bytes its cache has"
EXAMPLE = """examples:
  kvjax explain "snapkv(budget=0.25) + kivi(bits=2)"
  kvjax explain h2o --budget 256 --context 4096
  kvjax explain quest --budget 0.1 --model path/to/model --context 32768 --dtype bfloat16"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "method",
        metavar="METHOD",
        help='such as snapkv, snapkv:window=16 or "snapkv(budget=0.25) + kivi(bits=2)"',
    )
    parser.add_argument(
        "--budget", metavar="B", help="what is kept: a fraction of the tokens, or slots per head"
    )
    add_model(parser)
    parser.add_argument(
        "--context", type=whole(1), default=1024, metavar="N", help="tokens of the prompt (default: 1024)"
    )
    add_dtype(parser)


def run(args: argparse.Namespace) -> None:
    from kvjax.base.errors import InputError
    from kvjax.commands.explain_print import print_explanation
    from kvjax.methods.parse import parse_budget, parse_method

    label, build = parse_method(args.method)
    budget = None if args.budget is None else parse_budget(args.budget)
    if budget is None and build.takes_budget:
        raise InputError(
            f"method {label} was given without a budget, expected a fraction or a number of slots: "
            "add --budget 0.25"
        )
    print_explanation(build(budget), args.model, args.context, args.dtype)

"""`kvjax inspect`: a model's shapes and what its caches take, or what a saved cache holds."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvjax.commands.options import LONGEST_DEFAULT, add_dtype, whole

HELP = "show a model's shapes and the bytes of its caches under every method, or what a saved cache holds"
EXAMPLE = """examples:
  kvjax inspect recall-tiny
  kvjax inspect path/to/model --context 32768 --dtype bfloat16
  kvjax inspect saved.cache"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        metavar="DIR|NAME|CACHE_FILE",
        help="a model directory, a shipped model, org/name of the hub, or a file of kvjax.save_cache",
    )
    parser.add_argument(
        "--context",
        type=whole(1),
        metavar="N",
        help=f"tokens in the caches to size (default: the model's positions, at most {LONGEST_DEFAULT})",
    )
    add_dtype(parser)


def run(args: argparse.Namespace) -> None:
    if Path(args.what).is_file():
        from kvjax.commands.inspect_cache import print_cache

        print_cache(args.what)
    else:
        from kvjax.commands.inspect_model import print_model

        print_model(args.what, args.context, args.dtype)

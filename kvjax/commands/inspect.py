"""`kvjax inspect`: a model's shapes and the size of its caches, or the content of a saved cache."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvjax.commands.options import LONGEST_DEFAULT, add_dtype, whole
from kvjax.commands.options import PRESETS_OF_RULES as PRESETS

HELP = "show a model's shapes and the bytes of its caches under every method, or what a saved cache holds"
EXAMPLE = """examples:
  kvjax inspect recall-tiny
  kvjax inspect path/to/model --context 32768 --dtype bfloat16
  kvjax inspect path/to/model --mesh data=2,model=4 --rules tensor --method kivi
  kvjax inspect saved.cache"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        metavar="DIR|GGUF|NAME|CACHE_FILE",
        help="a model directory, its config.json alone or a GGUF file, a shipped model, org/name of the hub, "
        "or a file of kvjax.save_cache",
    )
    parser.add_argument(
        "--context",
        type=whole(1),
        metavar="N",
        help=f"tokens in the caches to size (default: the model's positions, at most {LONGEST_DEFAULT})",
    )
    add_dtype(parser)
    parser.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        help="show which device holds what of weights and cache, as in data=2,model=4; none need be there",
    )
    parser.add_argument(
        "--rules", default="tensor", choices=PRESETS, help="how to split them (default: tensor)"
    )
    parser.add_argument(
        "--method", default="full", metavar="SPEC", help="whose cache --mesh shows (default: full)"
    )


def run(args: argparse.Namespace) -> None:
    from kvjax.models.gguf.reader import is_gguf

    args.what = _directory_of(args.what)
    path = Path(args.what)
    if path.is_file() and path.suffix != ".json" and not is_gguf(path):
        from kvjax.commands.inspect_cache import print_cache

        print_cache(args.what)
    elif args.mesh is not None:
        from kvjax.commands.inspect_mesh import print_mesh

        print_mesh(args.what, args.mesh, args.rules, args.method, args.context, args.dtype)
    else:
        from kvjax.commands.inspect_model import print_model

        print_model(args.what, args.context, args.dtype)


def _directory_of(what: str) -> str:
    """Return the directory of a config.json, whose shapes need no weights; anything else as given."""
    path = Path(what)
    return str(path.parent) if path.name == "config.json" and path.is_file() else what

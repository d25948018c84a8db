"""Options that several subcommands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from kvjax.base.errors import InputError

# `kvjax.mesh.rules.PRESETS`, which `--help` should not wait for.
PRESETS_OF_RULES = ("single", "batch", "tensor", "sequence", "tensor+sequence", "expert", "fsdp")
DTYPES = ("float32", "bfloat16", "float16")
# Tokens in the caches that `inspect` sizes by default, if the model allows more.
LONGEST_DEFAULT = 8192


def add_model(parser: argparse.ArgumentParser, default: str = "recall-tiny") -> None:
    parser.add_argument(
        "--model",
        default=default,
        metavar="NAME|DIR|GGUF",
        help="a shipped model, a model directory or GGUF file, or org/name of the Hugging Face hub "
        f"(default: {default})",
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", default="float32", choices=DTYPES, help="what the model runs in (default: float32)"
    )


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add the options for several hosts; `kvjax.commands.main` starts the hosts before the command."""
    group = parser.add_argument_group(
        "several hosts", "the same command on each; where each of them prints is of the first alone"
    )
    group.add_argument(
        "--hosts",
        metavar="auto|ADDRESS:PORT",
        help="where they meet: auto, where Slurm, Cloud TPU, GKE or Open MPI says it, or an address of the "
        "first one with a free port (default: $KVJAX_HOSTS)",
    )
    group.add_argument("--processes", type=whole(1), metavar="N", help="how many (default: $KVJAX_PROCESSES)")
    group.add_argument(
        "--process", type=whole(0), metavar="I", help="this one's number, from 0 (default: $KVJAX_PROCESS)"
    )
    group.add_argument(
        "--wait", type=whole(1), default=300, metavar="SECONDS", help="for all of them (default: 300)"
    )


def add_overwrite(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--overwrite", action="store_true", help=f"replace {what}")


def add_refused(parser: argparse.ArgumentParser, name: str, why: str) -> None:
    """Accept an option that other commands have, to explain why this one does not have it."""

    def refused(_: str) -> None:
        raise argparse.ArgumentTypeError(why)

    parser.add_argument(name, type=refused, help=argparse.SUPPRESS)


def add_mesh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mesh", metavar="AXES", help="split the model over devices, as data=2,model=4 (default: one device)"
    )
    parser.add_argument(
        "--rules", choices=PRESETS_OF_RULES, help="how to split it over --mesh (default: tensor)"
    )


def mesh_options(args: argparse.Namespace) -> dict[str, Any]:
    """Build `kvjax.load` arguments from `add_mesh`'s options. InputError for rules without a mesh."""
    if args.mesh is None:
        if args.rules is not None:
            raise InputError(f"--rules {args.rules} was given without --mesh: add --mesh data=2,model=4")
        return {}
    return {"mesh": args.mesh, "rules": args.rules or "tensor"}


def whole(least: int) -> Callable[[str], int]:
    """Parse an argument that is a whole number from `least` up."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"expected a whole number >= {least}, got {text!r}")
        return value

    return read

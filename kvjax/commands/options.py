"""Options that several subcommands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable

# `kvjax.mesh.rules.PRESETS`, which `--help` should not wait for.
PRESETS_OF_RULES = ("single", "batch", "tensor", "sequence", "tensor+sequence", "expert", "fsdp")
DTYPES = ("float32", "bfloat16", "float16")
# Tokens in the caches that `inspect` sizes, where the model could hold more and nothing was asked for.
LONGEST_DEFAULT = 8192


def add_model(parser: argparse.ArgumentParser, default: str = "recall-tiny") -> None:
    parser.add_argument(
        "--model",
        default=default,
        metavar="NAME|DIR",
        help=f"a shipped model, a model directory, or org/name of the Hugging Face hub (default: {default})",
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", default="float32", choices=DTYPES, help="what the model runs in (default: float32)"
    )


def whole(least: int) -> Callable[[str], int]:
    """An argument that is a whole number from `least` up."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"expected a whole number >= {least}, got {text!r}")
        return value

    return read

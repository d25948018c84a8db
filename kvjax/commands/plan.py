"""`kvjax plan`: whether a model and its caches fit on many devices, and the time of a step there."""

from __future__ import annotations

import argparse
import re

from kvjax.commands.options import DTYPES, whole

HELP = "say whether a model and its caches fit many devices, and what a step costs there; no device is needed"
EXAMPLE = """examples:
  kvjax plan --model llama-3-70b --context 1M --batch 8 --topology v5p:4x4x4
  kvjax plan --model llama-3-70b --context 128k --batch 16 --topology v6e:4x4 --method kivi:bits=4
  kvjax plan --model deepseek-v3 --context 1M --topology v5p:4x4x4 --preset tensor --mesh data=2,model=32
  kvjax plan --model path/to/model --context 128k --topology h100:8 --no-compile --picture fits.png"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model", metavar="NAME|DIR", default="llama-3-8b",
        help="a model by name (--list), or a directory with a config.json (default: %(default)s)",
    )  # fmt: skip
    add(
        "--context",
        type=_tokens,
        default="128k",
        metavar="N",
        help="tokens per row, as 128k or 1M (default: %(default)s)",
    )
    add("--batch", type=whole(1), default=1, metavar="N", help="rows (default: %(default)s)")
    add(
        "--topology", default="v5e:4x4", metavar="NAME",
        help="v5e:4x4, v5e:16x16, v5p:4x4x4, v6e:4x4, tpu7x:2x2x1, h100:8, or another shape "
        "(default: %(default)s)",
    )  # fmt: skip
    add(
        "--method", action="append", metavar="SPEC",
        help="whose cache, as in `kvjax compare` (default: full); give it again for more",
    )  # fmt: skip
    add(
        "--rules", "--preset", dest="preset", default="auto", metavar="NAME",
        help="how arrays are split: single, batch, tensor, sequence, tensor+sequence, expert, fsdp, or auto, "
        "one of tensor and tensor+sequence (default: auto)",
    )  # fmt: skip
    add(
        "--mesh",
        metavar="AXIS=N,...",
        help="the mesh, as in data=2,model=8 (default: what leaves least on a device)",
    )
    add(
        "--rule", action="append", default=[], metavar="AXIS=MESH_AXIS",
        help="split a logical axis otherwise than the preset does, as in slots=model or vocab=none",
    )  # fmt: skip
    add("--dtype", default="bfloat16", choices=DTYPES, help="of weights and caches (default: %(default)s)")
    add(
        "--chunk", type=whole(0), default=512, metavar="N",
        help="tokens of the prefill's chunk that is compiled, 0 for none (default: %(default)s)",
    )  # fmt: skip
    add("--no-compile", action="store_true", help="sizes alone, which take seconds")
    add("--no-largest", action="store_true", help="do not look for the largest batch and context")
    add("--json", metavar="FILE", help="write everything that was found to FILE")
    add(
        "--picture",
        metavar="FILE.png",
        help="draw the batch that fits against the context, one line per method",
    )
    add("--list", action="store_true", help="print the names of the models and stop")


def run(args: argparse.Namespace) -> int:
    """Plan, and return the exit code: 1 if something does not fit, or did not compile."""
    import jax

    # Only child processes compile. Here, libtpu would only print at length that it finds no TPU.
    jax.config.update("jax_platforms", "cpu")
    from kvjax.commands.plan_report import list_models, plan_all

    return list_models() if args.list else plan_all(args)


def _tokens(text: str) -> int:
    """Parse a number of tokens: 131072, 128k or 1M; k is 1024."""
    found = re.fullmatch(r"(\d+)([kKmM]?)", text)
    count = int(found[1]) * {"": 1, "k": 2**10, "m": 2**20}[found[2].lower()] if found else 0
    if count < 2:
        raise argparse.ArgumentTypeError(f"expected tokens such as 131072, 128k or 1M, got {text!r}")
    return count

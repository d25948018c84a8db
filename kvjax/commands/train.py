"""`kvjax train`: trains a decoder from a gin file's settings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.commands.options import add_hosts
from kvjax.commands.programs import keep_programs

if TYPE_CHECKING:
    from kvjax.train.settings import Training

HELP = "train a decoder as a gin file says, and go on with a run that was cut"
EXAMPLE = """examples:
  kvjax train --gin bytes --out runs/bytes
  kvjax train --gin bytes --set train.steps=200 model.kv_heads=1 --out runs/mqa
  kvjax train --gin mine.gin --out runs/mine --resume
  kvjax train --gin more.gin --set model.start=runs/bytes/model --out runs/more
  kvjax train --gin bytes --set devices.mesh=data=16 devices.rules=fsdp --out runs/bytes --hosts auto
  kvjax compare --model runs/bytes/model --text book.txt"""


def add_arguments(parser: argparse.ArgumentParser, gin: str | None = None) -> None:
    usual = "" if gin is None else f" (default: {gin})"
    parser.add_argument(
        "--gin",
        required=gin is None,
        default=gin,
        metavar="FILE",
        help=f"a .gin file, or a name in configs/train{usual}",
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="SECTION.NAME=VALUE", help="settings in place of the file's"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder of the run")
    parser.add_argument("--resume", action="store_true", help="go on with the run that the folder holds")
    add_hosts(parser)


def run(args: argparse.Namespace) -> None:
    from kvjax.io.gin_bindings import load_training

    follow(load_training(args.gin, args.set), args)


def follow(bound: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    """Train with a file's settings, in the given folder."""
    from kvjax.commands.terminal import console
    from kvjax.train.data.sources import words_of
    from kvjax.train.loop import train
    from kvjax.train.settings import SECTIONS, check_changes, training

    check_changes(bound, args.set)
    settings = training({"model": {"start": "-", "teacher": "-"}, **{n: bound[n] for n in SECTIONS}})
    keep_programs()
    out = console()
    run = training(bound, words_of(settings.data).vocab)
    model = train(run, args.out, resume=args.resume, console=out)
    out.print(f"{model}: use it as kvjax compare --model {model}{_under(run, model)}", soft_wrap=True)


def _under(run: Training, model: Path) -> str:
    """Return the options under which to compare the model: its training's method, and its memory tokens."""
    if run.loop.method is None:
        return ""
    from kvjax.methods.parse import parse_method, with_file
    from kvjax.train.run_folder import learned_file

    label, build = parse_method(run.loop.method)
    learned = learned_file(model.parent, build().id)
    return f" --methods full {with_file(label, learned) if learned.exists() else label}"

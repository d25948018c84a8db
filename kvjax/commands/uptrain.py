"""`kvjax uptrain`: trains a trained or converted model further, on texts, from a teacher, or both."""

from __future__ import annotations

import argparse

from kvjax.commands import train

HELP = "train on from a converted model, by its texts, by a teacher, or by both"
EXAMPLE = """examples:
  kvjax convert --to gqa:kv_heads=1 runs/bytes/model runs/mqa --text book.txt
  kvjax uptrain runs/mqa --out runs/up
  kvjax uptrain runs/mqa --teacher runs/bytes/model --set train.steps=50 --out runs/taught
  kvjax uptrain runs/mqa --teacher runs/bytes/model \\
    --set train.distil=1.0 train.distil_hidden=1.0 train.distil_attention=1.0 --out runs/distilled
  kvjax uptrain runs/mqa --gin mine.gin --out runs/mine --resume

with a teacher, train.distil of the loss is the divergence from its predictions (1.0: all of it, 0.0: none),
and train.distil_hidden and train.distil_attention weigh the distance from its layers"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a shipped model or a model directory")
    parser.add_argument("--teacher", metavar="MODEL", help="a model from which it learns, too")
    train.add_arguments(parser, gin="uptrain")


def run(args: argparse.Namespace) -> None:
    from kvjax.commands.inspect_model import find_config
    from kvjax.io.gin_bindings import load_training
    from kvjax.train.settings import OF_WORDS

    bound = load_training(args.gin, args.set)
    for name, given in (("start", args.model), ("teacher", args.teacher)):
        if given is not None:
            bound["model"][name] = given
    find_config(args.model)
    if bound["data"].get("kind") not in OF_WORDS:
        bound["data"].setdefault("tokenizer", args.model)
    train.follow(bound, args)

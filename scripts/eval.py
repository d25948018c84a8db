"""Runs a comparison that a gin file describes.

    python -m scripts.eval --gin pilot --out runs/pilot            # a file of configs/eval, by its name
    python -m scripts.eval --gin mine.gin --out runs/mine --resume # goes on with a run that was cut
    python -m scripts.eval --gin pilot --out runs/pilot --minutes 60 # stops in time; --resume goes on

A file binds arguments of `kvjax.compare`, such as `compare.samples = 8`. A file with seeds describes a board,
which runs in shards and skips what docs/real-model-board.jsonl holds (`scripts.studies.board`).
"""

from __future__ import annotations

import argparse
import inspect
import signal
import sys
from pathlib import Path

from kvjax.base.errors import InputError
from kvjax.commands.programs import keep_programs
from kvjax.eval.compare import compare
from kvjax.io.gin_bindings import load_comparison
from scripts.studies import board

NAMES = [
    n for n in inspect.signature(compare).parameters if n not in ("console", "out", "resume", "mesh", "rules")
]


def main(argv: list[str] | None = None) -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--gin", required=True, metavar="NAME|FILE", help="what to compare")
    asked.add_argument("--out", required=True, type=Path, metavar="DIR", help="where results go")
    asked.add_argument("--model", metavar="MODEL", help="in place of the file's")
    asked.add_argument("--resume", action="store_true", help="go on with the run in --out")
    asked.add_argument("--minutes", type=int, metavar="M", help="stop after so many, at a finished unit")
    args = asked.parse_args(argv)
    if args.minutes is not None:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.alarm(60 * args.minutes)
    try:
        given = load_comparison(args.gin, NAMES)
        if args.model is not None:
            given["model"] = args.model
        keep_programs()
        if given.get("seeds"):
            board.run(given, args.out, args.resume)
        else:
            compare(**given, out=args.out, resume=args.resume)
    except InputError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(f"stopped; go on with: python -m scripts.eval --gin {args.gin} --out {args.out} --resume")
    finally:
        signal.alarm(0)


if __name__ == "__main__":
    main()

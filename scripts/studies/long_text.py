"""A text of any length with one record at token 1000: peak memory of the process, and what the model answers.

    python -m scripts.studies.long_text run                 # lengths that the data lacks; an hour
    python -m scripts.studies.long_text run --tokens 20000  # or these
    python -m scripts.studies.long_text --write             # writes the table into docs/how-to/long-texts.md

Every length is read in a process of its own by `kvjax.LongText`; a text is filler of the recall language.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Iterator

import numpy as np

from scripts.docs_tables import DOCS
from scripts.studies.runner import Data, Page, apart, parser, progress

DATA = Data(DOCS / "long-text.json", {"model": "", "rows": {}})
TOKENS = (20_000, 100_000, 1_000_000)
RECORD, AT = "<set> brave otter 17 4 52 <.>", 1000
QUESTION, ANSWER = "<get> brave otter", "17 4 52"
# All keys of a block are its representatives, because a record is rare and nothing after it asks for it.
SIZES = dict(block=16, newest=256, sinks=16, keys=16, blocks=48, chunk=256, text_blocks=0)


def text(tokens: int, record: list[int], seed: int = 0) -> Iterator[int]:
    """`tokens` ids, made as they are read: filler, and the record at token 1000."""
    from kvjax.eval.tasks.recall import BOS, filler

    rng = np.random.default_rng(seed)
    phrases = [filler(rng, 8, []) for _ in range(8)]
    yield BOS
    done = 1
    while done < tokens:
        if done == AT:
            yield from record
            done += len(record)
        take = min(1000 if done > AT else AT - done, tokens - done)
        yield from filler(rng, take, phrases)
        done += take


def measure(model: str, tokens: int) -> dict[str, object]:
    """Measure what one process needs and answers."""
    import kvjax

    made = kvjax.load(model)
    encode = made.tokenizer.encode
    with tempfile.TemporaryDirectory() as folder, kvjax.LongText(made, folder, **SIZES) as long:
        start = time.time()
        long.read(text(tokens, encode(RECORD).ids))
        seconds = time.time() - start
        said = made.tokenizer.decode(long.answer(encode(QUESTION).ids, 3))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return dict(
        tokens=tokens, seconds=round(seconds), peak_mib=round(peak, 1), answer=said, right=said == ANSWER
    )


def main() -> None:
    asked = parser(__doc__, ("run",))
    asked.add_argument("--model", default="recall-small")
    asked.add_argument("--tokens", type=int, nargs="+", help="(default: those that are missing)")
    asked.add_argument("--here", type=int, help=argparse.SUPPRESS)
    args = asked.parse_args()
    if args.here is not None:
        print(json.dumps(measure(args.model, args.here)), flush=True)
    elif args.what == "run":
        run(args.model, args.tokens)
    else:
        PAGE.show(args)


def run(model: str, lengths: list[int] | None = None) -> None:
    """Measure lengths, each in a process of its own, and write each to the data when it is done."""
    known = DATA.read()["rows"]
    for tokens in progress(lengths or [n for n in TOKENS if str(n) not in known]):
        row = apart("scripts.studies.long_text", "--model", model, "--here", str(tokens))
        if row is not None:
            DATA.change(
                lambda data, row=row: data.update(model=model, rows=data["rows"] | {str(row["tokens"]): row})
            )


def table() -> str:
    """Return a row for every length: what memory the process needed, and whether it found the record."""
    lines = ["| tokens | peak memory of the process, MiB | answer from token 1000 |", "|--:|--:|---|"]
    for row in sorted(DATA.read()["rows"].values(), key=lambda row: row["tokens"]):
        said = "right" if row["right"] else f"wrong: {row['answer']}"
        lines.append(f"| {row['tokens']:,} | {row['peak_mib']:.0f} | {said} |")
    return "\n".join(lines)


PAGE = Page("how-to/long-texts.md", {"long texts": table})

if __name__ == "__main__":
    main()

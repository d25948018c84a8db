"""A text of any length with one record at token 1000: peak memory of the process, and what the model answers.

    python -m scripts.studies.long_text --tokens 100000 1000000

Every length is read in a process of its own by `kvjax.LongText`; a text is filler of the recall language.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="recall-small")
    parser.add_argument("--tokens", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--here", action="store_true", help="measure this process")
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measure(args.model, args.tokens[0])), flush=True)
        return
    for tokens in args.tokens:
        own = ["--model", args.model, "--here", "--tokens", str(tokens)]
        subprocess.run([sys.executable, "-m", "scripts.studies.long_text", *own], check=True)


if __name__ == "__main__":
    main()

"""Texts longer than those that a model was trained on: bits per byte, with the full cache and with methods.

    python -m scripts.studies.longer_texts run --out runs/longer
        # trains on rows of 256 bytes, reads 2048
    python -m scripts.studies.longer_texts run --out runs/longer --seed 1   # another model
    python -m scripts.studies.longer_texts                                  # prints the table

A byte model is trained on rows of 256 bytes (`kvjax train --gin bytes-gqa`), and then reads held-out texts:
their first bytes as a prompt under a method, and the others one by one. Results are in
docs/longer-texts.json; `python -m scripts.studies.claims --write` puts them into docs/claims.md.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from scripts.docs_tables import DOCS
from scripts.studies.runner import Data, parser, seeds, train_in

DATA = Data(DOCS / "longer-texts.json")
TRAINED, WINDOWS = 256, 16


class Reading(NamedTuple):
    """A method, the bytes of its prompt, and how many bytes follow one by one."""

    method: str
    prompt: int
    behind: int


# All slots are rotated to positions that the model has seen: 192 slots, or distances up to 256; HOMER's 8
# chunks share the same 80 positions.
READINGS = {
    "streamingllm": Reading("streamingllm:budget=192", TRAINED, 7 * TRAINED),
    "without sinks": Reading("streamingllm:budget=192,sinks=0", TRAINED, 7 * TRAINED),
    "lm-infinite": Reading(f"lm-infinite:budget=192,distance={TRAINED}", TRAINED, 7 * TRAINED),
    "homer": Reading("homer:chunk=80,height=3", 16 + 8 * 80 + 16, TRAINED // 2),
}


def main() -> None:
    asked = parser(__doc__, ("run",), seed="of the model and its data", page=False)
    asked.add_argument("--out", type=Path, metavar="DIR", help="where models lie")
    asked.add_argument("--steps", type=int, default=500, help="of training (default: 500)")
    args = asked.parse_args()
    if args.what is None:
        print(table())
    elif args.out is None:
        asked.error("run needs --out DIR, where models lie")
    else:
        add(args.out, args.seed, args.steps)


def add(out: Path, seed: int, steps: int) -> None:
    """Train a model, read the texts, and add the results to the data."""
    folder = out / str(seed)
    words = ["train", "--gin", "bytes-gqa", "--set", f"train.steps={steps}", *seeds(seed)]
    train_in(folder, words)
    said = {"train": " ".join(["kvjax", *words])} | read(folder)
    DATA.change(lambda found: found.update({str(seed): said}))


def read(folder: Path) -> dict[str, Any]:
    """Measure a model's bits per byte within the length of its training, and beyond it."""
    import kvjax
    from kvjax.eval.run.cellplan import plan_cells
    from kvjax.eval.run.perplexity import stream_text
    from kvjax.models.model import Model
    from kvjax.train.data.texts import is_held_out, read_texts
    from kvjax.train.settings import Data

    model = kvjax.load(str(folder / "model"))
    assert isinstance(model, Model)
    data = Data()
    texts = read_texts(data)
    held = folder / "held-out.txt"
    every = (texts[i] for i in range(len(texts)))
    held.write_text("".join(text for text in every if is_held_out(text, data.held_out)))

    def stream(methods: list[str], prompt: int, behind: int, windows: int = WINDOWS) -> list[dict[str, Any]]:
        entries = plan_cells(model, methods, None, "short")
        chosen = [e for e in entries if e.label not in ("random", "sink-recent")]
        return stream_text(model, chosen, held, length=prompt, steps=behind, windows=windows)

    # As many bytes are scored as beyond that length.
    (within,) = stream(["full"], TRAINED // 2, TRAINED // 2, windows=14 * WINDOWS)
    rows: dict[str, Any] = {"within": {"full": bits(within["full_nll"])}}
    for lengths in dict.fromkeys((prompt, behind) for _, prompt, behind in READINGS.values()):
        names = [name for name, reading in READINGS.items() if reading[1:] == lengths]
        _, *others = stream([READINGS[name].method for name in names], *lengths)
        for name, row in zip(names, others, strict=True):
            difference = {end: bits(row[f"delta_{end}"]) for end in ("nll", "low", "high")}
            rows[name] = {"full": bits(row["full_nll"]), "own": bits(row["nll"]), "difference": difference}
    return rows


def bits(nats: float) -> float:
    return round(nats / math.log(2), 4)


def table() -> str:
    """Markdown: a row per method, a column per model, in bits per byte."""
    models = list(DATA.read().values())

    def each(name: str, of: str) -> str:
        return ", ".join(f"{model[name][of]:.2f}" for model in models)

    lines = ["| method | text | with it | full cache | full cache within 256 bytes |", "|---" * 5 + "|"]
    for name, (method, prompt, behind) in READINGS.items():
        cells = [f"`{method}`", f"{prompt} + {behind}", each(name, "own"), each(name, "full")]
        lines.append(f"| {' | '.join([*cells, each('within', 'full')])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Draws forty docstrings and comments, so that somebody can check that they are understood at first reading.

    python -m scripts.studies.forty --seed 4902

A round: read the texts, not the code; write in other words what each means; then look at the code. If more
than one of the forty was understood wrongly, those are rewritten and the round is repeated with a new seed.
Texts are those of `kvjax`, `models` and `pallas_kernels`: every docstring, and every comment on lines of its
own. The same seed and revision draw the same texts.
"""

from __future__ import annotations

import argparse
import ast
import random
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDERS = ("kvjax", "models", "pallas_kernels")
COUNT = 40


class Text(NamedTuple):
    """A docstring or a comment, with its file, line and the name of what it describes ("#" for comments)."""

    file: str
    line: int
    name: str
    text: str


def texts() -> list[Text]:
    """Return all docstrings and comments, in the order of their files."""
    files = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return [text for path in files for text in _of_file(path)]


def _of_file(path: Path) -> list[Text]:
    source, file = path.read_text(), str(path.relative_to(ROOT))
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (
            text := ast.get_docstring(node)
        ):
            found.append(Text(file, getattr(node, "lineno", 1), getattr(node, "name", "the module"), text))
    comment: list[str] = []
    for number, line in enumerate(source.splitlines(), 1):
        if line.strip().startswith("# "):
            comment.append(line.strip()[2:])
            continue
        if comment and not comment[0].startswith("---"):
            found.append(Text(file, number - len(comment), "#", " ".join(comment)))
        comment = []
    return found


def main() -> None:
    """Print a draw."""
    parser = argparse.ArgumentParser(description="Forty docstrings and comments, drawn by a seed.")
    parser.add_argument(
        "--seed", type=int, required=True, help="which forty; take one that was not used before"
    )
    seed = parser.parse_args().seed
    every = texts()
    for number, text in enumerate(random.Random(seed).sample(every, COUNT), 1):
        print(f"{number}. {text.file}:{text.line} {text.name}\n{text.text}\n")
    print(f"{COUNT} of {len(every)} texts, seed {seed}")


if __name__ == "__main__":
    main()

"""Adds a selection method to a fresh clone, as CONTRIBUTING.md describes, and runs lint and tests there.

    python scripts/add_a_method.py                        # its own row, then the whole plain suite
    python scripts/add_a_method.py tests/methods          # what is named after it goes to pytest
    python scripts/add_a_method.py -k valuenorm -m "not slow" tests

A method is a function and a row in the tests' table, so two files change, and all checks must pass. HEAD is
cloned to a temporary folder with its own environment, which is removed at the end.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]

FUNCTION = '''
@paper(
    "Attention Score is not All You Need for Token Importance Indicator in KV Cache Reduction: "
    "Value Also Matters",
    arxiv="2406.12335",
    family="selection-static",
    exact="deviates",
)
def valuenorm(budget: Amount) -> Method:
    """Value norms (Guo et al., 2024, arXiv:2406.12335): keeps the slots of the largest ||v_j||_1.

    Deviation: the paper multiplies them by attention.
    """
    return Method(Keep(ValueNorm(), Budget(budget), Uniform()))
'''
ROW = """    row(
        "valuenorm", dense(half),
        kept=each_layer(lambda prompt, layer: np.abs(prompt.v[layer]).sum(-1)),
    ),
"""
SCORE = "from kvjax.keep.scores.score import ValueNorm\n"
# (file, text before which the addition is inserted, the addition)
EDITS = (
    ("kvjax/methods/selection_static_keys.py", "", FUNCTION),
    ("kvjax/methods/selection_static_keys.py", "from kvjax.keep.scores.score", SCORE),
    ("tests/methods/table_selection.py", '    row(\n        "sepllm"', ROW),
)


def add(clone: Path) -> list[str]:
    """Writes the function and the row; returns the files that changed."""
    for name, before, text in EDITS:
        file = clone / name
        old = file.read_text()
        head, mark, tail = old.partition(before) if before else (old.rstrip() + "\n\n", "", "")
        assert mark == before, f"{name} has no {before!r} any more: say in EDITS where the text goes"
        file.write_text(head + text + mark + tail)
    return git(clone, "diff", "--name-only").split()


def git(clone: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=clone, check=True, capture_output=True, text=True).stdout


def main(words: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        clone, python = Path(folder) / "clone", Path(folder) / "env" / "bin" / "python"
        git(ROOT, "clone", "--quiet", str(ROOT), str(clone))
        changed = add(clone)
        venv.create(Path(folder) / "env", with_pip=True)
        commands = (
            ["pip", "install", "--quiet", "-e", ".[dev]"],
            ["ruff", "check", "--fix", "--quiet", *changed],
            ["ruff", "format", "--check", *changed],
            # A new row takes turns with the others, so it is asked for by name.
            ["pytest", "-q", "-k", "valuenorm", "-m", "not slow and not tpu", "tests/methods"],
            ["pytest", "-q", *words],
        )
        for command in commands:
            print("$", *command, flush=True)
            if code := subprocess.run([python, "-m", *command], cwd=clone).returncode:
                return code
        print(git(clone, "diff", "--stat"), end="")
        return int(len(changed) != 2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Plants faults in a copy of the tree, one at a time, and says which test of the plain suite finds each.

    python scripts/mutants.py                   all of them
    python scripts/mutants.py --only kivi       those whose name has this in it
    python scripts/mutants.py --targeted        all, but none of the tests that are not said to find them
    python scripts/mutants.py --write           all, and their table into CONTRIBUTING.md

Some of the faults have occurred in the library; the others are invented. The tests that should find a fault
run first; the whole plain suite runs only if they do not find it, and never with `--targeted`. The exit
status is 1 if a fault is not found.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- mutants: written by scripts/mutants.py --write -->", "<!-- end of mutants -->"
# The layout of the wheel, so that the copy is imported and nothing else.
INSIDE = ("models", "pallas_kernels", "configs")


class Mutant(NamedTuple):
    """A fault: the only occurrence of `old` in `file` becomes `new`; `tests` should find it.

    made: whether it has occurred in the library.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    made: bool = False


METHODS = "tests/methods/test_sentences.py tests/methods/test_battery.py"
TALKS = "tests/methods/test_battery.py::"
MUTANTS = [
    Mutant(
        "a wrong sign in a score", "kvjax/keep/scores/score.py",
        "return -jnp.linalg.norm(view.k", "return jnp.linalg.norm(view.k", METHODS,
    ),
    Mutant(
        "an off-by-one in a budget", "kvjax/grammar/sentence.py",
        "return jnp.maximum(1, length * self.ratio.numerator // self.ratio.denominator)",
        "return jnp.maximum(1, length * self.ratio.numerator // self.ratio.denominator - 1)", METHODS,
    ),
    Mutant(
        "a companion's influence on a budget", "kvjax/compress/select.py",
        "gm.keep.score\n    n = keep.budget.count(length)\n",
        "gm.keep.score\n    n = keep.budget.count(jnp.full_like(length, length.max()))\n",
        METHODS,
    ),
    Mutant(
        "a trace forgotten between turns", "kvjax/compress/select.py",
        "traces=grown(gm.traces, w.traces, seen)",
        "traces=w.traces",
        TALKS + "test_a_second_turn_keeps_what_both_turns_attended_to",
    ),
    Mutant(
        "a rotation one position late", "kvjax/grammar/phase.py",
        "queries, *keys = older(held, asked, *each)",
        "queries, *keys = older(held, asked + 1, *each)", METHODS,
    ),
    Mutant(
        "a byte count without scales", "kvjax/state/cache.py",
        "itemsize for x in leaves)", "itemsize for x in leaves if x.dtype != np.uint32)", METHODS,
    ),
    Mutant(
        "KIVI's residual off by one", "kvjax/compress/segments.py",
        "moved = jnp.maximum(count - gm.residual, 0) // g",
        "moved = jnp.maximum(count - gm.residual - 1, 0) // g",
        TALKS + "test_steps_attend_then_evict_what_the_method_says",
    ),
    Mutant(
        "Quest reads one page more", "kvjax/read/pages.py",
        "wanted = jnp.minimum(full, -(-self", "wanted = jnp.minimum(full, 1 - (-self",
        "tests/kernels/test_page_scores.py",
    ),
    Mutant(
        "sums keep the values of slots that left", "kvjax/compress/summaries.py",
        "_added(body.sums[n], -x, layer)", "_added(body.sums[n], 0 * x, layer)",
        "tests/read/test_leaving.py",
    ),
    Mutant(
        "codes without their zero", "kvjax/store/affine.py",
        "(rows * scale + zero).astype(dtype)", "(rows * scale).astype(dtype)", "tests/store " + METHODS,
    ),
    Mutant(
        "merged slots forget how many they are", "kvjax/keep/merges/merge.py",
        "bias=jnp.where(grown, log_p, bias),", "bias=bias,", METHODS + " tests/methods/test_golden.py",
    ),
    Mutant(
        "the observation window scores itself", "kvjax/keep/scores/score.py",
        "    hide_window: bool = True", "    hide_window: bool = False", METHODS,
    ),
    Mutant(
        "a row that ended in an earlier chunk is compressed again", "kvjax/steps/prefilling/settle.py",
        "kept = {i: jnp.where(idle[None, :, None, None], before[i], stay) for i, stay in kept.items()}",
        "kept = {i: stay for i, stay in kept.items()}",
        "tests/state/test_cache.py::test_a_row_without_new_tokens_stays_as_it_is_when_others_are_compressed",
        made=True,
    ),
    Mutant(
        "a sliding window one token wide of its mark", "kvjax/ops/attention/union.py",
        "seen & (k > q - window)", "seen & (k >= q - window)", "tests/ops/test_attention.py " + METHODS,
    ),
    Mutant(
        "evicting drops the newest of all slots", "kvjax/compress/selection.py",
        "worst = _lowest(jnp.where(live, score, jnp.inf), pos)[..., None]",
        "worst = pos.max(-1, keepdims=True)",
        TALKS + "test_steps_attend_then_evict_what_the_method_says",
    ),
    Mutant(
        "a token that is asked again is written", "kvjax/steps/decoding/append.py",
        "entering = jnp.where(token.append, token.at, -1)", "entering = token.at", METHODS,
    ),
    Mutant(
        "Ada-KV's floor is not blended", "kvjax/keep/budgets/budget.py",
        "count = _blend(count, n, self.floor)", "count = _blend(count, n, 0.0)", METHODS,
    ),
    Mutant(
        "a token asked again reads one level of too few tokens", "models/mixers/log_linear.py",
        "before = memory.pos[:, 0] + (~mask[:, 0]).astype(jnp.int32)", "before = memory.pos[:, 0]",
        "tests/kernels/test_decoder.py tests/models/test_architectures.py", made=True,
    ),
    Mutant(
        "a cache that evicts does not grow with its rows", "kvjax/compress/capacity.py",
        "jnp.where(empty > 0, due if gm.split else jnp.maximum(due, empty), 0)",
        "jnp.full_like(cache.next, 2**30)",
        "tests/state/test_cache.py::test_a_cache_that_evicts_holds_every_new_token_or_says_that_it_is_full",
        made=True,
    ),
    Mutant(
        "a consumed cache is taken again", "kvjax/state/cache.py",
        "not isinstance(at, Tracer) and at.is_deleted()", "not isinstance(at, Tracer) and False",
        "tests/state/test_cache.py::test_a_consumed_cache_is_refused_by_everything_that_would_read_it",
        made=True,
    ),
]  # fmt: skip


def copied(folder: Path) -> None:
    """Copy the tree without its history, laid out as in the wheel."""
    shutil.copytree(
        ROOT, folder, ignore=shutil.ignore_patterns(".git", "*.egg-info", "__pycache__", ".venv", "build")
    )
    for room in INSIDE:
        shutil.move(folder / room, folder / "kvjax" / room)
        (folder / room).symlink_to(folder / "kvjax" / room)


def killer(mutant: Mutant, folder: Path, targeted: bool) -> str | None:
    """Find the first test that fails with the fault planted in the copy; None if no test finds it."""
    file = folder / mutant.file
    text = file.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(
            f"{mutant.name}: {mutant.file} has {mutant.old!r} {text.count(mutant.old)} times, expected once: "
            "the code has changed, and scripts/mutants.py must plant this fault where it lies now"
        )
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        found = first_failure(folder, mutant.tests.split())
        return found if found or targeted else first_failure(folder, [])
    finally:
        file.write_text(text)


def first_failure(folder: Path, tests: list[str]) -> str | None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-n",
        "0",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    out = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if out.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+(?:\[[^\]]*\])?)", out.stdout, re.M)
    if found is None:
        raise SystemExit(
            f"pytest ended with {out.returncode} and named no test:\n{out.stdout[-2000:]}{out.stderr[-2000:]}"
        )
    return found[1]


def table(rows: list[tuple[Mutant, str | None]]) -> str:
    lines = ["| fault | where | found by |", "|---|---|---|"]
    for mutant, test in rows:
        name = mutant.name + (" (occurred before)" if mutant.made else "")
        lines.append(f"| {name} | `{mutant.file}` | {f'`{test}`' if test else '**nothing**'} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose name has this in it")
    parser.add_argument("--targeted", action="store_true", help="never run the whole plain suite")
    parser.add_argument("--write", action="store_true", help="write the table into CONTRIBUTING.md")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if options.only.lower() in m.name.lower()]
    if not chosen:
        parser.error(
            f"no fault has {options.only!r} in its name; there are: {'; '.join(m.name for m in MUTANTS)}"
        )
    if options.write and options.only:
        parser.error("--write needs all faults: leave --only out")
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "kvjax"
        copied(folder)
        rows = []
        for mutant in track(chosen, "faults", console=console):
            rows.append((mutant, killer(mutant, folder, options.targeted)))
            console.print(f"{mutant.name}: {rows[-1][1] or 'lives'}", markup=False, highlight=False)
    print(table(rows))
    if options.write:
        before, rest = PAGE.read_text().split(BEGIN)
        _, after = rest.split(END)
        PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")
    return int(any(test is None for _, test in rows))


if __name__ == "__main__":
    sys.exit(main())

"""Counts how many functions and files of kvjax one call enters while JAX traces it.

    python -m scripts.studies.trips                 # counts, call by call
    python -m scripts.studies.trips --list h2o-step # the functions of one call, file by file

So many functions and files must be read to follow the call. Counted are distinct functions of kvjax, its
models and its kernels, on a model of four layers whose programs are not compiled yet, each call in a process
of its own. Lambdas, comprehensions and generated methods of dataclasses are not counted.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import kvjax

HOMES = tuple(f"{Path(kvjax.__file__).parents[1] / name}/" for name in ("kvjax", "models", "pallas_kernels"))
PROMPT = [list(range(1, 97))]
Call = Callable[[Any], Any]


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--list", choices=CALLS, metavar="CALL", help=f"one of {', '.join(CALLS)}")
    args = asked.parse_args()
    if args.list is not None:
        for file, names in sorted(files_of(args.list).items()):
            print(f"{file}: {', '.join(sorted(names))}")
        return
    print("| call | functions | files |\n|---|---|---|")
    for name in CALLS:
        # What an earlier call has cached would not be entered again.
        with ProcessPoolExecutor(1, get_context("spawn")) as apart:
            found = apart.submit(files_of, name).result()
        print(f"| {name} | {sum(map(len, found.values()))} | {len(found)} |", flush=True)


def files_of(name: str) -> dict[str, set[str]]:
    """`by_file` of a call by its name."""
    return by_file(counted(name))


def named(text: str) -> tuple[Call, Call]:
    """Return the preparation, and the call that is counted: building a method of its text."""
    return lambda model: model, lambda _: kvjax.method(text)


def prefill(text: str) -> tuple[Call, Call]:
    """Return the same for reading and compressing a prompt, given the method."""

    def first(model: Any) -> Any:
        return model, kvjax.method(text)

    return first, lambda held: kvjax.prefill(held[0], PROMPT, method=held[1], room=8)


def step(method: str) -> tuple[Call, Call]:
    """Return the same for one decode step after a prompt."""

    def first(model: Any) -> Any:
        return model, kvjax.prefill(model, PROMPT, method=method, room=8)[1]

    return first, lambda held: kvjax.step(held[0], held[1], [5])


SNAPKV = "snapkv(budget=0.5, window=8)"
CALLS = {
    "snapkv-method": named(SNAPKV),
    "full-prefill": prefill("full"),
    "snapkv-prefill": prefill(SNAPKV),
    "kvzip-prefill": prefill("kvzip(budget=0.5)"),
    "full-step": step("full"),
    "h2o-step": step("h2o(budget=0.5)"),
    "kivi-step": step("kivi"),
    "adakv-int4-step": step("adakv(budget=0.5, window=8) + int4"),
}


def counted(name: str) -> set[CodeType]:
    """Collect the functions that a call enters, with all compiled programs cleared before."""
    import jax

    jax.clear_caches()
    before, call = CALLS[name]
    held = before(kvjax.load("recall-tiny"))
    with entered() as found:
        call(held)
    return found


@contextmanager
def entered() -> Iterator[set[CodeType]]:
    """Collect the functions of kvjax that are entered inside the block."""
    found: set[CodeType] = set()

    def see(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and not code.co_name.startswith("<") and code.co_filename.startswith(HOMES):
            found.add(code)

    sys.setprofile(see)
    try:
        yield found
    finally:
        sys.setprofile(None)


def by_file(found: set[CodeType]) -> dict[str, set[str]]:
    """Group the functions by the file they stand in."""
    out = defaultdict(set)
    for code in found:
        out[code.co_filename.removeprefix(str(Path(kvjax.__file__).parents[1]) + "/")].add(code.co_qualname)
    return dict(out)


if __name__ == "__main__":
    main()

"""How many pairs of methods with different parts can be chained, and why the others cannot.

    python -m scripts.studies.method_pairs                # the tables
    python -m scripts.studies.method_pairs --why WORDS    # pairs refused for a reason with these words
    python -m scripts.studies.method_pairs --write        # the tables into docs/pairs.md

Methods have a budget of 0.5, if they take one, and their defaults; nothing is run.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from scripts.docs_tables import write_table

VERBS = ("keep", "store", "read", "reread", "make", "stack", "host")
# How many pairs could be chained when incompatible pairs were listed one by one.
BEFORE = {
    "keep x store": 787,
    "keep x read": 168,
    "keep x reread": 0,
    "keep x make": 352,
    "store x read": 72,
    "keep x host": 30,
    "keep x stack": 0,
    "keep x read and host": 0,
    "store x reread": 74,
    "keep and store x read": 0,
    "read x reread": 54,
    "store x make": 52,
    "read x host": 5,
    "all": 1722,
}


# The ids of the first 132 methods; by name the verbs of their pairs, and how many are to be built at least.
FIRST = Path(__file__).parents[2] / "tests/fixtures/first_methods.txt"
AIMS = {
    "keep x store": ({"keep x store"}, 1050),
    "keep x host": ({"keep x host"}, 89),
    "GemFilter before a keep": ({"keep x reread"}, 89),
    "keep x read": ({"keep x read", "keep x read and host"}, 600),
    "store x read": ({"store x read", "store x read and host"}, 110),
}


class Pair(NamedTuple):
    """Two methods, the parts (verbs) that they have, and why they are refused; "" if they can be chained."""

    first: str
    second: str
    verbs: str
    why: str


def pairs(ids: Collection[str] | None = None) -> Iterator[Pair]:
    """Return every pair of methods that have no part in common and at least one each.

    ids: of these methods; None for all of the library.
    """
    import kvjax
    from kvjax.methods.registry import METHODS, takes_budget

    built = {
        id: kvjax.method(id, **({"budget": 0.5} if takes_budget(id) else {}))
        for id in METHODS
        if ids is None or id in ids
    }
    verbs = {id: [v for v in VERBS if getattr(m, v) is not None] for id, m in built.items()}
    for a, b in itertools.combinations([id for id in built if verbs[id]], 2):
        if {*verbs[a]} & {*verbs[b]}:
            continue
        try:
            kvjax.chain(built[a], built[b])
            why = ""
        except ValueError as error:
            why = reason(str(error))
        yield Pair(a, b, _called(verbs[a], verbs[b]), why)


def _called(a: list[str], b: list[str]) -> str:
    """Order the parts of two methods in a way that does not depend on which method is first.

    >>> _called(["store"], ["keep"])
    'keep x store'
    """
    first, second = sorted((a, b), key=lambda verbs: VERBS.index(verbs[0]))
    return f"{' and '.join(first)} x {' and '.join(second)}"


def reason(message: str) -> str:
    """Cut a message to its first clause, with the names of words and the numbers left out.

    >>> reason("quest + h2o cannot work: the pages of PageBounds(page=16) (16 tokens) lie: use int8")
    'the pages of ... (n tokens) lie'
    """
    text = message.split(" cannot work: ")[-1]
    text = re.sub(r"\((\d+, )*\d+,?\)", "...", text)
    while (shorter := re.sub(r"\w+\([^()]*\)", "...", text)) != text:
        text = shorter
    return re.sub(r"\d+", "n", text.split(": ")[0])


def table(found: list[Pair]) -> str:
    """How many pairs can be chained, by their parts, and the most frequent reasons for refusals."""
    total, refused = Counter(p.verbs for p in found), Counter(p.verbs for p in found if p.why)
    total["all"], refused["all"] = len(found), sum(refused.values())
    lines = ["| verbs | pairs | built before | built | refused |", "|---|---|---|---|---|"]
    for verbs, before in BEFORE.items():
        built = total[verbs] - refused[verbs]
        lines.append(f"| {verbs} | {total[verbs]} | {before} | {built} | {refused[verbs]} |")
    lines += ["", "| refused | why |", "|---|---|"]
    lines += [f"| {n} | {why} |" for why, n in Counter(p.why for p in found if p.why).most_common(24)]
    return "\n".join(lines)


def first_pairs() -> dict[str, tuple[int, int, int]]:
    """Count the pairs of the first 132 methods: by name those that are built, all, and the aim."""
    found, out = [*pairs(FIRST.read_text().split())], {}
    for name, (verbs, aim) in AIMS.items():
        some = [p for p in found if p.verbs in verbs]
        some = [p for p in some if "gemfilter" in p[:2]] if "GemFilter" in name else some
        out[name] = sum(not p.why for p in some), len(some), aim
    return out | {"all": (sum(not p.why for p in found), len(found), 0)}


def first_table(counts: dict[str, tuple[int, int, int]]) -> str:
    """How many of the pairs of the first 132 methods are built, beside the aims."""
    lines = ["| of the first 132 methods | pairs | aim | built |", "|---|---|---|---|"]
    lines += [f"| {name} | {n} | {aim or '-'} | {built} |" for name, (built, n, aim) in counts.items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the tables into docs/pairs.md")
    parser.add_argument("--why", help="list the pairs whose reason has these words")
    args = parser.parse_args(argv)
    found = list(pairs())
    if args.why is not None:
        for pair in found:
            if pair.why and args.why in pair.why:
                print(f"{pair.verbs:24} {pair.first} + {pair.second}: {pair.why}")
    elif args.write:
        write_table("pairs.md", "pairs", table(found))
        write_table("pairs.md", "first pairs", first_table(first_pairs()))
    else:
        print(table(found), first_table(first_pairs()), sep="\n\n")


if __name__ == "__main__":
    main()

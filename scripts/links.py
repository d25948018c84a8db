"""External addresses and arXiv ids of this repository.

python scripts/links.py                      # lists them, with the files, and those that are malformed
python scripts/links.py --ask                # asks every address whether it answers; needs a network
python scripts/links.py --catalogue FILE     # compares arXiv ids of methods: a TSV with id and arxiv
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import sys
import urllib.request
from datetime import date
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[1]
KINDS = ("*.md", "*.py", "*.toml", "*.ipynb")
ADDRESS = re.compile(r"https?://[^\s<>()\[\]{}\"'`\\|,]+")
ARXIV = re.compile(r"\barxiv(?:\.org/(?:abs|pdf)/|:\s*|=\")(\d[\w.]*)", re.IGNORECASE)
# Examples, and addresses of this machine; tests have made-up ones.
OURS = re.compile(r"https?://(?:\.\.\.|127\.0\.0\.1|localhost|example\.(?:org|com)|[\w.-]*\.test\b)")
FIRST = date(2007, 4, 1)  # of arXiv's ids in this form


def found(text: str) -> tuple[set[str], set[str]]:
    """Find the external addresses of a text, and its arXiv ids.

    >>> found("see https://github.com/NVIDIA/kvpress. Not https://..., and arXiv:2404.14469.")
    ({'https://github.com/NVIDIA/kvpress'}, {'2404.14469'})
    """
    addresses = {a.rstrip(".;:") for a in ADDRESS.findall(text) if not OURS.match(a)}
    # Of an address that code completes, only the beginning stands there.
    whole = {a for a in addresses if urlsplit(a).netloc and not a.endswith("/abs/")}
    return whole, {one.rstrip(".") for one in ARXIV.findall(text)}


def wrong_id(arxiv: str) -> str:
    """Why this is no arXiv id of the present form, or "".

    >>> wrong_id("2404.14469"), wrong_id("2413.14469")
    ('', 'month 13')
    """
    parts = re.fullmatch(r"(\d\d)(\d\d)\.(\d{4,5})(?:v\d+)?", arxiv)
    if parts is None:
        return "expected YYMM.NNNNN"
    year, month = 2000 + int(parts[1]), int(parts[2])
    if not 1 <= month <= 12:
        return f"month {month}"
    if not FIRST <= date(year, month, 1) <= date.today():
        return f"of {year}-{month:02}"
    wanted = 5 if year >= 2015 else 4
    return "" if len(parts[3]) == wanted else f"expected {wanted} digits after the point"


def wrong_address(address: str) -> str:
    """Why this is no address that can be asked for, or "".

    >>> wrong_address("https://github.com/NVIDIA/kvpress"), wrong_address("github.com/NVIDIA")
    ('', 'no host')
    """
    host = urlsplit(address).netloc
    if not re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", host, re.IGNORECASE):
        return "no host"
    return "" if address.startswith("https://") else "not https"


def everywhere() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return all addresses and all arXiv ids of files of this repository, each with its files."""
    addresses: dict[str, list[str]] = {}
    ids: dict[str, list[str]] = {}
    names = subprocess.run(
        ["git", "ls-files", "--", *KINDS, ":!tests"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()
    for name in names:
        for known, one in zip((addresses, ids), found((ROOT / name).read_text()), strict=True):
            for each in one:
                known.setdefault(each, []).append(name)
    return addresses, ids


def malformed() -> list[str]:
    """Write a line for every malformed address or arXiv id."""
    addresses, ids = everywhere()
    lines = [
        f"{a} ({why}): {', '.join(files)}" for a, files in addresses.items() if (why := wrong_address(a))
    ]
    return lines + [
        f"arXiv:{i} ({why}): {', '.join(files)}" for i, files in ids.items() if (why := wrong_id(i))
    ]


def silent(addresses: list[str]) -> list[str]:
    """Write a line for every address that does not answer."""
    lines = []
    for address in addresses:
        request = urllib.request.Request(address, method="HEAD", headers={"User-Agent": "kvjax-links"})
        try:
            urllib.request.urlopen(request, timeout=20).close()
        except OSError as error:
            lines.append(f"{address}: {error}")
    return lines


def other(catalogue: Path) -> list[str]:
    """Write a line for every method whose arXiv id is another in the catalogue."""
    sys.path.insert(0, str(ROOT))
    from kvjax.methods import METHODS

    with open(catalogue, newline="") as file:
        theirs = {row["id"]: row["arxiv"] for row in csv.DictReader(file, delimiter="\t")}
    ours = {id: made.paper.arxiv for id, made in METHODS.items()}
    return [
        f"{id}: {a} here, {theirs[id]} there" for id, a in ours.items() if theirs.get(id, a) not in ("", a)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ask", action="store_true", help="ask every address, too")
    parser.add_argument("--catalogue", type=Path, metavar="FILE", help="compare arXiv ids of methods with it")
    args = parser.parse_args()
    addresses, ids = everywhere()
    bad = malformed()
    if args.ask:
        bad += silent(sorted(addresses))
    elif args.catalogue is not None:
        bad += other(args.catalogue)
    else:
        for address, files in sorted(addresses.items()):
            print(f"{address}  {', '.join(files)}")
    print(f"{len(addresses)} addresses, {len(ids)} arXiv ids, {len(bad)} wrong")
    if bad:
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()

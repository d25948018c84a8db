"""Pages of the documentation that are generated from the code when the site is built.

`docs/conf.py` calls `write`; nothing that it writes is committed:

    reference/methods/        a card of every method, a page per family, and a table of all
    reference/architectures.md
    reference/api/            the public functions and classes, from their docstrings
    reference/commands.md     `kvjax COMMAND --help`
    notebooks/                the notebooks of the repository
"""

from __future__ import annotations

from pathlib import Path

from scripts.site import api, architectures, commands, methods

ROOT = Path(__file__).parents[2]


def write(docs: Path) -> None:
    """Write all generated pages below the folder of the site's sources."""
    reference = docs / "reference"
    index = reference / "methods" / "index.md"
    if not index.exists() or index.stat().st_mtime < _newest_source():
        for name, text in methods.pages().items():
            _put(reference / "methods" / f"{name}.md", text)
        index.touch()
    _put(reference / "architectures.md", architectures.page())
    _put(reference / "commands.md", commands.page())
    for name, text in api.pages().items():
        _put(reference / "api" / f"{name}.md", text)
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        _put(docs / "notebooks" / notebook.name, notebook.read_text())


def _put(path: Path, text: str) -> None:
    """Write a page unless it exists with this text, so that Sphinx reads only pages that changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _newest_source() -> float:
    """When code from which cards are made was last changed."""
    folders = (ROOT / "kvjax", ROOT / "models", Path(__file__).parent)
    return max(path.stat().st_mtime for folder in folders for path in folder.rglob("*.py"))

"""Which kvjax ran: the git revision of its checkout, or the version of the package."""

from __future__ import annotations

import subprocess
from pathlib import Path

import kvjax


def revision(package: Path | None = None) -> str:
    """Return the checkout's revision, marked if it has changes; outside kvjax' own checkout, its version.

    package: the folder of the package. A repository that only surrounds an installation says nothing of it.
    """
    here = (package or Path(kvjax.__file__).parent).resolve()
    top = _git(here, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != here.parent or not _is_ours(here.parent / "pyproject.toml"):
        return kvjax.__version__
    return _git(here, "describe", "--always", "--dirty", "--abbrev=12") or kvjax.__version__


def _is_ours(project: Path) -> bool:
    return project.is_file() and 'name = "kvjax"' in project.read_text(encoding="utf-8").splitlines()


def _git(folder: Path, *command: str) -> str | None:
    """Git's output for a folder; None if there is no git, no repository or no commit."""
    ask = ["git", "-C", str(folder), *command]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None

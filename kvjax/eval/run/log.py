"""The log of a run: one JSON line per finished unit, so that a killed run goes on where it stopped.

A line is whole or it does not count: a torn last line, the mark of a kill, is dropped on resume.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kvjax.errors import InputError
from kvjax.files import write_atomic


class UnitLog:
    """Finished units of a run under `folder`, by key; appended to as they come."""

    def __init__(self, folder: Path, settings: dict[str, Any], resume: bool):
        self.path = folder / "units.jsonl"
        self.done: dict[str, dict[str, Any]] = {}
        text = json.dumps(settings, indent=1, sort_keys=True)
        known = _prepare(folder, resume)
        if known is None:
            write_atomic(folder / "settings.json", text.encode())
        elif known != json.loads(text):
            changed = [k for k in sorted({*known, *settings}) if known.get(k) != json.loads(text).get(k)]
            raise InputError(
                f"{folder} holds a run with other settings ({', '.join(changed)} differ): resume it with the "
                "settings in its settings.json, or choose another --out"
            )
        if resume and self.path.exists():
            self._read()
        self._file = open(self.path, "a", encoding="utf-8")

    def _read(self) -> None:
        whole = []
        for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                unit = json.loads(line) if line.endswith("\n") else None
            except ValueError:
                unit = None
            if unit is not None:
                self.done[unit["key"]] = unit
                whole.append(line)
        write_atomic(self.path, "".join(whole).encode())

    def add(self, key: str, unit: dict[str, Any]) -> None:
        """Appends a finished unit and puts it on disk."""
        self.done[key] = {"key": key, **unit}
        self._file.write(json.dumps(self.done[key]) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _prepare(folder: Path, resume: bool) -> dict[str, Any] | None:
    """Makes the folder; returns the settings of the run it holds. InputError where it cannot serve."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"cannot write to {folder} ({error.strerror}): choose another --out, or mend its permissions"
        ) from error
    found = folder / "settings.json"
    if not found.exists():
        return None
    if not resume:
        raise InputError(
            f"{folder} already holds a run: give --resume to continue it, or choose another --out"
        )
    try:
        return json.loads(found.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(
            f"{found} is not readable as JSON: remove the folder or choose another --out"
        ) from error

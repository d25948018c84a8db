"""The log of a run: one JSON line per finished unit, so that a killed run continues where it stopped.

An incomplete last line, left by a kill, is dropped on resume. A folder with other files than a run's is an
error before anything is written. On several hosts each has its own log, in a folder that they may share or
not; at the begin and end of a run all hosts exchange their finished units.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from kvjax.base.atomic_files import hold, write_atomic
from kvjax.base.errors import InputError
from kvjax.base.interrupts import goes_on_in
from kvjax.hosts.messages import by_first, gathered, is_first, number_of, wait_for_all

# The files of a run other than its settings: none may exist before it starts.
RESULTS = ("units.jsonl", "results.jsonl", "metrics.json", "frontier.png", "report.html")
# Written and removed again before a run begins, to detect a full disk early.
_PROBE_BYTES = 2**16


class UnitLog:
    """Finished units of a run under `folder`, by key; appended to as they come.

    fields: what every unit holds besides its key. InputError for a folder that cannot serve, and where a unit
    cannot be written.
    """

    def __init__(
        self, folder: Path, settings: dict[str, Any], resume: bool, fields: tuple[str, ...] = ("rows",)
    ):
        self.done: dict[str, dict[str, Any]] = {}
        text = json.dumps(settings, indent=1, sort_keys=True)
        self._locks: list[FileLock] = []
        by_first(lambda: self._locks.append(_open(folder, text, resume)))
        try:
            self._begin(folder, text, resume, fields)
        except BaseException:
            self._release()
            raise

    def _begin(self, folder: Path, text: str, resume: bool, fields: tuple[str, ...]) -> None:
        # Other hosts may have their own disk, with a log of another run.
        run = hashlib.sha256(text.encode()).hexdigest()[:8]
        self.path = folder / ("units.jsonl" if is_first() else f"units-{run}-{number_of()}.jsonl")
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if not resume and not is_first():
                self.path.unlink(missing_ok=True)
            if resume and self.path.exists():
                self.done = self._read(self.path, fields)
            # Unbuffered, so that errors of a full disk show at once and the line can be removed.
            self._file = open(self.path, "ab", buffering=0)
            self._others = sorted(folder.glob(f"units-{run}-*.jsonl")) if is_first() and resume else []
        self._take([self._read(path, fields) for path in self._others])
        self._take(gathered(self.done))
        goes_on_in(folder)

    def _take(self, several: list[dict[str, Any]]) -> None:
        """Take over the units of other hosts; the first host also writes them to its log."""
        for found in several:
            for key in found.keys() - self.done.keys():
                self.done[key] = found[key]
                if is_first():
                    self.add(key, found[key])

    def join(self) -> None:
        """Make all units known to all hosts, and the log of the first host the only one."""
        self._take(gathered(self.done))
        wait_for_all()
        for path in self._others if is_first() else [self.path]:
            path.unlink(missing_ok=True)

    def _read(self, path: Path, fields: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        """Read the units of a log."""
        found: dict[str, dict[str, Any]] = {}
        whole = b""
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                break
            unit = _unit(line, fields)
            if unit is None:
                raise InputError(
                    f"line {number} of {path} is no finished unit of this run: remove that line, or "
                    "choose another --out"
                )
            found[unit["key"]] = unit
            whole += line
        if path == self.path:
            write_atomic(path, whole)
        return found

    def add(self, key: str, unit: dict[str, Any]) -> None:
        """Append a finished unit and write it to disk, atomically."""
        found = {"key": key, **unit}
        line = (json.dumps(found) + "\n").encode()
        with writing(self.path.parent):
            before = os.fstat(self._file.fileno()).st_size
            try:
                sent = 0
                while sent < len(line):
                    sent += self._file.write(line[sent:])
                os.fsync(self._file.fileno())
            except OSError:
                self._file.truncate(before)
                raise
        self.done[key] = found

    def close(self) -> None:
        self._file.close()
        self._release()

    def _release(self) -> None:
        for lock in self._locks:
            lock.release()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn OSErrors under `folder` into InputErrors with a one-sentence reason."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write to {folder} ({error.strerror or error}): free some space or mend its permissions, "
            "then go on with --resume"
        ) from error


def check_out(out: str | Path | None) -> None:
    """Raise InputError for an empty folder name, which would be the current directory.

    >>> check_out("results")
    """
    if out is not None and not str(out).strip():
        raise InputError(
            f"--out is {str(out)!r}, expected a folder: name one, or leave --out away for kvjax-results/TIME"
        )


def _unit(line: bytes, fields: tuple[str, ...]) -> dict[str, Any] | None:
    """Parse a finished unit from a line of the log; None if the line is damaged or lacks fields."""
    try:
        unit = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(unit, dict) or not isinstance(unit.get("key"), str) or not unit.keys() >= {*fields}:
        return None
    rows = unit["rows"]
    return unit if isinstance(rows, list) and rows and all(isinstance(x, dict) for x in rows) else None


def _open(folder: Path, text: str, resume: bool) -> FileLock:
    """Make the folder of a run with these settings, or check that it holds this run, and lock it.

    Raises InputError if it holds something else, or another live run has locked it.
    """
    if not (folder / "settings.json").exists():
        _prepare(folder, resume)  # before a lock is left in a folder of something else
    lock = hold(folder)
    try:
        _check_settings(folder, text, _prepare(folder, resume))
    except BaseException:
        lock.release()
        raise
    return lock


def _check_settings(folder: Path, text: str, known: dict[str, Any] | None) -> None:
    if known is None:
        with writing(folder):
            write_atomic(folder / "settings.json", text.encode())
        return
    asked = json.loads(text)
    if changed := [k for k in sorted({*known, *asked}) if known.get(k) != asked.get(k)]:
        raise InputError(
            f"{folder} holds a run with other settings ({', '.join(changed)} differ): resume it with the "
            "settings in its settings.json, or choose another --out"
        )


def _prepare(folder: Path, resume: bool) -> dict[str, Any] | None:
    """Make the folder; return the settings of the run it holds. InputError if it cannot serve."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        try:
            probe.write_bytes(bytes(_PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot write to {folder} ({error.strerror}): choose another --out, or mend its permissions"
        ) from error
    found = folder / "settings.json"
    if not found.exists():
        if there := [name for name in RESULTS if (folder / name).exists()]:
            raise InputError(
                f"{folder} holds {there[0]} but no settings.json, so that nothing says which run it is of: "
                "choose another --out"
            )
        return None
    if not resume:
        raise InputError(
            f"{folder} already holds a run: give --resume to continue it, or choose another --out"
        )
    try:
        known = json.loads(found.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{found} is not readable as JSON: remove the folder or choose another --out"
        ) from error
    if not isinstance(known, dict):
        raise InputError(f"{found} holds no settings of a run: remove the folder or choose another --out")
    return known

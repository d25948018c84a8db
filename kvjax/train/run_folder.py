"""The folder of a training run: its settings, and a log that a restart truncates to its checkpoint.

run.json            settings; other settings are an error
log.jsonl           a line every few steps
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from kvjax.base.atomic_files import hold, write_atomic
from kvjax.base.errors import InputError
from kvjax.base.interrupts import goes_on_in
from kvjax.hosts.messages import by_first

LOG, SETTINGS = "log.jsonl", "run.json"
# The files of a run other than its settings: none may exist before it starts.
PARTS = (LOG, "checkpoints", "model", "encoder", "loss.png")


def open_run(folder: Path, settings: dict[str, Any], resume: bool, defaults: Mapping[str, Any] = {}) -> None:
    """Create the folder of a run, or check that it holds a run with these settings.

    defaults: values, by section, of settings that did not exist when the run began.

    Raises InputError if it holds a run with other settings, any run without `resume`, or none with it, and if
    it cannot be written.
    """
    check_folder(folder, resume)
    asked, written = json.loads(json.dumps(settings)), folder / SETTINGS
    if resume:
        found = _settings_in(written)
        for section, values in defaults.items():
            if not isinstance(found.get(section, {}), dict):
                raise InputError(f"{written} holds no settings of a run: choose another folder")
            found[section] = json.loads(json.dumps(values)) | found.get(section, {})
        if other := differing(found, asked):
            had = ", ".join(f"{name} is {was} (asked: {now})" for name, was, now in other)
            raise InputError(
                f"{folder} holds a run with other settings: {had}. Give those that it has, or another folder"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(written, (json.dumps(asked, indent=1) + "\n").encode())
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written ({error.strerror}): give --out a folder that can be written"
        ) from error
    goes_on_in(folder)


@contextlib.contextmanager
def alone(folder: Path, resume: bool) -> Iterator[None]:
    """Lock a run's folder for this run, and turn disk errors into InputErrors.

    Raises InputError as `check_folder`, and if a live process holds the folder.
    """
    locks: list[FileLock] = []

    def begin() -> None:
        check_folder(folder, resume)
        locks.append(hold(folder))

    by_first(begin)
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{folder} could not be written ({error.strerror or error}), and its checkpoints stay: free some "
            "space, then go on with --resume"
        ) from error
    finally:
        for lock in locks:
            lock.release()


def check_folder(folder: Path, resume: bool) -> None:
    """Raise InputError if a folder cannot serve a new run, or with `resume` has no run to continue."""
    run = (folder / SETTINGS).exists()
    if resume and not run:
        raise InputError(f"{folder} holds no run to go on with: leave --resume out to start one")
    if run and not resume:
        raise InputError(f"{folder} holds a run: go on with it by --resume, or choose another folder")
    if not run and (left := [name for name in PARTS if (folder / name).exists()]):
        raise InputError(
            f"{folder} holds {left[0]} but no {SETTINGS}, so that nothing says which run it is of: choose "
            "another folder"
        )


def _settings_in(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError, OSError) as error:
        raise InputError(f"{path} is not valid JSON ({error}): choose another folder") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no settings of a run: choose another folder")
    return found


def differing(found: dict[str, Any], asked: dict[str, Any], within: str = "") -> list[tuple[str, Any, Any]]:
    """List the settings that differ, as (name, found, asked); None if one of them lacks the name.

    >>> differing({"loop": {"steps": 2, "seed": 0}}, {"loop": {"steps": 3, "seed": 0}})
    [('loop.steps', 2, 3)]
    """
    other = []
    for name in dict.fromkeys((*asked, *found)):
        was, now = found.get(name), asked.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            other += differing(was, now, f"{within}{name}.")
        elif was != now:
            other.append((f"{within}{name}", was, now))
    return other


def learned_file(folder: Path, id: str) -> Path:
    """Name the file in a run's folder for a method's learned tokens; a method of a user's file works, too.

    >>> learned_file(Path("run"), "my/file.py:gist").name
    'file.py-gist.safetensors'
    """
    return folder / (re.sub(r"[^\w.+-]", "-", Path(id).name) + ".safetensors")


def trim_log(folder: Path, step: int) -> None:
    """Remove the log's lines after `step`, half-written ones included: those steps are run again."""
    path, kept = folder / LOG, []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, TypeError, LookupError, RecursionError):
            break
    write_atomic(path, "".join(kept).encode())


def clock(before: Mapping[str, float]) -> Callable[[], dict[str, float]]:
    """Make a function that returns the wall and CPU seconds of a run over all its restarts."""
    clocks = {"seconds": time.monotonic, "cpu_seconds": time.process_time}
    started = {name: now() for name, now in clocks.items()}
    return lambda: {name: before.get(name, 0.0) + clocks[name]() - started[name] for name in clocks}

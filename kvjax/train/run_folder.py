"""The folder of a training run: its settings, and a log of which a restart keeps what it goes on from.

run.json            settings; a run with other ones is refused
log.jsonl           a line every few steps
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvjax.errors import InputError
from kvjax.files import write_atomic

LOG, SETTINGS = "log.jsonl", "run.json"


def open_run(folder: Path, settings: dict[str, Any], resume: bool, defaults: Mapping[str, Any] = {}) -> None:
    """Create the folder of a run, or check that the run in it is the one asked for.

    defaults: what holds, by section, for settings that are younger than the run.

    Raises InputError where it holds a run with other settings, or any without `resume`, and where it cannot
    be written.
    """
    if not resume and (folder / SETTINGS).exists():
        raise InputError(f"{folder} holds a run: go on with it by --resume, or choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be made ({error.strerror}): give --out a folder that can be written"
        ) from error
    asked, written = json.loads(json.dumps(settings)), folder / SETTINGS
    if resume and written.exists():
        found = _settings_in(written)
        for section, values in defaults.items():
            found[section] = json.loads(json.dumps(values)) | found.get(section, {})
        if other := differing(found, asked):
            had = ", ".join(f"{name} is {was} (asked: {now})" for name, was, now in other)
            raise InputError(
                f"{folder} holds a run with other settings: {had}. Give those that it has, or another folder"
            )
    else:
        (folder / LOG).unlink(missing_ok=True)
    write_atomic(written, (json.dumps(asked, indent=1) + "\n").encode())


def _settings_in(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}): choose another folder") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no settings of a run: choose another folder")
    return found


def differing(found: dict[str, Any], asked: dict[str, Any], within: str = "") -> list[tuple[str, Any, Any]]:
    """What is asked otherwise than it was found, as (name, found, asked); None where one has no such name.

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


def trim_log(folder: Path, step: int) -> None:
    """Drop what was logged after `step`, half-written lines included: those steps are run again."""
    path, kept = folder / LOG, []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except json.JSONDecodeError:
            break
    write_atomic(path, "".join(kept).encode())


def clock(before: Mapping[str, float]) -> Callable[[], dict[str, float]]:
    """Reads the wall and CPU seconds of a run over all its restarts."""
    clocks = {"seconds": time.monotonic, "cpu_seconds": time.process_time}
    started = {name: now() for name, now in clocks.items()}
    return lambda: {name: before.get(name, 0.0) + clocks[name]() - started[name] for name in clocks}

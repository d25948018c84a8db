"""The published benchmarks that can be read, and how `--tasks` names their files."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kvjax.base.errors import InputError
from kvjax.eval.tasks.published import (
    babilong,
    graphwalks,
    kvpress,
    longbench_v2,
    longproc,
    maths,
    mrcr,
    nolima,
    scbench,
)
from kvjax.eval.tasks.published.record import BenchmarkForm
from kvjax.eval.tasks.published.tables import TableRow, files_of, read_rows

# The order in which forms are tried: the first form whose fields a file has is taken.
_ALL = (
    kvpress.FORM, scbench.FORM, longbench_v2.FORM, mrcr.FORM, graphwalks.FORM, babilong.FORM, longproc.FORM,
    nolima.FORM, maths.MATH, maths.GSM8K,
)  # fmt: skip
FORMS: Mapping[str, BenchmarkForm] = {form.name: form for form in _ALL}
# An option of every form.
NEW = "max_new_tokens"
# Fields of a row that an error lists.
_SHOWN = 20


class BenchmarkFile(NamedTuple):
    """One file, its form, and the options given for it. max_new_tokens: replaces the published number."""

    form: BenchmarkForm
    file: Path
    options: Mapping[str, str]
    max_new_tokens: int | None = None


def names_form(task: str) -> bool:
    """Whether a task names the benchmark that its file belongs to."""
    name, colon, _ = task.partition(":")
    return bool(colon) and name in FORMS


def asked_of(task: str) -> list[BenchmarkFile]:
    """Find the files of "FORM:PATH,option=value" or of a path; of a path alone, those of known fields.

    Raises InputError for unknown options, paths that do not exist, and fields that belong to another form.

    >>> asked_of("kvpress:rows.jsonl,max_new_tokens=20")  # doctest: +SKIP
    """
    if not names_form(task):
        path = Path(task)
        forms = [(_form_of(file), file) for file in (files_of(path) if path.exists() else ())]
        return [BenchmarkFile(form, file, {}) for form, file in forms if form is not None]
    name, _, rest = task.partition(":")
    form = FORMS[name]
    place, *given = re.split(r",(?=\w+=)", rest.removeprefix("file="))
    options = {key: value for key, _, value in (option.partition("=") for option in given)}
    known = (NEW, *form.options)
    if wrong := [key for key in options if key not in known]:
        near = difflib.get_close_matches(wrong[0], known, 1, cutoff=0.0)[0]
        raise InputError(f"{name} has no option {wrong[0]!r}: did you mean {near!r}?")
    new = options.pop(NEW, None)
    if new is not None and not (new.isdecimal() and int(new)):
        raise InputError(f"{task}: {NEW} is {new!r}, expected a whole number of at least 1")
    files = files_of(Path(place)) if place and Path(place).exists() else []
    if not files:
        what = (
            "holds no .parquet, .jsonl or .json file" if place and Path(place).is_dir() else "does not exist"
        )
        raise InputError(f"{place or repr(task)} {what}, expected {name}:FILE or {name}:FOLDER: check it")
    for file in files:
        _check_fields(form, next(read_rows(file)))
    return [BenchmarkFile(form, file, options, None if new is None else int(new)) for file in files]


def _form_of(file: Path) -> BenchmarkForm | None:
    """Return the form whose fields the first row has; None for JSONL that another reader may know."""
    if file.suffix == ".jsonl":
        try:
            return _fitting(next(read_rows(file)))
        except InputError:
            return None
    row = next(read_rows(file))
    if (form := _fitting(row)) is None:
        there = ", ".join(itertools.islice(row.data, _SHOWN)) or "none"
        forms = "; ".join(f"{f.name}: {', '.join(f.fields)}" for f in FORMS.values())
        raise InputError(
            f"{row.where} has the fields {there}, expected those of a benchmark that is read ({forms})"
        )
    return form


def _fitting(row: TableRow) -> BenchmarkForm | None:
    return next((form for form in FORMS.values() if set(form.fields) <= set(row.data)), None)


def _check_fields(form: BenchmarkForm, row: TableRow) -> None:
    if missing := [field for field in form.fields if field not in row.data]:
        other = _fitting(row)
        hint = f"; these are fields of {other.name}" if other is not None else ""
        there = ", ".join(itertools.islice(row.data, _SHOWN)) or "none"
        raise InputError(
            f"{row.where}: field {missing[0]!r} is missing; expected {', '.join(form.fields)} (its fields: "
            f"{there}{hint})"
        )

"""RULER and LongBench from local JSONL files; answers are generated and scored by the benchmarks' metrics.

A record is a context with one question. The settings of the benchmarks are in `benchmarks.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.base.errors import InputError
from kvjax.eval.tasks.benchmarks import LONGBENCH, OWN, RULER, Benchmark, Metric
from kvjax.eval.tasks.cuts import Ids, Spans, cut_middle
from kvjax.eval.tasks.reader import SuiteTokenizer, reader_of
from kvjax.eval.tasks.sample import Graded, OpenSample, Sample
from kvjax.models.model import Model


class _Record(NamedTuple):
    """One line of a file, as text."""

    context: str
    question: str
    references: tuple[str, ...]
    classes: tuple[str, ...]


class _Task(NamedTuple):
    """Records of one task."""

    benchmark: Benchmark
    records: list[_Record]


def read_local(
    model: Model, paths: Sequence[Path], *, length: int | None = None, contexts: int = 32
) -> LocalData:
    """Read the questions of JSONL files, or of all files below folders; at most `contexts` records per task.

    Prompts beyond `length` tokens lose their middle, as in LongBench; by default the longest prompt fits, as
    far as the model's positions reach. Tasks are named by the data set (LongBench) or the file (RULER).

    Raises InputError for unreadable files, lines that are no records, data sets that LongBench does not have,
    a model without a tokenizer, and questions that alone are longer than `length`.

    >>> read_local(model, [Path("niah_single_1.jsonl")]).rows(0, "agnostic")  # doctest: +SKIP
    """
    reader = reader_of(model)
    files = [file for path in paths for file in _files(path)]
    found: dict[str, _Task] = {}
    for file in files:
        for name, task in _read(file, contexts).items():
            if name in found:
                raise InputError(f"{file} holds the task {name}, and another file does: name one of them")
            found[name] = task
    encoded = {name: [_encode(reader, name, r) for r in task.records] for name, task in found.items()}
    longest = max(len(c) + len(q) for prompts in encoded.values() for c, q, _ in prompts)
    new = max(task.benchmark.new_tokens for task in found.values())
    most = model.config.max_positions - new
    length = min(longest, most) if length is None else length
    if length > most:
        raise InputError(
            f"--length {length} and answers of {new} tokens reach beyond the model's "
            f"{model.config.max_positions} positions: expected at most {most}"
        )
    samples = {
        name: tuple(
            OpenSample(
                f"{name}-{i}", name, *_cut(name, *ids, length=length),
                record.references, task.benchmark.new_tokens, record.classes,
            )
            for i, (record, ids) in enumerate(zip(task.records, encoded[name], strict=True))
        )
        for name, task in found.items()
    }  # fmt: skip
    sources = tuple(f"{file.name}:{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}" for file in files)
    scores = {name: task.benchmark.score for name, task in found.items()}
    return LocalData(tuple(found), length, sources, samples, scores, reader)


@dataclasses.dataclass(frozen=True)
class LocalData:
    """The records of files, by task; record number i of each task belongs to context number i."""

    tasks: tuple[str, ...]
    length: int
    sources: tuple[str, ...]
    samples: Mapping[str, tuple[OpenSample, ...]]
    scores: Mapping[str, Metric]
    reader: SuiteTokenizer

    @property
    def contexts(self) -> int:
        return max(len(samples) for samples in self.samples.values())

    def rows(self, index: int, protocol: str) -> list[Sequence[Sample]]:
        """One row per task that has so many records; each is one context with one question."""
        return [[samples[index]] for samples in self.samples.values() if index < len(samples)]

    def grade(self, sample: Sample, prediction: Sequence[int]) -> Graded:
        """Grade the generated text by the benchmark's own metric."""
        assert isinstance(sample, OpenSample)
        text = self.reader.text(prediction)
        score = self.scores[sample.task](text, sample.references, sample.classes)
        return Graded(text, " | ".join(sample.references), score)

    def words(self, ids: Sequence[int]) -> list[str]:
        return self.reader.words(ids)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(path.rglob("*.jsonl"))
    if not files:
        what = "holds no .jsonl file" if path.is_dir() else "does not exist"
        raise InputError(f"{path} {what}, expected JSONL of RULER or LongBench, or a folder of it: check it")
    return files


def _read(file: Path, most: int) -> dict[str, _Task]:
    """Tasks by name, with at most so many records of each."""
    found: dict[str, _Task] = {}
    try:
        with open(file, encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    name, benchmark, record = _record(f"{file}:{number}", line, file)
                    task = found.setdefault(name, _Task(benchmark, []))
                    task.records.extend([record] if len(task.records) < most else [])
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read ({error}): expected JSON lines in UTF-8") from error
    if not found:
        raise InputError(f"{file} is empty, expected RULER or LongBench records, one JSON object per line")
    return found


def _record(where: str, line: str, file: Path) -> tuple[str, Benchmark, _Record]:
    """Return the task of a line, the benchmark's settings for it, and its text."""
    try:
        data = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON ({error}): expected one record per line") from error
    data = data if isinstance(data, dict) else {}
    keys = {k for k, value in data.items() if k not in ("input", "context") or isinstance(value, str)}
    if {"input", "outputs"} <= keys:
        name = file.parent.name if file.stem in ("validation", "test", "train") else file.stem
        benchmark = RULER.get(name.split("_")[0], OWN)
        return name, benchmark, _ruler(where, name, benchmark, data)
    if {"input", "context", "answers"} <= keys:
        name = str(data.get("dataset") or file.stem).removesuffix("_e")
        if name not in LONGBENCH:
            near = difflib.get_close_matches(name, LONGBENCH, 1, cutoff=0.0)[0]
            raise InputError(f"{where}: {name!r} is no data set of LongBench: did you mean {near!r}?")
        before, after = LONGBENCH[name].prompt.split("{context}")
        texts = before + data["context"], after.replace("{input}", data["input"])
        names = _strings(data.get("all_classes") or ())
        return name, LONGBENCH[name], _Record(*texts, _strings(data["answers"]), names)
    raise InputError(
        f"{where} has the keys {', '.join(sorted(keys)) or 'of no record'}, expected input and outputs "
        "(RULER), input, context and answers (LongBench), or those of a benchmark of docs/tasks.md"
    )


def _ruler(where: str, name: str, benchmark: Benchmark, data: dict[str, Any]) -> _Record:
    text = data["input"]
    matches = list(re.finditer(benchmark.question, text)) or list(re.finditer(OWN.question, text))
    start = matches[-1].start() if matches else 0
    if not start:
        raise InputError(
            f"{where}: no question was found in the input of the task {name!r}, expected the wording of "
            "RULER, or a question in the last line"
        )
    question = text[start:] + data.get("answer_prefix", "")
    return _Record(text[:start], question, _strings(data["outputs"]), ())


def _strings(values: Any) -> tuple[str, ...]:
    return tuple(map(str, values)) if isinstance(values, list | tuple) else (str(values),)


# Ids of the context, ids of the question, and the spans of the needed words in the context.
_Prompt = tuple[Ids, Ids, Spans]


def _encode(reader: SuiteTokenizer, name: str, record: _Record) -> _Prompt:
    """Encode a prompt as ids; a needle's position is found by its answer, which occurs nowhere else."""
    needles = [re.escape(r) for r in record.references if r and name.startswith("niah")]
    pieces = re.split("(" + "|".join(needles) + ")", record.context) if needles else [record.context]
    *parts, question = reader.split(*pieces, record.question)
    ends = [*itertools.accumulate((len(p) for p in parts), initial=len(reader.bos))]
    return (*reader.bos, *itertools.chain(*parts)), question, tuple(itertools.pairwise(ends))[1::2]


def _cut(name: str, context: Ids, question: Ids, spans: Spans, *, length: int) -> _Prompt:
    """Cut the prompt's middle out if it is too long; the question stays whole."""
    if len(question) >= length:
        raise InputError(
            f"a question of {name} has {len(question)} tokens, expected fewer than --length {length}"
        )
    context, spans = cut_middle(context, question, spans, length)
    return context, question, spans

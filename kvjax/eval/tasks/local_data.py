"""RULER and LongBench from local JSONL files, answered in the model's own words and scored by their metrics.

One record is one context with one question. What a benchmark fixes is written down here: where the question
begins, the prompt, how many tokens an answer has, the metric. The metrics are in `metrics.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.errors import InputError
from kvjax.eval.tasks import metrics
from kvjax.eval.tasks.reader import Reader, reader_of
from kvjax.eval.tasks.sample import Graded, OpenSample, Sample
from kvjax.models.model import Model

# (written text, references, classes) -> score in [0, 1]
Metric = Callable[[str, Sequence[str], Sequence[str]], float]


class Benchmark(NamedTuple):
    """What a benchmark fixes for one task: the prompt, or else the pattern that opens its question."""

    prompt: str
    new_tokens: int
    score: Metric
    question: str = ""


def _best(metric: Callable[[str, str], float], first_line: bool = False) -> Metric:
    """The best score over the references; of the first line alone where only that counts."""

    def score(text: str, references: Sequence[str], classes: Sequence[str]) -> float:
        line = text.lstrip("\n").split("\n")[0] if first_line else text
        return max((metric(line, reference) for reference in references), default=0.0)

    return score


def _classification(text: str, references: Sequence[str], classes: Sequence[str]) -> float:
    line = text.lstrip("\n").split("\n")[0]
    return max((metrics.classification(line, r, classes) for r in references), default=0.0)


def _matching(metric: Callable[[str, Sequence[str]], float]) -> Metric:
    """RULER's metric: control characters of the written text become line ends first."""
    return lambda text, references, _: metric(re.sub(r"[\x00-\x1f]", "\n", text.strip()).strip(), references)


# --- RULER (arXiv:2404.06654) --------------------------------------------------------------------------

_ALL, _PART = _matching(metrics.string_match_all), _matching(metrics.string_match_part)
# By the first part of a task's name. The question opens at the pattern's last match: vt and cwe show a solved
# example first.
RULER: Mapping[str, Benchmark] = {
    "niah": Benchmark("", 128, _ALL, r"What (?:is|are all) the special magic"),
    "vt": Benchmark("", 30, _ALL, r"Question: Find all variables that are assigned"),
    "cwe": Benchmark("", 120, _ALL, r"Question: What are the 10 most common words"),
    "fwe": Benchmark("", 50, _ALL, r"Question: Do not provide any explanation\."),
    "qa": Benchmark("", 32, _PART, r"Answer the question based on the given documents\."),
}
# A task of one's own in RULER's form: its question is the last one, or the last line.
_OWN = Benchmark("", 128, _ALL, r"Question:|\n(?=[^\n]*\Z)")

# --- LongBench (arXiv:2308.14508) ----------------------------------------------------------------------

_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any "
    "other words.\n\nThe following are given passages.\n{context}\n\nAnswer the question based on the "
    "given passages. Only give me the answer and do not output any other words.\n\nQuestion: "
    "{input}\nAnswer:"
)
_STORY = "as concisely as you can, using a single phrase if possible. Do not provide any explanation.\n\n"
_ARTICLE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be "
    'answered based on the information in the article, write "unanswerable". If the question is a '
    'yes/no question, answer "yes", "no", or "unanswerable". Do not provide any explanation.\n\n'
)
_F1, _F1_CHINESE = _best(metrics.token_f1), _best(metrics.token_f1_chinese)
_ROUGE, _ROUGE_CHINESE = _best(metrics.rouge_l), _best(metrics.rouge_l_chinese)
_CODE, _NUMBERS = _best(metrics.code_similarity), _best(metrics.right_numbers)

LONGBENCH: Mapping[str, Benchmark] = {
    "narrativeqa": Benchmark(
        "You are given a story, which can be either a novel or a movie script, and a question. "
        "Answer the question "
        + _STORY
        + "Story: {context}\n\nNow, answer the question based on the story "
        + _STORY
        + "Question: {input}\n\nAnswer:",
        128,
        _F1,
    ),
    "qasper": Benchmark(
        "You are given a scientific article and a question. Answer the question "
        + _ARTICLE
        + "Article: {context}\n\n Answer the question based on the above article "
        + _ARTICLE
        + "Question: {input}\n\nAnswer:",
        128,
        _F1,
    ),
    "multifieldqa_en": Benchmark(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question "
        "based on the above text, only give me the answer and do not output any other words.\n\nQuestion: "
        "{input}\nAnswer:",
        64,
        _F1,
    ),
    "multifieldqa_zh": Benchmark(
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n"
        "现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n问题：{input}\n回答：",
        64,
        _F1_CHINESE,
    ),
    "hotpotqa": Benchmark(_PASSAGES, 32, _F1),
    "2wikimqa": Benchmark(_PASSAGES, 32, _F1),
    "musique": Benchmark(_PASSAGES, 32, _F1),
    "dureader": Benchmark(
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n"
        "问题：{input}\n回答：",
        128,
        _ROUGE_CHINESE,
    ),
    "gov_report": Benchmark(
        "You are given a report by a government agency. Write a one-page summary of the "
        "report.\n\nReport:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        _ROUGE,
    ),
    "qmsum": Benchmark(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the "
        "query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the "
        "above meeting transcript in one or more sentences.\n\nQuery: {input}\nAnswer:",
        512,
        _ROUGE,
    ),
    "multi_news": Benchmark(
        "You are given several news passages. Write a one-page summary of all news. "
        "\n\nNews:\n{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        512,
        _ROUGE,
    ),
    "vcsum": Benchmark(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",
        512,
        _ROUGE_CHINESE,
    ),
    "trec": Benchmark(
        "Please determine the type of the question below. Here are some examples of "
        "questions.\n\n{context}\n{input}",
        64,
        _classification,
    ),
    "triviaqa": Benchmark(
        "Answer the question based on the given passage. Only give me the answer and do not output any "
        "other words. The following are some examples.\n\n{context}\n\n{input}",
        32,
        _best(metrics.token_f1, first_line=True),
    ),
    "samsum": Benchmark(
        "Summarize the dialogue into a few short sentences. The following are some "
        "examples.\n\n{context}\n\n{input}",
        128,
        _best(metrics.rouge_l, first_line=True),
    ),
    "lsht": Benchmark("请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}", 64, _classification),
    "passage_count": Benchmark(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please "
        "carefully read these paragraphs and determine how many unique paragraphs there are after removing "
        "duplicates. In other words, how many non-repeating paragraphs are there in "
        "total?\n\n{context}\n\nPlease enter the final count of unique paragraphs after removing "
        "duplicates. The output format should only contain the number, such as 1, 2, 3, and so on.\n\nThe "
        "final answer is: ",
        32,
        _NUMBERS,
    ),
    "passage_retrieval_en": Benchmark(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph "
        "the abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter "
        'the number of the paragraph that the abstract is from. The answer format must be like "Paragraph '
        '1", "Paragraph 2", etc.\n\nThe answer is: ',
        32,
        _NUMBERS,
    ),
    "passage_retrieval_zh": Benchmark(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n"
        '下面是一个摘要\n\n{input}\n\n请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n'
        "答案是：",
        32,
        _NUMBERS,
    ),
    "lcc": Benchmark("Please complete the code given below. \n{context}Next line of code:\n", 64, _CODE),
    "repobench-p": Benchmark(
        "Please complete the code given below. \n{context}{input}Next line of code:\n", 64, _CODE
    ),
}


# --- records -------------------------------------------------------------------------------------------


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
    """The questions of JSONL files, or of all files below folders; at most `contexts` records per task.

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
    reader: Reader

    @property
    def contexts(self) -> int:
        return max(len(samples) for samples in self.samples.values())

    def rows(self, index: int, protocol: str) -> list[Sequence[Sample]]:
        """One row per task that has so many records; each is one context with one question."""
        return [[samples[index]] for samples in self.samples.values() if index < len(samples)]

    def grade(self, sample: Sample, prediction: Sequence[int]) -> Graded:
        """The benchmark's own metric on the written text."""
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
        with open(file, encoding="utf-8") as lines:
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
    """The task of a line, what its benchmark fixes, and its text."""
    try:
        data = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON ({error}): expected one record per line") from error
    data = data if isinstance(data, dict) else {}
    keys = {k for k, value in data.items() if k not in ("input", "context") or isinstance(value, str)}
    if {"input", "outputs"} <= keys:
        name = file.parent.name if file.stem in ("validation", "test", "train") else file.stem
        benchmark = RULER.get(name.split("_")[0], _OWN)
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
        "(RULER) or input, context and answers (LongBench)"
    )


def _ruler(where: str, name: str, benchmark: Benchmark, data: dict[str, Any]) -> _Record:
    text = data["input"]
    matches = list(re.finditer(benchmark.question, text)) or list(re.finditer(_OWN.question, text))
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


Ids = tuple[int, ...]
# Ids of the context, ids of the question, and where the needed words stand in the context.
_Prompt = tuple[Ids, Ids, tuple[tuple[int, int], ...]]


def _encode(reader: Reader, name: str, record: _Record) -> _Prompt:
    """A prompt as ids; a needle's place is known, since its answer stands nowhere else."""
    needles = [re.escape(r) for r in record.references if r and name.startswith("niah")]
    pieces = re.split("(" + "|".join(needles) + ")", record.context) if needles else [record.context]
    *parts, question = reader.split(*pieces, record.question)
    ends = [*itertools.accumulate((len(p) for p in parts), initial=len(reader.bos))]
    return (*reader.bos, *itertools.chain(*parts)), question, tuple(itertools.pairwise(ends))[1::2]


def _cut(
    name: str, context: Ids, question: Ids, spans: tuple[tuple[int, int], ...], *, length: int
) -> _Prompt:
    """The prompt without its middle where it is longer than `length`; the question stays whole."""
    if len(context) + len(question) <= length:
        return context, question, spans
    if len(question) >= length:
        raise InputError(
            f"a question of {name} has {len(question)} tokens, expected fewer than --length {length}"
        )
    left = min(length // 2, length - len(question))
    right = len(context) - max(length // 2 - len(question), 0)
    kept = [span for span in spans if span[1] <= left]
    kept += [(a - right + left, b - right + left) for a, b in spans if a >= right]
    return context[:left] + context[right:], question, tuple(kept)

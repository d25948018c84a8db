r"""GSM8K, MATH and AIME: problems whose answer is in \boxed{}.

The problem is the context; the instruction follows it, as DeepSeek-R1 recommends
(github.com/deepseek-ai/DeepSeek-R1, README, MIT). Data: openai/gsm8k (arXiv:2110.14168; MIT), MATH
(arXiv:2103.03874; MIT) and data with the same fields. No answer length is published: 2048 tokens for GSM8K,
4096 for others, 32768 for AIME.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvjax.eval.tasks.published.boxed import last_boxed, same_answer
from kvjax.eval.tasks.published.record import BenchmarkForm, BenchmarkQuestion, BenchmarkRecord, by_row
from kvjax.eval.tasks.published.tables import TableRow

INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def _gsm8k(row: TableRow, _: Mapping[str, str]) -> BenchmarkRecord:
    answer = row.filled("answer")
    right = answer.rpartition("####")[2].strip()
    if "####" not in answer or not right:
        raise row.wrong("answer", "a solution that ends in '#### NUMBER'")
    return _asked(row, "gsm8k", row.filled("question"), right, 2048)


def _math(row: TableRow, options: Mapping[str, str]) -> BenchmarkRecord:
    if row.data.get("answer") is not None:
        right = row.texts("answer")[0]
    elif (found := last_boxed(row.filled("solution"))) is not None:
        right = found
    else:
        raise row.wrong("solution", "a text whose answer stands in \\boxed{}")
    task = options.get("task") or _task_of(row)
    return _asked(row, task, row.filled("problem"), right, 32768 if "aime" in task else 4096)


def _task_of(row: TableRow) -> str:
    """Read "aime" or "math" and the number from the name of a file or of its folders."""
    for part in reversed(row.file.parts[-3:]):
        if found := re.search(r"(aime|math)\D?(\d+)", part.lower()):
            return found[1] + found[2]
    return "math"


def _asked(row: TableRow, task: str, problem: str, right: str, new: int) -> BenchmarkRecord:
    score = lambda text: float(same_answer(last_boxed(text), right))  # noqa: E731
    return BenchmarkRecord(row.where, task, problem, (BenchmarkQuestion(INSTRUCTION, (right,), new, score),))


GSM8K = BenchmarkForm("gsm8k", ("question", "answer"), by_row(_gsm8k), cut="skip")
MATH = BenchmarkForm("math", ("problem",), by_row(_math), cut="skip", options=("task",))

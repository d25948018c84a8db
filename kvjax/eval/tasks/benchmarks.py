"""RULER's and LongBench's settings for each of their tasks: the prompt, the answer's length, the metric."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvjax.eval.tasks import metrics

# (answer, references, classes) -> score in [0, 1]
Metric = Callable[[str, Sequence[str], Sequence[str]], float]


class Benchmark(NamedTuple):
    """A benchmark's settings for one task: the prompt, or the pattern at which its question begins."""

    prompt: str
    new_tokens: int
    score: Metric
    question: str = ""


def _best(metric: Callable[[str, str], float], first_line: bool = False) -> Metric:
    """Take the best score over the references; of the first line alone if only that counts."""

    def score(text: str, references: Sequence[str], classes: Sequence[str]) -> float:
        line = text.lstrip("\n").split("\n")[0] if first_line else text
        return max((metric(line, reference) for reference in references), default=0.0)

    return score


def _classification(text: str, references: Sequence[str], classes: Sequence[str]) -> float:
    line = text.lstrip("\n").split("\n")[0]
    return max((metrics.classification(line, r, classes) for r in references), default=0.0)


def _matching(metric: Callable[[str, Sequence[str]], float]) -> Metric:
    """RULER's metric, which first replaces control characters of the answer by line ends."""
    return lambda text, references, _: metric(re.sub(r"[\x00-\x1f]", "\n", text.strip()).strip(), references)


# --- RULER (arXiv:2404.06654) --------------------------------------------------------------------------

_ALL, _PART = _matching(metrics.string_match_all), _matching(metrics.string_match_part)
# Benchmarks by the first part of a task's name. A question begins at the last match of the pattern, because
# vt and cwe show a solved example first.
RULER: Mapping[str, Benchmark] = {
    "niah": Benchmark("", 128, _ALL, r"What (?:is|are all) the special magic"),
    "vt": Benchmark("", 30, _ALL, r"Question: Find all variables that are assigned"),
    "cwe": Benchmark("", 120, _ALL, r"Question: What are the 10 most common words"),
    "fwe": Benchmark("", 50, _ALL, r"Question: Do not provide any explanation\."),
    "qa": Benchmark("", 32, _PART, r"Answer the question based on the given documents\."),
}
# A user's own task in RULER's form: its question is the last one, or the last line.
OWN = Benchmark("", 128, _ALL, r"Question:|\n(?=[^\n]*\Z)")

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

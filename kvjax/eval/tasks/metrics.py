"""Metrics of generated answers, as in RULER and LongBench: text in, a score in [0, 1] out.

Nothing here knows a data set; `benchmarks.py` assigns the metrics. Quirks of the original code on which
published numbers depend are reproduced, so that scores are comparable.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from kvjax.base.errors import InputError

_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～"
    "｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ALL_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """Compute the share of references that occur in the prediction, upper and lower case alike (RULER).

    >>> string_match_all("52 and 17", ["17", "94"])
    0.5
    """
    return sum(r.lower() in prediction.lower() for r in references) / max(len(references), 1)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """1 if any reference occurs in the prediction, upper and lower case alike (RULER's QA tasks).

    >>> string_match_part("It was Ada.", ["ada", "Grace"])
    1.0
    """
    return float(any(r.lower() in prediction.lower() for r in references))


def normalise_answer(text: str) -> str:
    """Lower case without punctuation, articles and extra blanks, in this order (SQuAD, arXiv:1606.05250).

    >>> normalise_answer("The  Answer, a word.")
    'answer word'
    """
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def token_f1(prediction: str, reference: str) -> float:
    """F1 of the words that two normalised answers share, repeated ones counted (SQuAD).

    >>> round(token_f1("the red boat", "a red car"), 2)
    0.5
    """
    return _bag_f1(normalise_answer(prediction).split(), normalise_answer(reference).split())


def token_f1_chinese(prediction: str, reference: str) -> float:
    """`token_f1` over the words that jieba finds in Chinese text."""
    words = (
        [w for w in (_plain_chinese(x) for x in _segment(text)) if w] for text in (prediction, reference)
    )
    return _bag_f1(*words)


def character_f1(prediction: str, reference: str) -> float:
    """F1 of the characters that two texts share, in lower case, without punctuation and blanks (Chinese).

    >>> round(character_f1("在 北京。", "北京"), 2)
    0.8
    """
    return _bag_f1(list(_plain_chinese(prediction)), list(_plain_chinese(reference)))


def _plain_chinese(word: str) -> str:
    return "".join(word.lower().translate(_ALL_PUNCTUATION).split())


def _bag_f1(prediction: list[str], reference: list[str]) -> float:
    same = sum((Counter(prediction) & Counter(reference)).values())
    if not same:
        return 0.0
    precision, recall = same / len(prediction), same / len(reference)
    return 2 * precision * recall / (precision + recall)


def rouge_l(prediction: str, reference: str) -> float:
    """Summary-level ROUGE-L F1 over sets of words, as the `rouge` package that LongBench uses computes it.

    Per sentence of the reference, the union of its longest common subsequences with every sentence of the
    prediction; shares of the distinct words of both. Source: Lin, 2004, ROUGE, section 3.2.

    >>> round(rouge_l("police killed the gunman", "police kill the gunman"), 2)
    0.75
    """
    precision, recall = _shared_words(prediction, reference)
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_recall(prediction: str, reference: str) -> float:
    """Return the recall of `rouge_l` alone, as LooGLE is scored (arXiv:2311.04939).

    >>> rouge_l_recall("police killed the gunman", "police kill the gunman")
    0.75
    """
    return _shared_words(prediction, reference)[1]


def rouge_l_sum(prediction: str, reference: str) -> float:
    """ROUGE-Lsum F1, as the package `rouge-score` computes it without a stemmer: lines are sentences.

    Per line of the reference, the union of its longest common subsequences with every line of the prediction;
    a word counts at most as often as it occurs in both texts. Source: Lin, 2004, ROUGE, section 3.2.

    >>> round(rouge_l_sum("the red cat", "the cat" + chr(10) + "sat"), 2)
    0.67
    """
    said, right = (_plain_lines(text) for text in (prediction, reference))
    left = [Counter(word for line in text for word in line) for text in (said, right)]
    total = [sum(count.values()) for count in left]
    hits = 0
    for r in right:
        union = {i for s in said for i in _subsequence_places(r, s)}
        for word in (r[i] for i in sorted(union)):
            if left[0][word] > 0 and left[1][word] > 0:
                hits += 1
                left[0].subtract([word])
                left[1].subtract([word])
    if not hits:
        return 0.0
    precision, recall = hits / total[0], hits / total[1]
    return 2 * precision * recall / (precision + recall)


def _plain_lines(text: str) -> list[list[str]]:
    lines = (re.sub(r"[^a-z0-9]+", " ", line.lower()).split() for line in text.split("\n") if line)
    return [line for line in lines if line]


def _subsequence_places(x: Sequence[str], y: Sequence[str]) -> list[int]:
    """Places in x of a longest common subsequence; of several, the one that `rouge-score` finds."""
    table = _subsequence_lengths(x, y)
    i, j, out = len(x), len(y), []
    while i and j:
        if x[i - 1] == y[j - 1]:
            i, j = i - 1, j - 1
            out.append(i)
        elif table[i][j - 1] > table[i - 1][j]:
            j -= 1
        else:
            i -= 1
    return out


def _shared_words(prediction: str, reference: str) -> tuple[float, float]:
    """Shares of the distinct words of both sentences that are in a common subsequence."""
    said, right = _sentences(prediction), _sentences(reference)
    if not said or not right:
        return 0.0, 0.0
    shared = {word for r in right for s in said for word in _common_subsequence(r, s)}
    words = [{word for sentence in text for word in sentence} for text in (said, right)]
    return len(shared) / len(words[0]), len(shared) / len(words[1])


def rouge_l_chinese(prediction: str, reference: str) -> float:
    """`rouge_l` over the words that jieba finds in Chinese text."""
    return rouge_l(" ".join(_segment(prediction)), " ".join(_segment(reference)))


def _sentences(text: str) -> list[list[str]]:
    # A space after the last point counts as one more sentence of one empty word, as in the original package.
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common_subsequence(x: Sequence[str], y: Sequence[str]) -> list[str]:
    """Find a longest common subsequence, last word first; of several, the one the `rouge` package finds."""
    table = _subsequence_lengths(x, y)
    i, j, out = len(x), len(y), []
    while i and j:
        if x[i - 1] == y[j - 1]:
            out.append(x[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return out


def _subsequence_lengths(x: Sequence[str], y: Sequence[str]) -> list[list[int]]:
    """table[i][j]: length of the longest common subsequence of x[:i] and y[:j]."""
    table = [[0] * (len(y) + 1)]
    for a in x:
        above, row = table[-1], [0]
        for j, b in enumerate(y):
            row.append(above[j] + 1 if a == b else max(above[j + 1], row[j]))
        table.append(row)
    return table


def edit_similarity(prediction: str, reference: str) -> float:
    """2 * LCS / (length + length) over characters, in whole percents: `fuzz.ratio` of fuzzywuzzy.

    >>> edit_similarity("return x", "return y")
    0.88
    """
    total = len(prediction) + len(reference)
    if not total:
        return 1.0
    return round(200 * _subsequence_lengths(prediction, reference)[-1][-1] / total) / 100


def code_similarity(prediction: str, reference: str) -> float:
    """`edit_similarity` of the first line that is code: without backticks, # and // (LongBench).

    >>> code_similarity("# next line" + chr(10) + "x = 1", "x = 1")
    1.0
    """
    lines = prediction.lstrip("\n").split("\n")
    code = (line for line in lines if not any(mark in line for mark in ("`", "#", "//")))
    return edit_similarity(next(code, ""), reference)


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 / (classes named in the prediction) if the right one is among them, else 0 (LongBench).

    Named classes that are part of the right one's name do not count.

    >>> classification("a city or a state", "city", ["city", "state", "food"])
    0.5
    """
    named = [name for name in classes if name in prediction]
    # LongBench removes from the list while iterating over it, so that the class after a removed one is
    # skipped.
    for name in named:
        if name in reference and name != reference:
            named.remove(name)
    return 1.0 / len(named) if reference in named else 0.0


def right_numbers(prediction: str, reference: str) -> float:
    """Compute the share of the prediction's numbers that are the reference's number (counting and retrieval).

    >>> right_numbers("Paragraph 3, not 12", "Paragraph 12")
    0.5
    """
    wanted, found = re.search(r"\d+", reference), re.findall(r"\d+", prediction)
    if wanted is None or not found:
        return 0.0
    return sum(number == wanted[0] for number in found) / len(found)


def _segment(text: str) -> list[str]:
    try:
        import jieba  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError(
            "Chinese answers are scored by words, which needs the package jieba: pip install 'kvjax[eval]'"
        ) from error
    return list(jieba.cut(text, cut_all=False))

"""OpenAI's MRCR: a conversation in which one of several equal requests must be answered as it was before.

Data and metric: the dataset card of openai/mrcr (MIT). The messages before the last are the context. Rows
that are too long are skipped, as on the card. The card sets no limit for answers; here it is twice the length
of the right one.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping

from kvjax.eval.tasks.published.record import BenchmarkForm, BenchmarkQuestion, BenchmarkRecord, by_row
from kvjax.eval.tasks.published.tables import TableRow


def similarity(text: str, right: str, prefix: str) -> float:
    """Compute difflib's SequenceMatcher ratio after the prefix that the answer must open with; 0 without it.

    >>> similarity("ab12 a poem", "ab12 a poem", "ab12"), similarity("a poem", "ab12 a poem", "ab12")
    (1.0, 0.0)
    """
    if not text.startswith(prefix):
        return 0.0
    texts = text.removeprefix(prefix), right.removeprefix(prefix)
    return difflib.SequenceMatcher(None, *texts).ratio()


def _record(row: TableRow, _: Mapping[str, str]) -> BenchmarkRecord:
    right, prefix = row.filled("answer"), row.filled("random_string_to_prepend")
    *before, last = _messages(row)
    if not before or last["role"] != "user":
        raise row.wrong("prompt", "messages of which the last is the user's")
    turn = BenchmarkQuestion(last["content"], (right,), None, lambda text: similarity(text, right, prefix))
    task = f"mrcr_{row.whole('n_needles')}needle" if "n_needles" in row.data else "mrcr"
    return BenchmarkRecord(row.where, task, "", (turn,), before=tuple(before))


def _messages(row: TableRow) -> list[dict[str, str]]:
    """Read the conversation, which the file holds as JSON."""
    try:
        found = json.loads(row.filled("prompt"))
    except ValueError as error:
        raise row.wrong("prompt", "a list of messages in JSON") from error
    right = isinstance(found, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in found
    )
    if not right or not found:
        raise row.wrong("prompt", "a list of messages with role and content, in JSON")
    return [{"role": m["role"], "content": m["content"]} for m in found]


FORM = BenchmarkForm(
    "mrcr", ("prompt", "answer", "random_string_to_prepend"), by_row(_record), cut="skip", mixed=True
)

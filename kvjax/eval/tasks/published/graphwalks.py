"""OpenAI's GraphWalks: a graph as a list of edges, and an operation whose nodes must be listed.

Data and metric: the dataset card of openai/graphwalks (MIT), with the nodes found as lm-evaluation-harness
finds them (lm_eval/tasks/graphwalks; MIT), because the card's code keeps the words before the list. The text
before the operation is the context. Rows that are too long are skipped.

Deviation: an answer that shares no node with the right one scores 0, as in the harness; the card's formula
gives it 1. Two empty lists are equal, as on the card.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvjax.eval.tasks.published.record import BenchmarkForm, BenchmarkQuestion, BenchmarkRecord, by_row
from kvjax.eval.tasks.published.tables import TableRow

# Most new tokens, as in lm-evaluation-harness; models that do not reason write far fewer.
_NEW = 16384


def node_f1(text: str, right: frozenset[str]) -> float:
    """F1 of the nodes in brackets after "Final Answer:" in the last line; 0 without such a line.

    >>> node_f1("So:" + chr(10) + "Final Answer: [a, b]", frozenset("bc"))
    0.5
    """
    found = re.search(r"Final Answer:\s*\[(.*)\]", text.rstrip("\n").split("\n")[-1])
    if found is None:
        return 0.0
    said = {node.strip().strip("'\"") for node in found[1].split(",") if node.strip()}
    if not said and not right:
        return 1.0
    return 2 * len(said & right) / (len(said) + len(right))


def _record(row: TableRow, _: Mapping[str, str]) -> BenchmarkRecord:
    field = "answer_nodes" if "answer_nodes" in row.data else "answer"
    nodes = row.data.get(field)
    if not isinstance(nodes, list | tuple) or not all(isinstance(node, str) for node in nodes):
        raise row.wrong(field, "a list of nodes")
    prompt, right = row.filled("prompt"), frozenset(nodes)
    at = prompt.rfind("Operation:")
    if at <= 0:
        raise row.wrong("prompt", "a text with a graph and 'Operation:' after it")
    turn = BenchmarkQuestion(prompt[at:], tuple(nodes), _NEW, lambda text: node_f1(text, right))
    kind = row.filled("problem_type")
    return BenchmarkRecord(row.where, f"graphwalks_{kind}", prompt[:at], (turn,))


FORM = BenchmarkForm("graphwalks", ("prompt", "problem_type"), by_row(_record), cut="skip", mixed=True)

"""Prompts that are too long are cut in the middle or at the end of their context, never in the question."""

from __future__ import annotations

Spans = tuple[tuple[int, int], ...]
Ids = tuple[int, ...]


def cut_middle(context: Ids, question: Ids, spans: Spans, length: int) -> tuple[Ids, Spans]:
    """Cut the context's middle out, so that the prompt's first and last length // 2 tokens stay.

    If the question is longer than that, it stays whole, and the context's start fills the rest. Source:
    LongBench (arXiv:2308.14508), pred.py.
    """
    if len(context) + len(question) <= length:
        return context, spans
    left = min(length // 2, length - len(question))
    right = len(context) - max(length // 2 - len(question), 0)
    kept = [span for span in spans if span[1] <= left]
    kept += [(a - right + left, b - right + left) for a, b in spans if a >= right]
    return context[:left] + context[right:], tuple(kept)


def cut_end(context: Ids, spans: Spans, length: int) -> tuple[Ids, Spans]:
    """Cut a context to its first `length` tokens, and its spans to those that lie in them."""
    return context[:length], tuple(span for span in spans if span[1] <= length)

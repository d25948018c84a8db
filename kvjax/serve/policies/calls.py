"""What happens to a request's slots while it waits for another program."""

from __future__ import annotations

from kvjax.serve.grammar.words import Calls, Discarded, LeastWaste, Preserved, Swapped
from kvjax.serve.requests import RequestProgress
from kvjax.serve.view import PolicyView


def during_call(
    word: Calls, view: PolicyView, entry: RequestProgress, seconds: float
) -> Preserved | Discarded | Swapped:
    """Which of the three a request does during a call of `seconds` seconds, as predicted.

    LAMPS (arXiv:2410.18248, equations 1 to 3, after InferCept, arXiv:2402.01869): preserved slots are held in
    vain for the call; reading them again holds them and those of all others, which wait for it; moving them
    out and back holds the batch twice.

    >>> from kvjax.serve.requests import Request
    >>> one = RequestProgress(Request(0, 0.0, 100, 9), stored=100)
    >>> view = PolicyView(0.0, 16, 9, 9, [], [], [one], [], [], match=None, gives=None)
    >>> [during_call(LeastWaste(1000, 100), view, one, seconds) for seconds in (0.05, 5.0)]
    [Preserved(), Discarded()]
    """
    if not isinstance(word, LeastWaste):
        return word
    slots = entry.slots
    batch = slots + sum(one.slots for one in (*view.writing, *view.reading) if one is not entry)
    waste = {
        Preserved(): seconds * slots,
        Swapped(): 2 * slots / word.moved * batch,
        Discarded(): slots / word.read * batch,
    }
    return min(waste, key=lambda word: waste[word])

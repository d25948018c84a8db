"""How many pages a request holds for a number of tokens, by the system's place word."""

from __future__ import annotations

from kvjax.serve.grammar.words import Blocks, Place, Spans
from kvjax.serve.requests import Request, RequestProgress


def power_of_two(least: int) -> int:
    """Find the smallest power of two from `least` up.

    >>> power_of_two(5), power_of_two(8)
    (8, 8)
    """
    return 1 << (least - 1).bit_length()


def room(place: Place, request: Request, tokens: int) -> int:
    """How many tokens are reserved for a request when it stores `tokens`.

    >>> from kvjax.serve.grammar.words import Lanes
    >>> room(Lanes("predicted"), Request(0, 0.0, 10, 100, predicted=4), 10)
    14
    """
    if isinstance(place, Blocks):
        return tokens
    if isinstance(place, Spans):
        return tokens + place.ahead
    if place.room == "max":
        return max(place.longest, tokens)
    if place.room == "oracle":
        return request.prompt + request.output
    if place.room == "pow2":
        return request.prompt + power_of_two(request.output)
    return request.prompt + power_of_two(max(request.expected, tokens - request.prompt))


def pages(place: Place, request: Request, tokens: int) -> int:
    """Pages that a request has when it stores `tokens`."""
    if request.holding is not None:
        return request.holding.pages(room(place, request, tokens))
    return -(-room(place, request, tokens) // place.page)


def capacity(place: Place, request: Request, held: int) -> int:
    """Return the largest number of tokens that `held` pages of a request hold."""
    most = held * place.page if request.holding is None else request.holding.tokens(held)
    return most - place.ahead if isinstance(place, Spans) else most


def extra(place: Place, entry: RequestProgress) -> int:
    """Pages that an entry must take to store one more token."""
    if entry.slots < capacity(place, entry.request, entry.held):
        return 0
    return pages(place, entry.request, entry.slots + 1) - entry.held

"""A prompt on a chain of devices, each of which reads a part of it and hands keys and values to the next."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from kvjax.serve.sim.costs import Costs

# Layers of the model: a device waits for one layer's keys and values at a time.
LAYERS = 32
# Partitions that are tried, from equal numbers of tokens to equal seconds of every device.
TRIED = 9


def chain_seconds(costs: Costs, parts: list[int], layers: int = LAYERS) -> float:
    """Seconds until the last device has read its part of the prompt; parts: tokens of each device.

    KV-Runahead (arXiv:2405.05329), section 3: in every layer a device gets the keys and values of all tokens
    before its own from the device before it, adds its own, hands them on, and attends.

    >>> costs = Costs("by hand", 0.0, 0.0, 0.0, token=1.0, pair=0.0, move=0.0, memory=1.0, slot_bytes=1.0)
    >>> chain_seconds(costs, [6, 2], layers=4), chain_seconds(costs, [4, 4], layers=4)
    (5.0, 4.0)
    """
    ends = [0.0] * (layers + 1)
    arrived, before = [0.0] * layers, 0
    for tokens in parts:
        pairs = tokens * before + tokens * (tokens + 1) // 2
        each = costs.seconds(tokens, before + tokens, pairs) / layers
        mine = [0.0]
        for layer in range(layers):
            mine.append(max(mine[-1], arrived[layer]) + each)
        ends, before = mine, before + tokens
        # A layer's keys and values exist as soon as the layer below it has ended; a link takes one at a time.
        hop, free, given = before * costs.move / layers, 0.0, []
        for layer in range(layers):
            free = max(mine[layer], arrived[layer], free) + hop
            given.append(free)
        arrived = given
    return ends[-1]


def even(tokens: int, devices: int) -> list[int]:
    """As many tokens for every device, as far as possible."""
    cuts = [tokens * i // devices for i in range(devices + 1)]
    return [b - a for a, b in zip(cuts, cuts[1:], strict=False)]


def balanced(costs: Costs, tokens: int, devices: int) -> list[int]:
    """As many seconds for every device, as far as possible: later ones have more pairs, so fewer tokens."""

    def alone(tokens: int, before: int) -> float:
        return costs.seconds(tokens, before + tokens, tokens * before + tokens * (tokens + 1) // 2)

    def filled(limit: float) -> list[int]:
        found, before = [], 0
        for _ in range(devices):
            low, high = 0, tokens - before
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if alone(middle, before) <= limit else (low, middle - 1)
            found.append(low)
            before += low
        return found

    low, high = 0.0, alone(tokens, 0)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(filled(middle)) == tokens else (middle, high)
    return filled(high)


@lru_cache(4096)
def searched(costs: Costs, tokens: int, devices: int) -> float:
    """Seconds under the best of `TRIED` partitions between `even` and `balanced`."""
    one, other = even(tokens, devices), balanced(costs, tokens, devices)
    found = []
    for i in range(TRIED):
        share = i / (TRIED - 1)
        ends = [
            round((1 - share) * a + share * b)
            for a, b in zip(accumulate(one), accumulate(other), strict=True)
        ]
        parts = [b - a for a, b in zip([0, *ends], ends, strict=False)]
        found.append(chain_seconds(costs, parts))
    return min(found)

"""The largest batch and context that fit, by bisection, with temporaries as compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvjax.mesh.on_mesh import OnMesh
from kvjax.plan.sizes import DeviceSizes

MOST_ROWS, MOST_TOKENS, TOKENS = 2**20, 2**27, 1024
# How many times the search is repeated if the compiler does not confirm its answer, and the relative
# precision of a context.
TRIALS, NEAR = 3, 0.01
# (batch, context) -> what compiling a step for them says: `kvjax.plan.compiling.compiled`.
Compile = Callable[[int, int], dict[str, Any]]


class Overhead(NamedTuple):
    """Bytes beside weights and cache on one device, in a program of that batch and context."""

    batch: int
    context: int
    bytes: int


class Largest(NamedTuple):
    """rows, tokens: how many fit; 0 for none. confirmed: whether the compiler confirms it."""

    rows: int
    tokens: int
    confirmed: bool


def beside(batch: int, context: int, found: dict[str, Any]) -> Overhead | None:
    """Count the bytes of a compiled program beside its weights and cache; None if not known."""
    needs = found.get("needs")
    return (
        None if needs is None else Overhead(batch, context, max(needs - found["weights"] - found["cache"], 0))
    )


class Search:
    """What fits, by size: memory beside weights and cache is assumed to grow like the cache."""

    def __init__(self, sizes: DeviceSizes, on: OnMesh, memory: int, measured: Overhead | None):
        self.sizes, self.on, self.memory, self.measured = sizes, on, memory, measured
        self.weights = sizes.weights(on)

    def needs(self, batch: int, context: int) -> int:
        """Estimate the bytes per device of a step with that batch and context."""
        cache = self.sizes.cache(self.on, batch, context)
        if self.measured is None:
            return self.weights + cache
        then = self.sizes.cache(self.on, self.measured.batch, self.measured.context)
        return self.weights + cache + round(self.measured.bytes * cache / max(then, 1))

    def rows(self, context: int) -> int:
        """Find the largest number of rows of `context` tokens that fit, with equally many on every device."""
        each = self.on.devices("batch")
        return each * last(lambda n: self.needs(each * n, context) <= self.memory, MOST_ROWS // each)

    def tokens(self, batch: int) -> int:
        """Find the longest context of `batch` rows that fits, in steps of 1024 tokens and to one percent."""

        def free(n: int) -> int:
            return self.memory - self.needs(batch, TOKENS * n)

        # Nearly all caches grow by the same bytes per token, which saves most traces.
        few, many = 16, 64
        each = (free(few) - free(many)) / (many - few)
        guess = int(few + free(few) / each) if each > 0 else 1
        return TOKENS * last(lambda n: free(n) >= 0, MOST_TOKENS // TOKENS, NEAR, max(guess, 1))


def last(fits: Callable[[int], bool], most: int, near: float = 0.0, guess: int = 1) -> int:
    """Find the last of 1 .. most that fits, if all below it do; 0 if none does.

    near: the relative precision. guess: where the search starts.

    >>> last(lambda n: n * n <= 50, 100)
    7
    """
    step = max(round(near * guess), 1)
    low = high = min(guess, most)
    if fits(low):
        high = low + step
        while high <= most and fits(high):
            low, step = high, 2 * step
            high = low + step
        high = min(high, most + 1)
    else:
        low = max(high - step, 0)
        while low and not fits(low):
            high, step = low, 2 * step
            low = max(high - step, 0)
    while high - low > max(1, near * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_rows(search: Search, context: int, compile: Compile | None) -> Largest:
    """Find the most rows of that context; `compile`, if given, compiles a step of them to see they fit."""
    return _confirmed(search, lambda s: (s.rows(context), context), compile)


def largest_tokens(search: Search, batch: int, compile: Compile | None) -> Largest:
    """Find the longest context of `batch` rows; `compile`, if given, compiles a step to see that it fits."""
    return _confirmed(search, lambda s: (batch, s.tokens(batch)), compile)


def _confirmed(search: Search, find: Callable[[Search], tuple[int, int]], compile: Compile | None) -> Largest:
    rows, tokens = find(search)
    for _ in range(TRIALS if compile is not None else 0):
        if not (rows and tokens):
            break
        assert compile is not None
        found = compile(rows, tokens)
        if "error" not in found and found["needs"] <= search.memory:
            return Largest(rows, tokens, True)
        more = beside(rows, tokens, found)
        if more is None or not more.bytes:
            break
        search = Search(search.sizes, search.on, search.memory, more)
        rows, tokens = find(search)
    return Largest(rows, tokens, False) if rows and tokens else Largest(0, 0, False)

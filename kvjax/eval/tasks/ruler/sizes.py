"""How long a context may be: the largest size whose prompt fits."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool], least: int, most: int, guess: int) -> int | None:
    """Find the largest size from `least` to `most` that fits, near `guess`; None if `least` does not.

    Sizes are tried from the guess on in doubling steps, then between the last two.

    >>> largest(lambda size: size <= 700, 1, 10**6, 100), largest(lambda size: size < 5, 5, 9, 7)
    (700, None)
    """

    def good(size: int) -> bool:
        return size <= most and fits(size)

    low = high = min(max(guess, least), most)
    jump = 1
    if good(low):
        while good(high := low + jump):
            low, jump = high, 2 * jump
    else:
        while not good(low):
            if low == least:
                return None
            high, low, jump = low, max(low - jump, least), 2 * jump
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low

"""`Holding`: how many tokens of a request a number of pages holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holding:
    """How many tokens a request's pages hold.

    page: tokens of a page. Codes of fewer bits put more tokens into the same bytes.

    plain: 0, or tokens that a page holds uncoded, for methods that do not code the newest. Then `residual`
    to residual + granule - 1 tokens are uncoded, and lie in the first pages, in a ring; older ones are coded
    `granule` at a time.

    >>> Holding(16).pages(40), Holding(16).tokens(3)
    (3, 48)
    >>> kivi = Holding(64, plain=16, residual=32, granule=32)
    >>> [kivi.pages(n) for n in (16, 63, 64, 127, 128)], kivi.tokens(5)
    ([1, 4, 5, 5, 6], 127)
    """

    page: int
    plain: int = 0
    residual: int = 0
    granule: int = 1

    @property
    def ring(self) -> int:
        """The most uncoded tokens, the newest one included before the oldest ones are coded."""
        return self.residual + self.granule if self.plain else 0

    @property
    def first(self) -> int:
        """How many pages hold uncoded tokens; they come before those of codes."""
        return -(-self.ring // self.plain) if self.plain else 0

    def coded(self, tokens: int) -> int:
        """How many of a request's tokens are coded."""
        return max(tokens - self.residual, 0) // self.granule * self.granule

    def pages(self, tokens: int) -> int:
        """How many pages hold `tokens` tokens."""
        if not self.plain:
            return -(-tokens // self.page)
        return min(-(-tokens // self.plain), self.first) - (-self.coded(tokens) // self.page)

    def tokens(self, pages: int) -> int:
        """Return the largest number of tokens that so many pages hold."""
        if not self.plain:
            return pages * self.page
        if pages < self.first:
            return pages * self.plain
        return (pages - self.first) * self.page + self.ring - 1

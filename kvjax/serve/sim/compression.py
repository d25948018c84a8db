"""What a method changes for a server, in three numbers."""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.base.errors import InputError


@dataclass(frozen=True)
class Compression:
    """A method as the calendar sees it; the default is the full cache.

    bytes: of a slot, as a share of the full cache's. slots: of a prompt that stay at its end, as a share
    (float in (0, 1]) or a number (int). again: how often a prompt is read again, over itself, to choose them.
    Of a prompt that is being read, and of written tokens, every slot stays.

    Raises InputError for numbers out of range.

    >>> Compression(slots=0.25).left(1022), Compression(slots=64).left(1022)
    (255, 64)
    """

    bytes: float = 1.0
    slots: float | int = 1.0
    again: int = 0

    def __post_init__(self) -> None:
        whole = isinstance(self.slots, int) and self.slots >= 1
        if not (0 < self.bytes and (whole or 0 < self.slots <= 1) and self.again >= 0):
            raise InputError(
                f"a compression has bytes={self.bytes}, slots={self.slots} and again={self.again}, expected "
                "a share above 0, a share in (0, 1] or a number of slots, and a number from 0 up"
            )

    @property
    def keeps_all(self) -> bool:
        """Whether every slot of a prompt stays."""
        return isinstance(self.slots, float) and self.slots == 1

    def left(self, prompt: int) -> int:
        """Slots that stay of a prompt of so many tokens."""
        if isinstance(self.slots, int):
            return min(self.slots, prompt)
        return max(1, int(self.slots * prompt))

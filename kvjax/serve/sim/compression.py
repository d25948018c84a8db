"""A method as three numbers for a simulator: bytes of a slot, slots that stay, and further readings."""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.base.errors import InputError


@dataclass(frozen=True)
class Compression:
    """What a method changes in a simulation; the default is the full cache.

    bytes: the bytes of a slot, as a share of the full cache's. slots: how many slots of a prompt stay at its
    end, as a share (float in (0, 1]) or a number (int). again: how often the method reads a prompt again,
    with attention to the first reading, before it selects slots. While a prompt is read, all its slots stay;
    those of generated tokens always stay.

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
        """How many slots stay of a prompt of `prompt` tokens."""
        if isinstance(self.slots, int):
            return min(self.slots, prompt)
        return max(1, int(self.slots * prompt))

"""The tensors of one module of a quantised checkpoint, and errors about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvjax.base.errors import InputError
from kvjax.models.files import Stored
from kvjax.models.quantised.matrices import BlockNumbers, Matrix, Plain


class Module(NamedTuple):
    """A module's tensors by the last part of their names ("qweight", "scales", ...)."""

    name: str
    parts: Mapping[str, Stored]

    def need(self, *names: str) -> Stored:
        """Find the part with the first of these names that exists. Raises InputError if none does."""
        for name in names:
            if name in self.parts:
                return self.parts[name]
        there = ", ".join(sorted(self.parts))
        raise InputError(
            f"{self.name} is quantised and lacks {' or '.join(names)} (it has {there}): fetch the checkpoint "
            "again"
        )

    def check(self, part: Stored, shapes: tuple[tuple[int, ...], ...], *kinds: str) -> Stored:
        """Check and return `part`; InputError unless it has one of the shapes and, if given, dtypes."""
        if part.shape in shapes and (not kinds or part.dtype in kinds):
            return part
        expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise InputError(
            f"{part.name} has the shape {list(part.shape)} and dtype {part.dtype}, expected {expected}"
            f"{' of ' + ' or '.join(kinds) if kinds else ''}: fetch the checkpoint again, or correct the "
            "quantization_config in config.json"
        )

    def matrix(self, part: Stored, *kinds: str) -> tuple[int, int]:
        """Return the shape of a part that must be a matrix of one of the dtypes; else InputError."""
        if len(part.shape) == 2 and part.dtype in kinds:
            return part.shape[0], part.shape[1]
        raise InputError(
            f"{part.name} has the shape {list(part.shape)} and dtype {part.dtype}, expected a matrix of "
            f"{' or '.join(kinds)}: fetch the checkpoint again"
        )

    def spread(
        self,
        part: Stored,
        shape: tuple[int, int],
        block: tuple[int, int] | None = None,
        numbers: Matrix | None = None,
        groups: Stored | None = None,
    ) -> BlockNumbers:
        """One number per tensor, per row, or per block where one is given, as the shape of `part` says.

        numbers: the decoded content of `part`, if it is encoded. Raises InputError for any other shape.
        """
        n, k = shape
        if block is None:
            self.check(part, ((), (1,), (1, 1), (n,), (n, 1)))
            block = (1 if part.shape and part.shape[0] == n else n, k)
        else:
            self.check(part, ((-(-n // block[0]), -(-k // block[1])),))
        return BlockNumbers(Plain(part) if numbers is None else numbers, shape, block, groups)

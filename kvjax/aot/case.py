"""A case: a program to compile for a TPU that need not be present."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jax.experimental.layout import Layout


class Case(NamedTuple):
    """A program, its operands' shapes, and what it must move and compute.

    run: a function of arrays like `operands`. bytes: that one run must read and write. flops: of its matrix
    products. cache: bytes of the cache among the operands, which XLA must not copy or move out of HBM; 0 if
    there is none, as in self-attention of a prompt, whose operands XLA may copy and move into VMEM. relaid:
    bytes of results as long as the cache, such as attention mass, whose layout XLA may change. kernel: the
    name of the Pallas call. trips: how often the code at each loop depth of the kernel runs. profiles:
    whether the compiler can simulate it; it aborts on manual copies whose sources it cannot determine.
    donated: indices of the operands whose memory the program may reuse. branches: how often the largest
    conditional parts of the outermost loop run, in their order; other code counts as always run. leaf: bytes
    of the keys of one layer, if copies of that size are checked for; 0 to check for those of `cache`.
    layouts: of operands, by index, whose layout is not the compiler's default, or a function from a leaf to
    its layout.
    """

    run: Callable[..., Any]
    operands: tuple[Any, ...]
    bytes: int
    flops: int
    cache: int
    kernel: str
    trips: dict[str, int]
    profiles: bool = True
    donated: tuple[int, ...] = ()
    branches: tuple[int, ...] = ()
    relaid: int = 0
    leaf: int = 0
    layouts: Mapping[int, Layout | Callable[[Any], Layout | None]] = MappingProxyType({})

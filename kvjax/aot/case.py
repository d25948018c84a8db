"""What a case is: a program to compile for a TPU that is not there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jax.experimental.layout import Layout


class Case(NamedTuple):
    """A program, its operands' shapes, and what it must move and compute.

    run: takes arrays of `operands`. bytes: what one run must read and write. flops: of its matrix products.
    cache: bytes of the cache among the operands, which must stay where it is in HBM; 0 where there is none,
    as in a prompt over itself, whose operands XLA may copy and move into VMEM. relaid: bytes of results as
    long as the cache, such as masses, that XLA may lay out once more. kernel: the name of the Pallas call.
    trips: how often the code at each loop depth of the kernel runs. profiles: whether the compiler can
    simulate it; it aborts on copies by hand whose sources it cannot tell. donated: places of the operands
    that the program may reuse. branches: how often the largest conditional parts of the outermost loop run,
    in their order; other code counts as if it always ran.
    leaf: bytes of the keys of one layer, where their copies are asked for; 0 where those of `cache` are.
    layouts: of operands, by place, that do not come in the compiler's default, or such a function of a leaf.
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

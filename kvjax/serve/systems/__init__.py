"""Serving systems: one short function per paper, and how to build one from a text."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from typing import Any

from kvjax.base.errors import InputError
from kvjax.serve.grammar import System
from kvjax.serve.systems import devices, iterations, prefixes, static
from kvjax.serve.systems.kernels import KERNELS
from kvjax.serve.systems.papers import collect

SYSTEMS = collect(static, iterations, prefixes, devices)


def resolve(id: str) -> str:
    """Resolve a system's id, in any case and with _ for -. Raises InputError, with the nearest, for others.

    >>> resolve("Multi_Bin_Batching")
    'multi-bin-batching'
    """
    name = id.lower().replace("_", "-")
    if name in KERNELS:
        raise InputError(
            f"{name} is a way to compute and has no policy that schedules requests (`kvjax systems {name}`): "
            f"take one of {', '.join(SYSTEMS)}"
        )
    if name not in SYSTEMS:
        near = difflib.get_close_matches(name, SYSTEMS, 1)
        hint = f"did you mean {near[0]}?" if near else f"known systems: {', '.join(SYSTEMS)}"
        raise InputError(f"unknown system {id!r}: {hint}")
    return name


def system(text: str) -> System:
    """Build the system of a text: an id, and numbers in brackets.

    Args:
        text: such as "vllm" or "sarathi(tokens=256)".

    Raises:
        InputError: for an unknown id or number, with the nearest one, and for a text of another form.

    >>> system("sarathi(tokens=256)").batch
    Chunked(tokens=256, rows=256)
    """
    found = re.fullmatch(r"\s*([\w-]+)\s*(\(.*\))?\s*", text, re.DOTALL)
    if found is None:
        raise InputError(f"{text!r} is no system, expected one such as vllm(page=16)")
    id = resolve(found[1])
    return SYSTEMS[id](**_numbers(id, found[2] or "()"))


def _numbers(id: str, given: str) -> dict[str, Any]:
    """Parse the arguments between brackets, by name."""
    try:
        call = ast.parse(f"f{given}", mode="eval").body
        assert isinstance(call, ast.Call) and not call.args
        numbers = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    except (SyntaxError, ValueError, AssertionError) as error:
        raise InputError(f"{id}{given} cannot be read, expected names with numbers: {id}(rows=64)") from error
    known = inspect.signature(SYSTEMS[id]).parameters
    for name, value in numbers.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
            raise InputError(f"system {id} has no {name!r}: {hint}")
        if type(value) is not int or value < 1:
            raise InputError(f"system {id} was given {name}={value!r}, expected a whole number from 1 up")
    return numbers

"""Checks of numbers in a config.json: which settings are numbers, and which must be positive."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvjax.base.errors import InputError

# Settings of some or all families that must be above zero.
_POSITIVE = (
    "rope_theta",
    "rope_local_base_freq",
    "query_pre_attn_scalar",
    "sliding_window",
    "sliding_window_pattern",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "partial_rotary_factor",
)


def check_numbers(defaults: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Raise InputError if a setting is not a number although its default is, or not positive but must be."""
    names = [name for name, default in defaults.items() if is_number(default)]
    for name in dict.fromkeys((*names, *_POSITIVE)):
        value = data.get(name)
        if value is None or (name == "sliding_window_pattern" and _is_pattern(value)):
            continue
        if not is_number(value):
            raise InputError(f"config.json gives {name} = {value!r}, expected a number")
        if name in _POSITIVE and value <= 0:
            raise InputError(f"config.json gives {name} = {value!r}, expected a number above 0")


def _is_pattern(value: Any) -> bool:
    """Whether layers with and without windows are given as letters (Exaone 4)."""
    return isinstance(value, str) and bool(value) and {*value} <= {"L", "G"}


def size(data: Mapping[str, Any], key: str) -> int:
    """Read a setting that is a count; InputError unless it is a positive integer."""
    value = data.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"config.json gives {key} = {value!r}, expected a positive whole number")
    return value


def int_if_whole(x: float) -> int | float:
    """Convert whole floats to int: transformers 5.24 refuses a float in an integer field."""
    return int(x) if float(x).is_integer() else x


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

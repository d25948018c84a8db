"""Numbers of a config.json: which settings are numbers, which of them must be above zero."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvjax.base.errors import InputError

# Settings of some or all families that make no sense at zero or below.
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
    """InputError where a setting whose default is a number, or that must be above zero, is something else."""
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
    """Whether layers with windows and without are given as letters (Exaone 4)."""
    return isinstance(value, str) and bool(value) and {*value} <= {"L", "G"}


def size(data: Mapping[str, Any], key: str) -> int:
    """A setting that counts something; InputError unless it is a positive whole number."""
    value = data.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"config.json gives {key} = {value!r}, expected a positive whole number")
    return value


def int_if_whole(x: float) -> int | float:
    """Makes x an int where it is whole: transformers 5.24 refuses a float in a field of whole numbers."""
    return int(x) if float(x).is_integer() else x


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

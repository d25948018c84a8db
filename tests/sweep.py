"""Parameter sweeps of which a few cases run every time."""

from collections.abc import Iterable

import pytest


def sweep(cases: Iterable, *always):
    """Parameters for `cases`: those in `always` run every time, the others are marked `rotating`.

    A case that is a tuple is the values of several arguments.
    """
    cases = list(cases)
    unknown = [case for case in always if case not in cases]
    if unknown:
        raise ValueError(f"{unknown} are none of the cases")
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=_marks(case in always))
        for case in cases
    ]


def _marks(always):
    return () if always else pytest.mark.rotating

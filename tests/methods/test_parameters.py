"""Hyper-parameters: every one says which values it may take, and others are refused in one sentence."""

import math
import re
import textwrap

import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.grammar import Budget
from kvjax.methods import METHODS, takes_budget
from kvjax.methods.parameters import is_type, signature_of, types_of
from kvjax.methods.parse import parse_method
from kvjax.methods.user import from_file
from kvjax.pure import bind
from tests.methods.golden import model

PARAMETERS = [(id, name) for id in METHODS for name in signature_of(METHODS[id]).parameters]
# Of these, every hyper-parameter takes some and refuses others, whatever its type.
STRANGE = [-1, 0, 1, 5, 8, 8.5, -0.5, 2.0, 1e30, math.nan, math.inf, True, None, "x", b"", [1], (-1,), {}]
NEVER = (b"", {})
WRONG = {
    "filter_layer": (-1, 1.5, 0.0, 1.0, True, "8"),
    "tsp_layer": (-1, 1.5, 0.0, 1.0, True, "8"),
    "window": (0, -3, 8.5, math.nan, True, "8", None),
    "lag": (0, 1, -1, 2.5),
    "kernel": (0, 4, -1, 2.5),
    "page": (0, -1, 1.5),
    "beta": (0, 0.5, -1, math.inf, math.nan),
    "group": (0, -1, 2.5),
    "residual": (-5, 0.5),
    "budget": (0, -1, 0.0, 1.5, math.nan, math.inf, "0.5", None, True, [0.5]),
    "sinks": (-1, 0.5),
    "recent": (2.0, -0.1, 8, math.nan),
    "floor": (2, -0.5),
    "blend": (-1, 101.0, math.nan, "x"),
    "tau": (-0.5, 101.0, math.nan),
    "chunk": (0, 2.5, True),
    "heads": (0, -1, 2.5),
    "keys": (0, -0.5, 1.5, math.nan),
    "tau1": (0, -1.0, 101, math.nan),
    "threshold": (500, -200),
    "fitted": (5, "", b"x"),
    "task": ("mine", 1, None),
    "decay": (0.0, 1.5, math.nan, True),
    "newest": (-1, 0.5, True),
    "forgetting": (0.0, 1.0, math.nan, True),
    "fading": (0.0, 1.5, math.nan, True, None),
    "bonus": (0.0, 10.5, math.nan, True, None),
    "future": (0, -5),
    "epsilon": (math.nan, -1.0),
    "bits": (5, 0, 2.0, True),
    "code_bits": (0, 9, 2.5, True),
    "signs": (0, 65, 1.5, None),
    "farthest": (0, -1, 2.5),
    "recency": (0.5, 101, math.nan),
    "variant": ("mine", 1),
    "fusion": ("mean", 1, None),
    "step": (1, 65, 2.5),
    "kept": (0, 64, 1.5, None),
    "kind": ("e3m4",),
    "clip": (0, -0.5, 1.5, math.nan, True, None),
    "ranks": ("mine", 1),
    "resident": (-0.5, 1.5, math.nan, True),
    "rank": (0, -1, 2.5, True, None),
    "turns": (0, 101, 2.5, None),
    "sketch": (0, "yes", None),
    "seed": (-1, 2**32, 0.5),
    "skip_layers": (-1, 1.5),
    "channels": (0, -1, 2.5),
    "planes": (0, 33, 2.5, True),
    "tables": (1, 4097, 2.5, None),
    "prefix": ((-1,), (0.5,), 5, "abc", (1, True)),
    "height": (0, 7, 1.5, True),
    "contexts": ((0,), (-1, 2), (0.5,), 5, "abc"),
    "scale": (0.0, 2.5, math.nan, True),
    "tensor": (0.0, -1.0, math.nan, math.inf, True),
    "normalised": (1, "yes"),
    "over": ("all", 1),
    "covariance": (0,),
    "value_norm": (1.0,),
}  # fmt: skip


def wrong_of(id, name):
    """Values that a hyper-parameter refuses, by its name, by that of another one of its type, or by any."""
    mine = types_of(METHODS[id])[name]
    alike = (other for at, other in PARAMETERS if types_of(METHODS[at])[other] == mine and other in WRONG)
    return WRONG.get(name) or WRONG.get(next(alike, ""), NEVER)


def make(id, **hyper):
    return kvjax.method(id, **({"budget": 0.5} if takes_budget(id) else {}) | hyper)


@pytest.mark.parametrize(("id", "name"), PARAMETERS)
def test_every_hyper_parameter_says_which_values_it_takes_and_refuses_others(id, name):
    assert is_type(types_of(METHODS[id])[name]), f"give {name} of {id} a type of kvjax/methods/shared.py"
    for value in wrong_of(id, name):
        message = f"{id}: {name} must be .*, got "
        with pytest.raises(InputError, match=message):
            make(id, **{name: value})
        given = signature_of(METHODS[id]).parameters
        with pytest.raises(InputError, match=message):
            METHODS[id](**({"budget": 0.5} if "budget" in given else {}) | {name: value})


@pytest.mark.parametrize(("id", "name"), PARAMETERS)
def test_no_value_ends_in_another_error(id, name):
    for value in STRANGE:
        try:
            assert hash(make(id, **{name: value})) is not None
        except ValueError as error:
            small = rf"{id} cannot work: .* must stay .* raise the budget" if name == "budget" else "$."
            small = "x does not exist" if name == "fitted" else small
            # A value that does not go with another one's default may name either.
            names = "|".join(signature_of(METHODS[id]).parameters)
            assert re.match(rf"{id}: ({names}) must be |{small}", str(error)) and "\n" not in str(error)


@pytest.mark.parametrize("id", METHODS)
def test_the_defaults_are_values_that_are_taken(id):
    given = signature_of(METHODS[id]).parameters.items()
    defaults = {name: p.default for name, p in given if p.default is not p.empty}
    assert (make(id, **defaults).keep, make(id, **defaults).store) == (make(id).keep, make(id).store)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("snapkv:window=0", "snapkv: window must be a whole number >= 1, got 0"),
        ("snapkv:window=8.5", "snapkv: window must be a whole number >= 1, got 8.5"),
        ("snapkv:window=99999999999", "snapkv: window must be at most 2147483647, as positions are, got 9"),
        ("adakv:page=99999999", "adakv: page must be a whole number from 1 to 65536, or None, got 99999999"),
        ("snapkv:kernel=4", "snapkv: kernel must be an odd whole number >= 1, got 4"),
        ("adakv:floor=2", "adakv: floor must be a number from 0 to 1, got 2"),
        ("int4:group=0", "int4: group must be a whole number >= 1, or None, got 0"),
        ("kvzip:prefix=5", "kvzip: prefix must be a tuple of whole numbers >= 0, or None, got 5"),
        ("kvzip:normalised=1", "kvzip: normalised must be True or False, got 1"),
        ("snapkv:budget=x", "snapkv: budget must be a fraction .*, got 'x'"),
    ],
)
def test_the_command_line_refuses_a_value_when_it_reads_it(text, message):
    with pytest.raises(InputError, match=message):
        parse_method(text)


def test_numpy_scalars_are_pythons():
    assert make("snapkv", budget=np.int64(16), window=np.int32(8)) is make("snapkv", budget=16, window=8)
    assert make("adakv", budget=np.float64(0.25), floor=np.float32(0.5)) is make(
        "adakv", budget=0.25, floor=0.5
    )
    assert Budget(np.int64(3)) == Budget(3) and type(Budget(np.int64(3)).amount) is int
    assert make("kvzip", prefix=np.array([1, 2])).keep.probe.prefix == (1, 2)
    assert make("kvzip", prefix=[1, 2]) is make("kvzip", prefix=(1, 2))


def test_a_share_of_one_is_everything_whether_it_is_written_as_1_or_as_1_0():
    assert make("h2o", recent=1) is make("h2o", recent=1.0)
    assert make("h2o", recent=1).keep.protect[0].tokens == 1.0


def test_a_budget_of_one_slot_is_not_a_budget_of_everything():
    assert Budget(1) != Budget(1.0)
    one, all = make("h2o", budget=1), make("h2o", budget=1.0)
    assert (type(one.keep.budget.amount), type(all.keep.budget.amount)) == (int, float) and one != all


def test_an_instruction_outside_the_vocabulary_is_refused_where_the_model_is_known():
    m = model("groups")
    with pytest.raises(InputError, match=r"kvzip: prefix has token id 64, outside the vocabulary \[0, 64\)"):
        bind(make("kvzip", prefix=(5, 64)), m)
    assert bind(make("kvzip", prefix=(5, 63)), m).keep.probe.prefix == (5, 63)


def test_types_in_a_file_of_ones_own_are_read(tmp_path):
    file = tmp_path / "mine.py"
    source = """
        from __future__ import annotations
        from typing import Annotated
        from kvjax.methods import snapkv
        from kvjax.methods.parameters import Range

        def short(budget, size: Annotated[int, Range(2, 8)] = 4, other: NotDefined = 3):
            return snapkv(budget, window=size)

        def typed(budget, size: Annotated[int, Range(2, 8)] = 4):
            return snapkv(budget, window=size)
    """
    file.write_text(textwrap.dedent(source))
    with pytest.raises(InputError, match=r"mine\.py:typed: size must be a whole number from 2 to 8, got 9"):
        from_file(f"{file}:typed", budget=0.5, size=9)
    assert from_file(f"{file}:typed", budget=np.float64(0.5), size=np.int64(3)).spec[1] == (
        ("budget", 0.5),
        ("size", 3),
    )
    # Annotations that cannot be read say nothing.
    assert from_file(f"{file}:short", budget=0.5, size=9).keep.protect[0].tokens == 9


def test_a_method_of_a_file_is_named_where_a_method_is(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from kvjax.methods import snapkv\ndef short(budget): return snapkv(budget, window=8)\n")
    assert kvjax.method(f"{file}:short", budget=0.5) == from_file(f"{file}:short", budget=0.5)
    with pytest.raises(InputError, match="names a file but no function, expected .*mine.py:my_method"):
        kvjax.method(str(file))

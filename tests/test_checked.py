"""The checks of annotations under which every test runs."""

from typing import TYPE_CHECKING

import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

from kvjax.ops.base.largest import largest
from tests import checked


@checked
def added(a: Float[Array, "B T"], b: Float[Array, "T"]) -> Float[Array, "B T"]:
    return a + b[None]


@checked
def halves(a: Float[Array, "B T"]) -> Float[Array, "B T"]:
    return a[:, ::2]


if TYPE_CHECKING:
    from somewhere import Name


@checked
def times(a: Float[Array, "B T"], n: int, name: "Name" = None) -> Float[Array, "B T"]:
    return n * a


@checked
def doubled(n: int) -> int:
    return 2 * n


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


def test_lengths_agree_among_arguments_and_with_the_result():
    assert added(ones(2, 3), ones(3)).shape == (2, 3)
    with pytest.raises(TypeError, match="B T"):
        halves(ones(2, 4))
    for wrong in ((ones(2, 3), ones(2)), (ones(2, 3), ones(3, 1)), (ones(2, 3), ones(3).astype(int))):
        with pytest.raises(TypeError, match="violates type hint"):
            added(*wrong)


def test_beside_arrays_all_is_checked_but_names_for_type_checkers_alone():
    assert times(ones(2, 3), 3, name=object()).shape == (2, 3)
    with pytest.raises(TypeError, match="violates type hint"):
        times(ones(2, 3), "3")


def test_functions_without_arrays_are_left_to_pyright():
    assert doubled("3") == "33"


def test_the_package_is_under_these_checks():
    with pytest.raises(TypeError, match="violates type hint"):
        largest(ones(4).astype(int), 2)

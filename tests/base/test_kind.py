"""A kind's defaults are inherited by its words and never become defaults of their fields."""

import dataclasses
from abc import abstractmethod

import pytest

from kvjax.base.kind import Kind, undefined


class Window(Kind):
    """A kind with one attribute and one method to define, and one attribute with a default."""

    tokens: int
    newest: int = 7

    @abstractmethod
    def reach(self):
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Whole(Window):
    tokens: int

    def reach(self):
        return self.tokens


@dataclasses.dataclass(frozen=True)
class Given(Whole):
    newest: int
    more: int


@dataclasses.dataclass(frozen=True)
class Again(Given):
    more: int = 3
    tokens: int


@dataclasses.dataclass(frozen=True)
class Bare(Window):
    pass


def test_words_inherit_what_they_do_not_define():
    assert Whole(4).newest == 7 and Whole(4) == Whole(4) and repr(Whole(4)) == "Whole(tokens=4)"


def test_a_field_without_a_default_has_none_though_the_kind_has():
    assert Given(1, 2, 3).newest == 2
    with pytest.raises(TypeError, match="newest"):
        Given(1, more=3)  # type: ignore[call-arg]


def test_fields_of_words_keep_the_defaults_that_dataclasses_give_them():
    assert [f.default for f in dataclasses.fields(Again)] == [dataclasses.MISSING, dataclasses.MISSING, 3]


def test_what_a_word_lacks_is_named():
    assert undefined(Bare) == ("tokens", "reach") and undefined(Whole) == ()

"""Configs as JSON: every architecture comes back, and what does not fit is named."""

import dataclasses
import json
import math
import typing

import pytest

from kvjax.base.ranges import Whole, taken_apart
from kvjax.models.config_json import MIXERS, MLPS, config_from_json, config_to_json
from tests.models.architectures import SMALL, TABLE


@pytest.mark.parametrize("name", TABLE)
def test_every_architecture_comes_back_from_json(name):
    config = TABLE[name].config
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


def test_an_unknown_word_is_named_with_the_nearest():
    data = config_to_json(SMALL) | {"mixers": [{"word": "Latnet"}] * 2}
    with pytest.raises(ValueError, match="'Latnet' is no mixer .the nearest is Latent"):
        config_from_json(data)


def test_fields_that_a_word_does_not_take_are_named():
    data = config_to_json(SMALL) | {"mlps": [{"word": "MoE", "expert": 3}] * 2}
    with pytest.raises(ValueError, match="MoE takes experts, top, width"):
        config_from_json(data)
    with pytest.raises(ValueError, match="fields are not those of a model: .*colour"):
        config_from_json(config_to_json(SMALL) | {"colour": "red"})


WORDS = {
    type(word).__name__: (row.config, name, i)
    for row in TABLE.values()
    for name in ("mixers", "mlps")
    for i, word in enumerate(getattr(row.config, name, ()))
}
# What a field of a plain type refuses; those of `Whole` take 0.
WRONG = {bool: ("no", 1, None), int: (-1, 2.5, "x", True), float: (math.nan, "x", True)}


def test_nearly_every_word_stands_in_an_architecture():
    ours = {n for n, kind in (MIXERS | MLPS).items() if kind.__module__.startswith("kvjax.")}
    assert ours - {*WORDS} <= {"Bidirectional", "MLP", "Dropped"}


@pytest.mark.parametrize("word", WORDS)
def test_fields_of_words_refuse_what_is_no_value_of_them(word):
    config, name, i = WORDS[word]
    words = getattr(config, name)
    hints = typing.get_type_hints(type(words[i]), include_extras=True)
    for field in (f.name for f in dataclasses.fields(words[i])):
        kind = taken_apart(hints[field])
        none = () if taken_apart(Whole).rule == kind.rule else (0,)
        for value in (*WRONG.get(kind.base, ()), *(none if kind.base is int else ())):
            if value is None and kind.optional:
                continue
            wrong = dataclasses.replace(words[i], **{field: value})
            with pytest.raises(ValueError, match=rf"{name}\[{i}\]: {word}\.{field} is .*, expected"):
                dataclasses.replace(config, **{name: (*words[:i], wrong, *words[i + 1 :])})

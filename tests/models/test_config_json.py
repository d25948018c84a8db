"""Configs as JSON: every architecture comes back, and what does not fit is named."""

import json

import pytest

from kvjax.models.config_json import config_from_json, config_to_json
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

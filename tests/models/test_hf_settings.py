"""Settings of a config.json that are missing, mistyped or of another kind are input errors at once."""

import contextlib

import pytest

from kvjax.base.errors import InputError
from kvjax.models.hf_config import config_from_hf
from tests.models.hf_cases import CASES


@pytest.mark.parametrize("name", CASES)
def test_a_mistyped_number_of_layers_is_refused_at_once(name):
    with pytest.raises(InputError, match="num_hidden_layers = 1000000000000, expected at most 10000"):
        config_from_hf(CASES[name] | {"num_hidden_layers": 10**12})


@pytest.mark.rotating
@pytest.mark.parametrize("name", CASES)
def test_whatever_is_wrong_with_a_setting_is_an_input_error(name):
    tried, accepted = 0, 0
    for key in CASES[name].keys() - {"model_type"}:
        rest = {n: x for n, x in CASES[name].items() if n != key}
        for changed in [rest, *(rest | {key: value} for value in ("x", [], {}, -1, 0, 1.5, True, [None]))]:
            tried += 1
            with contextlib.suppress(InputError):
                config_from_hf(changed)
                accepted += 1
    assert 0 < accepted < tried

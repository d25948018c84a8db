"""Names and logical axes of mixers and feed-forwards, those of users among them."""

import dataclasses
import re
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.models import mixers
from kvjax.models.config import Config
from kvjax.models.config_json import MIXERS, config_from_json, config_to_json
from kvjax.models.mixer import Mixer
from kvjax.models.mixers.attention import Attention
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.state.axes import map_axes
from kvjax.state.cache import Cache, GroupState, State

SIZES = dict(vocab=32, d_model=16, layers=2, heads=4, kv_heads=2, head_dim=4, d_ff=24)


@dataclasses.dataclass(frozen=True)
class Unnamed(Attention):
    """Has a parameter that `axes` does not name."""

    def shapes(self, config):
        return super().shapes(config) | {"gain": (config.d_model, 8)}


@dataclasses.dataclass(frozen=True)
class Named(Unnamed):
    """Names it."""

    axes = Attention.axes | {"gain": ("embed", "heads")}


@dataclasses.dataclass(frozen=True)
class Misnamed(Unnamed):
    """Names one axis of two."""

    axes = Attention.axes | {"gain": ("embed",)}


def spread(mixer, rules="tensor", mesh="model=2"):
    config = Config(**SIZES, mixers=(Attention(), mixer))
    return kvjax.spread(Model(config, init(config, jax.random.key(0))), mesh, rules).params["layers"][1]


@pytest.mark.rotating
def test_parameter_without_axes_on_a_mesh_warns():
    with pytest.warns(UserWarning, match="Unnamed.axes does not name gain, so every device holds them whole"):
        params = spread(Unnamed())
    assert params["gain"].sharding.is_fully_replicated and not params["q"].sharding.is_fully_replicated


def test_parameter_with_axes_is_split_in_silence():
    with warnings.catch_warnings(action="error"):
        assert spread(Named())["gain"].sharding.spec == jax.P(None, None, "model")
        spread(Unnamed(), "batch", "data=2")


@dataclasses.dataclass(frozen=True)
class NewState(Attention):
    """Keeps a state of a name that no mixer has."""

    def state(self, config):
        return {"unheard": (2, 4), "S": (2, 4)}


def test_state_without_axes_on_a_mesh_warns():
    with pytest.warns(UserWarning, match="NewState.state_axes does not name unheard, so every device holds"):
        spread(NewState())
    with warnings.catch_warnings(action="error"):
        spread(NewState(), "batch", "data=2")


def test_states_are_split_by_what_mixers_say_beside_them():
    type("Heard", (Mixer,), {"state_axes": {"test_levels": (None, "heads")}, "__module__": __name__})
    data = {name: jnp.zeros((1, 2, 3, 4, 5)) for name in ("test_levels", "nameless")}
    cache = Cache((GroupState((), state=State(data)),), jnp.zeros(2, jnp.int32))
    axes = map_axes(lambda axes, x: axes, cache).groups[0].state.data
    assert axes["test_levels"] == ("layers", "batch", None, "heads", None)
    assert axes["nameless"] == ("layers", "batch", None, None, None)


def test_contradicting_axes_of_a_state_are_refused():
    with pytest.raises(InputError, match=r"the state 'S' has the axes \(None,\) here and \('heads',\) in"):
        type("Other", (Mixer,), {"state_axes": {"S": (None,)}})
    with pytest.raises(InputError, match="Strange.state_axes names 'head', expected one of batch, "):
        type("Strange", (Mixer,), {"state_axes": {"test_strange": ("head",)}})


def test_axes_of_another_rank_are_refused():
    with pytest.raises(InputError, match=r"Misnamed.axes gives gain of shape \(16, 8\) .* expected 2"):
        spread(Misnamed())


def test_unknown_axis_is_refused_where_the_class_is_defined():
    with pytest.raises(InputError, match="Strange.axes names 'head', expected one of batch, "):
        type("Strange", (Mixer,), {"axes": {"q": ("embed", "head")}})
    assert "Strange" not in MIXERS


def test_second_class_of_a_name_is_refused():
    with pytest.raises(InputError, match="kvjax.models.mixers.attention both define a Attention, .* choose"):
        type("Attention", (Mixer,), {"__module__": __name__})
    assert MIXERS["Attention"] is Attention


def test_class_defined_again_replaces_the_first():
    first, second = (type("Again", (Mixer,), {"__module__": __name__}) for _ in range(2))
    assert first is not second and MIXERS["Again"] is second


def test_own_mixer_returns_from_json():
    config = Config(**SIZES, mixers=(Attention(), Named(gate=True)))
    assert config_from_json(config_to_json(config)) == config


def test_unknown_name_in_json_imports_nothing():
    data = config_to_json(Config(**SIZES)) | {"mixers": [{"word": "antigravity"}] * 2}
    with pytest.raises(ValueError, match="'antigravity' is no mixer.* or import the module that defines it"):
        config_from_json(data)
    assert "antigravity" not in sys.modules


@pytest.mark.rotating
def test_reading_configs_knows_every_mixer_of_the_folder():
    files = [path.read_text() for folder in mixers.__path__ for path in Path(folder).glob("*.py")]
    written = {name for text in files for name in re.findall(r"^class (\w+)\((?!.*abstract)", text, re.M)}
    code = "from kvjax.models.config_json import MIXERS; print(*MIXERS)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {*found.stdout.split()} == written

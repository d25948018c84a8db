"""Every architecture on a mesh: its weights by their logical axes, and the same answers as on one device."""

import warnings

import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.api.prefill import bare_cache
from kvjax.mesh.on_mesh import as_mesh
from kvjax.mesh.rules import Rules
from kvjax.models.axes import axes_of, part_of
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.params import layer_shapes
from kvjax.pure import decoding
from kvjax.state.axes import axes_of_state, map_axes
from tests.models.architectures import TABLE
from tests.models.conversation import BATCHES, ROOM, STEPS, TEXTS, close, model, talk
from tests.models.memory_classes import OWN, REPRESENTATIVES
from tests.sweep import sweep

NAMES = [name for name in dict.fromkeys((*REPRESENTATIVES, *OWN)) if name != "cepe"]
# Three rows and, in the smallest of these, two heads. Where tokens are split, a device reads four.
MESHES = {"tensor": "model=2", "batch": "data=3", "sequence": "seq=4", "tensor+sequence": "model=2,seq=4"}
CASES = [(rules, name) for rules in MESHES for name in NAMES]


def spread(rules, name):
    """Spread a model on a mesh; what layers do not divide stays whole, and a warning says what that is."""
    m, chosen = model(name), Rules.named(rules)
    chosen = chosen if rules == "batch" else chosen.but(batch=None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).* every device holds them whole", UserWarning)
        return kvjax.spread(m, as_mesh(MESHES[rules]), chosen)


@pytest.mark.parametrize("rules, name", sweep(CASES, ("tensor", "gqa")))
def test_a_conversation_on_a_mesh_is_that_on_one_device(rules, name):
    m, done, batch = spread(rules, name), talk(name), BATCHES["main"]
    read = np.array(batch.lengths)
    logits, cache = kvjax.prefill(m, TEXTS[list(batch.texts), : max(read)], lengths=read, room=ROOM)
    close(logits, done.prompt.logits)
    run = decoding(m, cache.method, None)
    state = bare_cache(cache)
    for append, want in zip(STEPS, done.steps, strict=True):
        read = read + append
        logits, state = steps.step_keeping(run, m.params, state, TEXTS[list(batch.texts), read - 1], append)
        close(logits, want.logits)
    on = m.on_mesh
    for held in (cache, state):
        map_axes(lambda axes, x: _check(x, on.sharding(axes, x.shape)), held, on)


def _check(x, sharding):
    assert x.sharding.is_equivalent_to(sharding, x.ndim)
    return x


@pytest.mark.parametrize("name", TABLE)
def test_every_parameter_and_state_has_logical_axes_of_its_rank(name):
    config = TABLE[name].config
    for layer in range(config.layers):
        mixer = mixer_of(config, layer)
        for called, shape in layer_shapes(config, layer).items():
            part = part_of(config, layer, called)
            assert part.axes_of(called) is not None, (type(part).__name__, called)
            axes_of(part, called, shape)
        for called, shape in mixer.state(config).items():
            axes = axes_of_state(called)
            assert axes is not None and len(axes) <= len(shape), (type(mixer).__name__, called)

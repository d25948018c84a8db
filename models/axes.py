"""The logical axes of every parameter, and its sharding by a mesh's rules."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import jax

from kvjax.base.errors import InputError
from kvjax.mesh.on_mesh import Axes, OnMesh
from kvjax.models.block_transformer import BlockConfig
from kvjax.models.config import Config
from kvjax.models.feed_forward import mlp_of
from kvjax.models.layer_embeddings import LAYER_EMBEDDINGS, TOP_AXES, top_shapes
from kvjax.models.layer_part import LayerPart
from kvjax.models.layers import Params
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.params import layer_shapes
from kvjax.models.placement import map_leaves
from kvjax.models.stacking import Group, groups_in
from kvjax.models.streams import STREAMS, stream_axes, stream_shapes
from kvjax.state.axes import axes_of_state

_E, _H, _K, _M, _V, _X = "embed", "heads", "kv_heads", "mlp", "vocab", "experts"

# Every mixer and feed-forward names the axes of its own parameters (`LayerPart.axes`).
_NORMS: dict[str, Axes] = dict.fromkeys(("norm", "norm_bias", "embed_norm", "embed_norm_bias"), (None,))
_TOP: dict[str, Axes] = {"embed": (_V, _E), "unembed": (_E, _V), **_NORMS, **TOP_AXES}


def axes_of(part: LayerPart, name: str, shape: tuple[int, ...]) -> Axes:
    """Return the logical axes of a layer's parameter; all None if its class does not name it.

    Raises InputError if the class names more or fewer axes than the parameter has.

    >>> from kvjax.models.mixers.attention import ATTENTION
    >>> axes_of(ATTENTION, "o", (64, 32)), axes_of(ATTENTION, "k_bias", (32,))
    (('heads', 'embed'), ('kv_heads',))
    """
    found = part.axes_of(name)
    if found is None:
        return (None,) * len(shape)
    if len(found) != len(shape):
        raise InputError(
            f"{type(part).__name__}.axes gives {name} of shape {shape} the axes {found}: "
            f"expected {len(shape)}, each a name or None"
        )
    return found


def heads_of(config: Config, layer: int) -> dict[str, int]:
    """How many heads a layer has along each head axis; 0 if it has none."""
    mixer = mixer_of(config, layer)
    slots = mixer.slots(config)
    if slots is not None:
        return {_H: mixer.query_heads(config), _K: slots.heads}
    heads = getattr(mixer, "heads", 0)
    return {_H: heads, _K: getattr(mixer, "key_heads", heads)}


def whole_axes(config: Config, layer: int, on: OnMesh) -> frozenset[str]:
    """Find the head axes that a layer cannot split: the number of heads does not divide over the devices.

    If there are fewer KV heads than devices they stay whole, too, and every device holds all of them.
    """
    heads = heads_of(config, layer)
    return frozenset(axis for axis, count in heads.items() if count % on.devices(axis))


def check_rules(config: Config | BlockConfig, on: OnMesh) -> None:
    """Raise InputError for a Block Transformer, which no rules split. Sizes that do not divide stay whole."""
    if not isinstance(config, Config):
        raise InputError(
            "mesh= was given for a Block Transformer, which has no rules: place its weights with sharding="
        )


def left_whole(config: Config, on: OnMesh) -> tuple[str, ...]:
    """Axes that the rules would split, but that stay whole because their size does not divide.

    One sentence per size and axis. KV heads that are fewer than the devices are not named: they are whole by
    design.
    """
    words = {_H: "heads", _K: "KV heads", _X: "experts", _V: "tokens of the vocabulary"}
    found: dict[tuple[str, int], list[str]] = {}
    for path, axes, shape, heads in _weights(config):
        for axis, size in zip(axes, shape, strict=True):
            count = size if axis is None else heads.get(axis, size)
            if axis is None or count % on.devices(axis) == 0 or (axis == _K and count < on.devices(_K)):
                continue
            found.setdefault((axis, count), []).append(path)
    sentences = []
    for (axis, count), paths in found.items():
        fit = [n for n in range(2, min(count, on.devices(axis)) + 1) if count % n == 0]
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        hint = f"; {' or '.join(map(str, fit))} devices would split them" if fit else ""
        sentences.append(
            f"{count} {words.get(axis, 'channels')} of {paths[0]}{more} do not divide over mesh axis "
            f"{on.over(axis)}, so every device holds them whole{hint}"
        )
    return tuple(sentences)


def without_axes(config: Config, on: OnMesh) -> tuple[str, ...]:
    """Sentences per class on parameters and states that stay whole because no class names axes for them.

    Empty if the rules split no weights.
    """
    if not any(on.devices(axis) > 1 for axis in (_E, _H, _K, _M, _X)):
        return ()
    found: dict[str, list[str]] = {}
    for layer in range(config.layers):
        for name in layer_shapes(config, layer):
            part = part_of(config, layer, name)
            names = found.setdefault(type(part).__name__, [])
            if part.axes_of(name) is None and name not in names:
                names.append(name)
    return _states_without_axes(config) + tuple(
        f"{kind}.axes does not name {', '.join(names)}, so every device holds them whole: give them there "
        'logical axes, such as ("embed", "heads")'
        for kind, names in found.items()
        if names
    )


def _states_without_axes(config: Config) -> tuple[str, ...]:
    found: dict[str, set[str]] = {}
    for layer in range(config.layers):
        mixer = mixer_of(config, layer)
        names = {name for name in mixer.state(config) if axes_of_state(name) is None}
        found.setdefault(type(mixer).__name__, set()).update(names)
    return tuple(
        f"{kind}.state_axes does not name {', '.join(sorted(names))}, so every device holds these states "
        'whole: say there the axes after layers and rows, such as ("heads",), or () where that is meant'
        for kind, names in found.items()
        if names
    )


def note_whole(config: Config | BlockConfig, on: OnMesh) -> None:
    """Warn (UserWarning) of everything in `left_whole` and `without_axes`."""
    whole = (*left_whole(config, on), *without_axes(config, on)) if isinstance(config, Config) else ()
    if whole:
        warnings.warn(". ".join(whole), UserWarning, stacklevel=3)


def _weights(config: Config) -> Iterator[tuple[str, Axes, tuple[int, ...], dict[str, int]]]:
    """Return (path, axes, shape, heads) of every parameter, layers one by one."""
    yield "embed", _TOP["embed"], (config.vocab, config.d_model), {}
    if not config.tied:
        yield "unembed", _TOP["unembed"], (config.d_model, config.vocab), {}
    top = _TOP | stream_axes(config)
    for name, shape in (top_shapes(config) | stream_shapes(config)).items():
        yield name, top[name], shape, {}
    for i in range(config.layers):
        heads = heads_of(config, i)
        for name, shape in layer_shapes(config, i).items():
            yield f"layers.{i}.{name}", axes_of(part_of(config, i, name), name, shape), shape, heads


def part_of(config: Config, layer: int, name: str) -> LayerPart:
    """Return the mixer, the feed-forward, the embeddings or the streams that a parameter belongs to."""
    mlp = mlp_of(config, layer)
    for part in (LAYER_EMBEDDINGS, STREAMS):
        if name in part.shapes(config):
            return part
    return mlp if name in mlp.shapes(config) else mixer_of(config, layer)


def weight_shardings(
    config: Config, groups: tuple[Group, ...], on: OnMesh
) -> Callable[[str, tuple[int, ...]], jax.sharding.NamedSharding]:
    """Choose the sharding of every parameter, by path and shape; InputError as of `check_rules`."""
    check_rules(config, on)
    top = _TOP | stream_axes(config)

    def place(path: str, shape: tuple[int, ...]) -> jax.sharding.NamedSharding:
        if not path.startswith("layers."):
            return on.sharding(top[path], shape)
        _, group, name = path.split(".")
        first = groups[int(group)].first
        axes = axes_of(part_of(config, first, name), name, shape[1:])
        whole = whole_axes(config, first, on)
        axes = tuple(None if axis in whole else axis for axis in axes)
        return on.sharding(("layers", *axes), shape)

    return place


def param_shardings(params: Params, config: Config, on: OnMesh) -> Params:
    """Choose the sharding of every parameter by rules, as a tree. InputError as of `check_rules`."""
    place = weight_shardings(config, groups_in(params), on)
    return map_leaves(lambda path, x: place(path, x.shape), params)


def spread_params(params: Params, config: Config, on: OnMesh) -> Params:
    """Parameters placed by the rules. InputError as of `check_rules`."""
    return jax.device_put(params, param_shardings(params, config, on))

"""The logical axes of every parameter, and where a mesh's rules put them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import jax

from kvjax.base.errors import InputError
from kvjax.mesh.on_mesh import Axes, OnMesh
from kvjax.models.block_transformer import BlockConfig
from kvjax.models.config import Config
from kvjax.models.feed_forward import FeedForward, mlp_of
from kvjax.models.layers import Params
from kvjax.models.mixer import Mixer
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.mixers.head_maps import HeadMaps
from kvjax.models.mixers.hgrn import Hgrn
from kvjax.models.mixers.mamba import Mamba
from kvjax.models.mixers.recurrent import Recurrent
from kvjax.models.mixers.rwkv import ChannelMix
from kvjax.models.params import Group, layer_shapes
from kvjax.models.placement import map_leaves

_E, _H, _K, _M, _V, _X = "embed", "heads", "kv_heads", "mlp", "vocab", "experts"

_TOP: dict[str, Axes] = {"embed": (_V, _E), "unembed": (_E, _V), "norm": (None,)}
# Of layers, by name; heads lie side by side in an axis of queries, keys or values. What lies here in another
# order, such as the channels that a short convolution takes together, stays whole.
_LAYER: dict[str, Axes] = {
    **dict.fromkeys(
        ("q", "cache_q", "attn_gate", "q_low", "r", "z", "dt", "decay", "beta", "level", "out_gate"), (_E, _H)
    ),
    **dict.fromkeys(("k", "v", "k_low", "k_down", "v_down"), (_E, _K)),
    "forget": (_E, _K),
    **dict.fromkeys(("o", "cache_o"), (_H, _E)),
    **dict.fromkeys(("cache_k", "cache_v"), (None, _K)),
    **dict.fromkeys(("sink_bias", "memory_share", "a_log", "dt_bias", "skip"), (_H,)),
    **dict.fromkeys(("bonus", "level_scale"), (_H, None)),
    **dict.fromkeys(("extra_k", "extra_v"), (_K, None)),
    "kv_up": (_H, None, None),
    "k_up": (_K, None, None),
    **dict.fromkeys(("q_up", "decay_up", "out_gate_up", "rate_up", "first_up", "second_up"), (None, _H)),
    **dict.fromkeys(("kv_down", "q_down", "decay_down", "out_gate_down", "rate_down"), (_E, None)),
    **dict.fromkeys(
        ("first_down", "second_down", "mix_down", "compress", "router", "shared_switch"), (_E, None)
    ),
    **dict.fromkeys(
        ("q_factors", "k_factors", "v_factors", "xbc", "adapt_k_down", "adapt_v_down"), (_E, None)
    ),
    **dict.fromkeys(("adapt_k_up", "adapt_v_up", "restore", "align_up", "align_down", "conv"), (None, None)),
    "conv_bias": (None,),
    "key_rate": (None,),
    "mix_up": (None, None, None),
    **dict.fromkeys(("gate", "up", "shared_gate", "shared_up"), (_E, _M)),
    **dict.fromkeys(("down", "shared_down"), (_M, _E)),
    **dict.fromkeys(("experts_gate", "experts_up"), (_X, _E, _M)),
    "experts_down": (_X, _M, _E),
    "router_bias": (None,),
    **dict.fromkeys(("probe", "forget_gate"), (_E, _H)),
    # Channels that are no heads, and matrices of all channels.
    **dict.fromkeys(("unit_gate", "unit_value", "unit_key", "inner", "inner_gate"), (_E, None)),
    **dict.fromkeys(("candidate", "keep", "token", "history", "w_down"), (_E, None)),
    **dict.fromkeys(("unit_out", "out"), (None, _E)),
    **dict.fromkeys(("selection", "dt_up", "copy_scale"), (None, None)),
    **dict.fromkeys(("state_scale", "delay", "control"), (None, None)),
    "w_up": (None, _H),
    "copy_shift": (None,),
    "ridge": (_H,),
    **dict.fromkeys(("slots", "codebook"), (_H, None, None)),
}
# What words call so and mean otherwise.
_OWN: tuple[tuple[type, dict[str, Axes]], ...] = (
    (ChannelMix, {"k": (_E, _M), "v": (_M, _E), "r": (_E, None)}),
    (HeadMaps, {"q": (_E, None), "k": (_E, None), "v": (_E, None), "o": (None, _E)}),
    (Recurrent, {"q": (_E, _K), "v": (_E, _H)}),
    (Mamba, {"a_log": (None, None), "dt_bias": (None,), "skip": (None,)}),
    (Hgrn, {"out_gate": (_E, None)}),
)


def axes_of(word: Mixer | FeedForward, name: str, rank: int) -> Axes:
    """The logical axes of a parameter of a layer, of `rank` axes; all None for one that nobody named.

    >>> from kvjax.models.mixers.attention import ATTENTION
    >>> axes_of(ATTENTION, "o", 2), axes_of(ATTENTION, "k_bias", 1)
    (('heads', 'embed'), ('kv_heads',))
    """
    found = known_axes(word, name)
    return found if found is not None and len(found) == rank else (None,) * rank


def known_axes(word: Mixer | FeedForward, name: str) -> Axes | None:
    """`axes_of` where the name is one that this file knows."""
    own = next((names for kind, names in _OWN if isinstance(word, kind)), {})
    table = _LAYER | own
    if name in table:
        return table[name]
    if name.endswith(("_norm", "_norm_bias")) or name.startswith("mix_"):
        return (None,)
    base = table.get(name.removesuffix("_bias"))
    if base is None or not name.endswith("_bias"):
        return None
    # Where a product's rows are split, every device would add the bias once.
    return (None if base[-1] == _E else base[-1],)


def heads_of(config: Config, layer: int) -> dict[str, int]:
    """How many heads a layer has for each of the axes that hold some; 0 where it has none."""
    mixer = mixer_of(config, layer)
    slots = mixer.slots(config)
    if slots is not None:
        return {_H: mixer.query_heads(config), _K: slots.heads}
    heads = getattr(mixer, "heads", 0)
    return {_H: heads, _K: getattr(mixer, "key_heads", heads)}


def whole_axes(config: Config, layer: int, on: OnMesh) -> frozenset[str]:
    """The axes of heads that a layer cannot split: their number does not divide over the devices.

    KV heads that are fewer than the devices stay whole as well, and every device holds all of them.
    """
    heads = heads_of(config, layer)
    return frozenset(axis for axis, count in heads.items() if count % on.devices(axis))


def check_rules(config: Config | BlockConfig, on: OnMesh) -> None:
    """InputError for a Block Transformer, which no rules split. Sizes that do not divide stay whole."""
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


def note_whole(config: Config | BlockConfig, on: OnMesh) -> None:
    """Warns (UserWarning) of the axes that `left_whole` names."""
    whole = left_whole(config, on) if isinstance(config, Config) else ()
    if whole:
        warnings.warn(". ".join(whole), UserWarning, stacklevel=3)


def _weights(config: Config) -> Iterator[tuple[str, Axes, tuple[int, ...], dict[str, int]]]:
    """(path, axes, shape, heads) of every parameter, layers one by one."""
    yield "embed", _TOP["embed"], (config.vocab, config.d_model), {}
    if not config.tied:
        yield "unembed", _TOP["unembed"], (config.d_model, config.vocab), {}
    for i in range(config.layers):
        heads = heads_of(config, i)
        for name, shape in layer_shapes(config, i).items():
            yield f"layers.{i}.{name}", axes_of(_word(config, i, name), name, len(shape)), shape, heads


def _word(config: Config, layer: int, name: str) -> Mixer | FeedForward:
    """The mixer or the feed-forward that a parameter belongs to."""
    mlp = mlp_of(config, layer)
    return mlp if name in mlp.shapes(config) else mixer_of(config, layer)


def weight_shardings(
    config: Config, groups: tuple[Group, ...], on: OnMesh
) -> Callable[[str, tuple[int, ...]], jax.sharding.NamedSharding]:
    """Where every parameter goes, by path and shape; InputError as of `check_rules`."""
    check_rules(config, on)

    def place(path: str, shape: tuple[int, ...]) -> jax.sharding.NamedSharding:
        if not path.startswith("layers."):
            return on.sharding(_TOP[path], shape)
        _, group, name = path.split(".")
        first = groups[int(group)].first
        axes = axes_of(_word(config, first, name), name, len(shape) - 1)
        whole = whole_axes(config, first, on)
        axes = tuple(None if axis in whole else axis for axis in axes)
        return on.sharding(("layers", *axes), shape)

    return place


def param_shardings(params: Params, config: Config, on: OnMesh) -> Params:
    """Where the rules place every parameter, as a tree like theirs. InputError as of `check_rules`."""
    sizes = [next(iter(group.values())).shape[0] for group in params["layers"]]
    groups = tuple(Group(sum(sizes[:i]), size) for i, size in enumerate(sizes))
    place = weight_shardings(config, groups, on)
    return map_leaves(lambda path, x: place(path, x.shape), params)


def spread_params(params: Params, config: Config, on: OnMesh) -> Params:
    """Parameters as the rules place them. InputError as of `check_rules`."""
    return jax.device_put(params, param_shardings(params, config, on))

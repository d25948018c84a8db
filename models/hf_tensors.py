"""Which tensor of a Hugging Face checkpoint holds which parameters: one table for loading and saving.

A checkpoint's matrices multiply from the left, ours from the right, so a tensor consists of one or more
transposed parameters stacked by rows (Phi-3 has q, k and v in one). Names are those inside the decoder,
without the prefixes (`model.`, `language_model.`) that depend on the class which saved them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.files import DTYPES, Stored
from kvjax.models.hf_families import FAMILIES
from kvjax.models.hf_family import TensorRows
from kvjax.models.layer_embeddings import top_shapes
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.params import layer_shapes, norm_shapes, shapes
from kvjax.models.streams import stream_shapes

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "backbone.")
# Up to this many missing layers are listed tensor by tensor.
_MISSING_LAYERS = 1024
_NO_PARAMETERS = ("rotary_emb.inv_freq",)
# Where families keep what predicts further tokens, if not in layers above the last.
_FURTHER = ("mtp.", "mtp_")
_LAYER_EMBEDDINGS = {
    "layer_embed": "embed_tokens_per_layer.weight",
    "layer_map": "per_layer_model_projection.weight",
    "layer_embed_norm": "per_layer_projection_norm.weight",
}
_EMBED_NORM = {
    "embed_norm": "layers.0.pre_norm.weight",
    "embed_norm_bias": "layers.0.pre_norm.bias",
}
_STREAMS = {"in": "altup_projections", "out": "altup_unembed_projections"}


class TensorPart(NamedTuple):
    """A parameter inside a tensor: its leaf, its layer (None outside the layers), rows [start, stop).

    rows: which of those rows are its columns, in order, if not all of them. expert: which expert or head it
    belongs to, if the leaf has an axis for them. at: the leaf's first column in this tensor, if it is split
    over several. transposed: whether "rows" are columns. stacked: whether the tensor also has the expert
    axis, in front.
    """

    leaf: str
    layer: int | None
    start: int
    stop: int
    rows: np.ndarray | None = None
    expert: int | None = None
    at: int = 0
    transposed: bool = False
    stacked: bool = False

    @property
    def columns(self) -> slice:
        """The leaf's columns in this tensor."""
        return slice(self.at, self.at + (self.stop - self.start if self.rows is None else len(self.rows)))


class TensorView(NamedTuple):
    """The matrix of a part: of one expert, or transposed, if the tensor is stored so."""

    stored: Stored
    expert: int | None = None
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.stored.shape if self.expert is None else self.stored.shape[1:]
        return shape[::-1] if self.transposed else shape

    def read(self, *index: slice) -> np.ndarray:
        """As `Stored.read`."""
        spans = [*index, *(slice(None),) * (len(self.shape) - len(index))]
        spans = spans[::-1] if self.transposed else spans
        if self.expert is None:
            out = self.stored.read(*spans)
        else:
            out = self.stored.read(slice(self.expert, self.expert + 1), *spans)[0]
        return out.T if self.transposed else out


def view(stored: Stored, part: TensorPart) -> Stored | TensorView:
    """View the matrix from which a part of a tensor is read."""
    if part.transposed or part.stacked:
        return TensorView(stored, part.expert if part.stacked else None, part.transposed)
    return stored


class Tensor(NamedTuple):
    """A tensor of a checkpoint: its shape there, and the parameters in it."""

    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]


def tensors(config: Config) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint of `config`, by its name without prefix.

    >>> config = Config(vocab=32, d_model=16, layers=1, heads=2, kv_heads=1, head_dim=8, d_ff=32, tied=True)
    >>> tensors(config)["layers.0.self_attn.k_proj.weight"].shape
    (8, 16)
    """
    top = shapes(config)
    embed, norm = top_names(config)
    out = {
        embed: Tensor(top["embed"], (TensorPart("embed", None, 0, config.vocab),)),
    }
    names = {"norm": norm, "norm_bias": norm.replace("weight", "bias"), **_EMBED_NORM}
    out |= {names[n]: Tensor(s, (TensorPart(n, None, 0, s[0]),)) for n, s in norm_shapes(config).items()}
    for leaf in top_shapes(config):
        table = Tensor(top[leaf], (TensorPart(leaf, None, 0, top[leaf][0]),))
        out[_LAYER_EMBEDDINGS[leaf]] = _stack((leaf,), None, top) if transposed(leaf) else table
    for leaf in stream_shapes(config):
        _, way, i = leaf.split("_")
        out[f"{_STREAMS[way]}.{int(i) - 1}.weight"] = _stack((leaf,), None, top)
    if not config.tied:
        out["lm_head.weight"] = _stack(("unembed",), None, {"unembed": top["unembed"]})
    pieces_of = FAMILIES[config.family].pieces
    if pieces_of is not None:
        for i in range(config.layers):
            sizes, number = layer_shapes(config, i), i // FAMILIES[config.family].side_by_side
            for name, pieces in pieces_of(config, i):
                full, tensor = f"layers.{number}.{name}", _gathered(pieces, i, sizes)
                # A norm of several mixers is a parameter of each.
                out[full] = Tensor(tensor.shape, (*(out[full].parts if full in out else ()), *tensor.parts))
        return out
    sizes = layer_shapes(config)
    table = _layer_table(config)
    for i in range(config.layers):
        for name, leaves in table.items():
            tensor = _stack(leaves, i, sizes)
            halve = FAMILIES[config.family].paired and len(leaves) == 1
            out[f"layers.{i}.{name}"] = _in_halves(tensor, config) if halve else tensor
    return out


def transposed(leaf: str) -> bool:
    """Whether a parameter outside the layers lies in a checkpoint as a matrix from the left."""
    return leaf in ("unembed", "layer_map") or leaf.startswith("stream_")


def top_names(config: Config) -> tuple[str, str]:
    """Return the names of the embedding and of the last norm."""
    _, embed, norm = FAMILIES[config.family].top
    return f"{embed}.weight", f"{norm}.weight"


def _gathered(pieces: list[TensorRows], layer: int, sizes: Mapping[str, tuple[int, ...]]) -> Tensor:
    """Gather a tensor from its pieces, which may interleave."""
    first = pieces[0]
    total = sum(len(p.rows) for p in pieces if not p.stacked or p.expert == first.expert)
    parts = tuple(
        TensorPart(p.leaf, layer, 0, total, p.rows, p.expert, p.at, p.transposed, p.stacked) for p in pieces
    )
    if first.shape is not None:
        return Tensor(first.shape, parts)
    if first.transposed or first.stacked:
        lead, *inner, _ = sizes[first.leaf] if first.stacked else (0, *sizes[first.leaf])
        shape = (*inner, total) if first.transposed else (total, *inner)
        return Tensor((lead, *shape) if first.stacked else shape, parts)
    inner = sizes[first.leaf][0 if first.expert is None else 1 : -1]
    # A depthwise convolution has an axis for its single input channel.
    return Tensor((total, 1, *inner) if first.leaf == "conv" else (total, *inner), parts)


def _layer_table(config: Config) -> dict[str, tuple[str, ...]]:
    """Tensor of a layer -> the leaves stacked in it."""
    table = dict(FAMILIES[config.family].fused)
    fused = {leaf for leaves in table.values() for leaf in leaves}
    for room, names in (("self_attn", ("q", "k", "v", "o")), ("mlp", ("gate", "up", "down"))):
        for name in names:
            if name not in fused:
                table[f"{room}.{name}_proj.weight"] = (name,)
            table[f"{room}.{name}_proj.bias"] = (f"{name}_bias",)
    table |= {"self_attn.q_norm.weight": ("q_norm",), "self_attn.k_norm.weight": ("k_norm",)}
    leaves = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")
    table |= {f"{name}.weight": (leaf,) for name, leaf in zip(_norms(config), leaves, strict=True)}
    present = layer_shapes(config)
    return {name: leaves for name, leaves in table.items() if leaves[0] in present}


def _norms(config: Config) -> tuple[str, str, str, str]:
    """Name the norms before and after attention and the feed-forward."""
    named = FAMILIES[config.family].norms
    if named is not None:
        return named
    after, before = "post_attention_layernorm", "pre_feedforward_layernorm"
    if config.norms == "pre":
        after, before = "", after
    return "input_layernorm", after, before, "post_feedforward_layernorm"


def _in_halves(tensor: Tensor, config: Config) -> Tensor:
    """Reorder the rows of a tensor from heads that rotate in neighbouring pairs to ours."""
    [part] = tensor.parts
    if part.leaf.removesuffix("_bias").removesuffix("_norm") not in ("q", "k"):
        return tensor
    h, turning = config.head_dim, config.rope.turning(config.head_dim)
    order = np.concatenate([np.arange(0, turning, 2), np.arange(1, turning, 2), np.arange(turning, h)])
    rows = (np.arange(0, tensor.shape[0], h)[:, None] + order[None]).ravel()
    return tensor._replace(parts=(part._replace(rows=rows),))


def _stack(leaves: tuple[str, ...], layer: int | None, sizes: Mapping[str, tuple[int, ...]]) -> Tensor:
    parts, row = [], 0
    for leaf in leaves:
        rows = sizes[leaf][-1]
        parts.append(TensorPart(leaf, layer, row, row + rows))
        row += rows
    return Tensor((row, *sizes[leaves[0]][:-1]), tuple(parts))


def hf_name(name: str, config: Config) -> str:
    """Build the full name that a causal language model of transformers gives a tensor."""
    return name if name.startswith("lm_head") else f"{FAMILIES[config.family].top[0]}.{name}"


def short_name(name: str) -> str:
    """Strip a tensor's name of the prefix of the class that saved it."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def check_layers(data: Mapping[str, Any], found: Mapping[str, Stored]) -> None:
    """InputError if config.json gives far more layers than the tensors name, before anything is allocated.

    A few missing layers are left to `match`, which names the missing tensors.
    """
    text = data.get("text_config")
    given = (text if isinstance(text, Mapping) else data).get("num_hidden_layers")
    parts = (short_name(name).split(".") for name in found)
    there = 1 + max((int(p[1]) for p in parts if p[0] == "layers" and p[1:2] and p[1].isdigit()), default=-1)
    if isinstance(given, int) and given > there + _MISSING_LAYERS:
        raise InputError(
            f"config.json gives num_hidden_layers = {given}, the tensors beside it name {there} layers: "
            "correct config.json, or fetch the checkpoint again"
        )


def refuse_doubles(found: Mapping[str, Stored]) -> None:
    """Raise InputError if a tensor occurs under two prefixes, unless both hold the same numbers."""
    names: dict[str, str] = {}
    for name, tensor in found.items():
        first = names.setdefault(short_name(name), name)
        if first != name and not name.endswith(_NO_PARAMETERS) and not tensor.equals(found[first]):
            raise InputError(
                f"{first} and {name} are the same tensor under two prefixes, and hold different numbers: "
                "remove the one that the model was not saved with"
            )


def match(config: Config, found: Mapping[str, Stored]) -> dict[str, Stored]:
    """Match every name in `tensors(config)` to its stored tensor, if `found` holds exactly these.

    Raises InputError that lists what is missing, what is extra and what has another shape or an unknown
    dtype. Buffers that are not parameters, and the vision half of Gemma 3, are ignored.
    """
    expected = tensors(config)
    stored = {short_name(name): tensor for name, tensor in found.items() if not _passed_over(name, config)}
    missing = [hf_name(n, config) for n in expected if n not in stored]
    extra = [n for n in found if short_name(n) in stored and short_name(n) not in expected]
    wrong = [
        f"{hf_name(n, config)} (expected {list(t.shape)}, found {list(stored[n].shape)})"
        for n, t in expected.items()
        if n in stored and stored[n].shape != t.shape
    ]
    dtypes = [
        f"{hf_name(n, config)} ({stored[n].dtype})"
        for n in expected
        if n in stored and stored[n].dtype not in DTYPES
    ]
    complaints = [
        f"{len(names)} {what}: {_some(names)}"
        for what, names in (
            ("missing", missing),
            ("not expected", extra),
            ("of another shape", wrong),
            (f"of a dtype other than {', '.join(DTYPES)}", dtypes),
        )
        if names
    ]
    if complaints:
        raise InputError(
            f"the tensors do not fit the config.json beside them (model_type {config.family}); "
            + "; ".join(complaints)
            + ". Fetch the checkpoint again, or correct config.json."
        )
    return {name: stored[name] for name in expected}


def further_tokens(config: Config, found: Iterable[str]) -> list[str]:
    """Full names of tensors that only serve to predict more than the next token, which are not read."""
    layers = FAMILIES[config.family].more_layers
    return [
        n for n in found if short_name(n).startswith(_FURTHER) or (layers and _beyond(short_name(n), config))
    ]


def _passed_over(name: str, config: Config) -> bool:
    name, family = short_name(name), FAMILIES[config.family]
    return (
        name.endswith(_NO_PARAMETERS)
        or (config.tied and name == "lm_head.weight")
        or name.startswith(family.ignored)
        or (family.more_layers and _beyond(name, config))
        or _of_another_layer(name, config)
    )


def _of_another_layer(name: str, config: Config) -> bool:
    """Whether a tensor makes keys or values of a layer that reads another's (Gemma 3n and 4)."""
    parts = name.split(".")
    if parts[0] != "layers" or not parts[1].isdigit() or int(parts[1]) >= config.layers:
        return False
    own = parts[2] == "self_attn" and parts[3] in ("k_proj", "v_proj", "k_norm", "v_norm")
    return own and "slots" in mixer_of(config, int(parts[1])).takes


def _beyond(name: str, config: Config) -> bool:
    """Whether a tensor is of a layer after the last: these predict further tokens (DeepSeek-V3)."""
    parts = name.split(".")
    return parts[0] == "layers" and parts[1].isdigit() and int(parts[1]) >= config.layers


def _some(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest

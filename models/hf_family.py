"""Families of Hugging Face checkpoints: one `Family` holds everything that is specific to a `model_type`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from kvjax.models.config import Config
from kvjax.models.hf_windows import NO_WINDOWS, WindowRule
from kvjax.ops.base.rope import Rope

Json = Mapping[str, Any]


class TensorRows(NamedTuple):
    """A parameter inside a tensor: which rows of the tensor are its columns.

    expert: of which expert or head, if the parameter has an axis for them. at: the parameter's first column
    in this tensor, if it is split over several. shape: the tensor's shape, if it is not (rows, inputs).
    transposed: whether its columns are columns of the tensor. stacked: whether the tensor has the expert axis
    too, in front.
    """

    leaf: str
    rows: np.ndarray
    expert: int | None = None
    at: int = 0
    shape: tuple[int, ...] | None = None
    transposed: bool = False
    stacked: bool = False


class Family(NamedTuple):
    """A `model_type`: its class in transformers, its config.json, and its tensors.

    title: what people call it. special: how it differs from Llama, as pages show it.

    config.json. defaults: values that it may leave out. spell: translates settings with other names to the
    common names. read: fields of `Config` beside the sizes, rotation and windows that all families spell
    alike. write: the inverse. windows: which layers have one. local_rope: the rotation of windowed layers, if
    it differs: "own" parameters (Gemma 3), "unscaled", without the scaling of the others (OLMo 3), or "each",
    if `write` gives both (Gemma 4). partial_rotary: `partial_rotary_factor` is obeyed; all other classes
    rotate whole heads. paired: neighbouring channels rotate in pairs. activation: the key of the activation.
    within: other names of a `model_type`: of models with vision, whose text_config is of this family, and of
    the family itself.

    Tensors. top: the prefix of all but lm_head, and the names of the embedding and of the last norm. norms:
    the names of the norms before attention, after it, before the feed-forward and after it, if they are not
    Llama's, OLMo's or Gemma's. fused: tensors of a layer that hold several parameters, stacked by rows.
    pieces: (config, layer) -> the names of that layer's tensors, each with the parameters in it, for layers
    other than attention and an MLP. ignored: prefixes of tensors that the decoder has no use for.
    more_layers: checkpoints may hold layers above the last, which predict further tokens (DeepSeek-V3).
    side_by_side: how many of our layers a checkpoint's layer is: mixers that have the same input (Falcon-H1),
    or a mixer in place of the feed-forward (RWKV-7).
    `spell` and `write` count the layers accordingly.
    """

    architecture: str
    defaults: dict[str, Any]
    read: Callable[[Json, Rope], dict[str, Any]]
    write: Callable[[Config], dict[str, Any]] = lambda config: {}
    pieces: Callable[[Config, int], Iterator[tuple[str, list[TensorRows]]]] | None = None
    spell: Callable[[Json], dict[str, Any]] = lambda data: {}
    windows: WindowRule = NO_WINDOWS
    local_rope: Literal["", "own", "unscaled", "each"] = ""
    partial_rotary: bool = False
    paired: bool = False
    activation: str = "hidden_act"
    within: tuple[str, ...] = ()
    top: tuple[str, str, str] = ("model", "embed_tokens", "norm")
    norms: tuple[str, str, str, str] | None = None
    fused: Mapping[str, tuple[str, ...]] = {}
    ignored: tuple[str, ...] = ()
    more_layers: bool = False
    side_by_side: int = 1
    title: str = ""
    special: str = ""

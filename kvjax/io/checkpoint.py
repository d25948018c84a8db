"""Checkpoints of models trained here: weights by Orbax, with the config as JSON beside them.

A checkpoint holds any `Config`, also one that no class of transformers computes, or the `BlockConfig` of a
Block Transformer; to exchange models with other libraries use `kvjax.models.hf.save_hf`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from kvjax.api.block_transformer import BlockTransformer
from kvjax.base.atomic_files import disk_says as disk_says
from kvjax.base.atomic_files import in_short
from kvjax.base.errors import InputError
from kvjax.hosts.arrays import is_shared
from kvjax.hosts.messages import is_first
from kvjax.mesh.on_mesh import OnMesh
from kvjax.models.axes import check_rules, weight_shardings
from kvjax.models.block_transformer import BlockConfig, Groups, layout_of
from kvjax.models.config import Config
from kvjax.models.config_json import config_from_json, config_to_json
from kvjax.models.files import atomic_folder, check_folder, read_json
from kvjax.models.hf import check_dtype
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.models.placement import laid_out, leaves, map_leaves, placement
from kvjax.models.stacking import Group, entries, groups_in
from kvjax.models.tokenizer import read_text, write_text

MARKER = "kvjax.json"
FORMAT = 1
_WEIGHTS = "params"


def save_checkpoint(model: Model, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write config, weights and tokenizer of a model to a directory, atomically.

    overwrite: whether it may replace an older checkpoint at `path`. A model that several hosts hold is saved
    by all of them, to a folder that they share. Raises InputError if `path` holds something else or cannot
    be written.

    >>> import tempfile
    >>> from kvjax.io.load import load
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(load("recall-tiny"), f"{folder}/mine")
    ...     load(f"{folder}/mine").config.layers
    4
    """
    head = {
        "format": FORMAT,
        "config": config_to_json(model.config),
        "groups": _group_sizes(model.params),
        "dtype": model.params["embed"].dtype.name,
    }
    with atomic_folder(path, MARKER, together=is_shared(model.params), overwrite=overwrite) as folder:
        with quiet_orbax(), ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / _WEIGHTS, model.params)
        if is_first() or not is_shared(model.params):
            write_text(model, folder)
            (folder / MARKER).write_text(json.dumps(head, indent=2) + "\n")


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    dtype: Any = None,
    sharding: Any = None,
    groups: tuple[Group, ...] | Groups | None = None,
    on_mesh: OnMesh | None = None,
) -> Model:
    """Read a directory that `save_checkpoint` wrote, in the dtype it was saved in unless another is given.

    sharding, groups and on_mesh are those of `kvjax.models.hf.load_hf`; the stacking may differ from the
    saved one. A Block Transformer's groups are `Groups` of both its decoders, its paths read
    "blocks.layers.0.q". Raises InputError if the directory is no checkpoint, or a broken or newer one.
    """
    folder = check_folder(path)
    if not (folder / MARKER).is_file():
        raise InputError(f"{folder} is not a kvjax checkpoint: it has no {MARKER}")
    config, saved, stored = read_head(folder)
    layout = layout_of(config)
    dtype = check_dtype(stored if dtype is None else dtype)
    groups = layout.check_groups(config, groups or layout.plan(config))
    tree = layout.shapes(config, groups)
    if on_mesh is not None:
        check_rules(config, on_mesh)
        sharding = weight_shardings(config, groups, on_mesh)  # type: ignore[arg-type]
    place = placement(tree, sharding)
    if groups == saved:
        params = _restore(folder, tree, dtype, place)
    else:
        there = _restore(folder, layout.shapes(config, saved), dtype, lambda *_: None)
        params = layout.regroup(there, groups)
        params = map_leaves(lambda path, x: jax.device_put(x, place(path, x.shape)), params)
    params = map_leaves(lambda _, x: laid_out(x), params)
    kind: Any = BlockTransformer if isinstance(config, BlockConfig) else Model
    more = {} if on_mesh is None else {"on_mesh": on_mesh}
    return kind(config, params, **read_text(folder)._asdict(), name=folder.resolve().name, **more)


def read_head(folder: Path) -> tuple[Config | BlockConfig, tuple[Group, ...] | Groups, str]:
    """Return (config, stacking, dtype) of a checkpoint, without its weights.

    Raises InputError if its header is broken or newer.
    """
    head = read_json(folder / MARKER)
    if head.get("format") != FORMAT:
        raise InputError(
            f"{folder} has checkpoint format {head.get('format')!r}, this kvjax reads {FORMAT}: update kvjax"
        )
    try:
        config = config_from_json(head["config"])
        return config, _groups(head["groups"]), head["dtype"]
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"{folder / MARKER} does not describe a model ({error}): save it again") from error


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Silence Orbax's logs of errors that it also raises, and late output of its threads."""
    if not isinstance(sys.unraisablehook, _Unraised):
        sys.unraisablehook = _Unraised(sys.unraisablehook)
        logging.getLogger("asyncio").addFilter(lambda record: "tensorstore" not in record.getMessage())
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


@dataclasses.dataclass(frozen=True)
class _Unraised:
    """Passes on exceptions that Python could not raise, except those of Orbax's threads after a failed call.

    These threads end later than the call, so this hook stays in place.
    """

    before: Callable[[Any], Any]

    def __call__(self, unraised: Any) -> None:
        late = "Event loop is closed" in str(unraised.exc_value)
        file = getattr(getattr(unraised.object, "cr_code", None), "co_filename", "")
        if not late and f"{os.sep}orbax{os.sep}" not in file:
            self.before(unraised)


def _group_sizes(params: Params) -> Any:
    """How many layers are stacked in every group, per decoder if there are two; of patterns as lists."""
    if "layers" in params:
        sizes = [[group.size for group in entry] for entry in entries(groups_in(params))]
        return [entry if len(entry) > 1 else entry[0] for entry in sizes]
    return {name: _group_sizes(params[name]) for name in Groups._fields}


def _groups(sizes: Any) -> Any:
    """`_group_sizes` as groups."""
    if isinstance(sizes, dict):
        return Groups(**{name: _groups(x) for name, x in sizes.items()})
    found: list[Group] = []
    first = 0
    for entry in sizes:
        each = entry if isinstance(entry, list) else [entry]
        found += [Group(first + i, size, len(each)) for i, size in enumerate(each)]
        first += sum(each)
    entries(found)
    return tuple(found)


def _restore(folder: Path, tree: Params, dtype: Any, place: Any) -> Params:
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def target(path: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place(path, shape) or here)

    weights = folder.absolute() / _WEIGHTS
    if not weights.is_dir():
        raise InputError(f"{folder} has no weights ({_WEIGHTS}/ is missing): save the model again")
    try:
        with quiet_orbax(), ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.metadata(weights).item_metadata
            if found is None:
                raise ValueError("Orbax finds no arrays there")
            _check_shapes(folder, tree, found)
            return checkpointer.restore(weights, map_leaves(target, tree))
    except InputError:
        raise
    except Exception as error:  # Orbax raises classes of its own, or none
        raise InputError(
            f"the weights in {folder} cannot be read ({in_short(error)}): save the model again"
        ) from error


def _check_shapes(folder: Path, tree: Params, found: Any) -> None:
    # Orbax would notice too, but later, and without naming the array.
    expected = dict(leaves(tree))
    stored = {path: tuple(leaf.shape) for path, leaf in leaves({**found})}
    names = sorted(expected.keys() | stored.keys())
    wrong = [
        f"{n} (expected {expected.get(n)}, found {stored.get(n)})"
        for n in names
        if expected.get(n) != stored.get(n)
    ]
    if wrong:
        raise InputError(
            f"the weights in {folder} do not fit its {MARKER}: {', '.join(wrong[:8])}: save it again"
        )

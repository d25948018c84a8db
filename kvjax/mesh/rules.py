"""Rules: which axes of a mesh split each logical axis of weights and caches."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from kvjax.base.errors import InputError

# The names of mesh axes in presets.
DATA, MODEL, SEQUENCE, EXPERT = "data", "model", "seq", "expert"

# Logical axes that occur together in one array, which can use a mesh axis only once: of caches, and of
# weights.
_TOGETHER = (
    *(("batch", "tokens", name) for name in ("heads", "kv_heads", "mlp", "vocab", "experts")),
    ("layers", "batch", "kv_heads", "slots"),
    ("layers", "batch", "heads", "slots"),
    *(("layers", "embed", name) for name in ("heads", "kv_heads", "vocab")),
    ("layers", "experts", "embed", "mlp"),
)

MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Rules:
    """Which axis of the mesh splits each logical axis of weights and caches.

    A value is the name of a mesh axis, a tuple of names, or None: the axis is whole on every device. If
    `slots` names a mesh axis that `kv_heads` names too, a cache is split by KV heads, or by slots if there
    are too few heads, as for latents; methods whose slots cannot be split leave such layers whole.

    Args:
        batch: rows of tokens and caches.
        heads: query heads, and heads of recurrent layers.
        kv_heads: KV heads of a cache, and the weights of keys and values.
        slots: slots of a KV head.
        tokens: tokens of a prompt while it is read.
        pages: pages of a pool.
        layers: layers of a group, if they are stacked.
        embed: channels of the model, in weights alone.
        mlp: channels inside feed-forwards.
        vocab: rows of the embeddings, and logits.
        experts: experts of mixtures.
        slots_from: how many bytes a row's slots in a layer must have to be split; for fewer, merging the
            parts costs more than it saves.

    Raises:
        InputError: if one mesh axis would split two axes of the same array.

    >>> Rules(batch="data", heads="model", kv_heads="model").kv_heads
    'model'
    """

    batch: MeshAxes = None
    heads: MeshAxes = None
    kv_heads: MeshAxes = None
    slots: MeshAxes = None
    tokens: MeshAxes = None
    pages: MeshAxes = None
    layers: MeshAxes = None
    embed: MeshAxes = None
    mlp: MeshAxes = None
    vocab: MeshAxes = None
    experts: MeshAxes = None
    slots_from: int = 0

    def __post_init__(self):
        for axis in AXES:
            given = getattr(self, axis)
            given = () if given is None else given if isinstance(given, tuple) else (given,)
            if not all(isinstance(name, str) and name for name in given) or len(set(given)) < len(given):
                raise InputError(
                    f"rules: {axis} is {getattr(self, axis)!r}, expected the name of a mesh axis, a tuple of "
                    f"different names, or None, as in Rules({axis}='{MODEL}')"
                )
        for axes in _TOGETHER:
            for i, a in enumerate(axes):
                for b in axes[i + 1 :]:
                    self._apart(a, b)

    def _apart(self, a: str, b: str) -> None:
        both = sorted({*self.mesh_axes(a)} & {*self.mesh_axes(b)})
        # If KV heads cannot be split, their slots are split over the same devices.
        if both and (a, b) not in (("kv_heads", "slots"), ("heads", "slots")):
            raise InputError(
                f"rules: {a} and {b} are both split over mesh axis {both[0]!r}, and they are axes of the "
                f"same array, expected one of them there: give {b} another mesh axis, or None"
            )

    @staticmethod
    def named(name: str) -> Rules:
        """Return the preset of that name, to change: `Rules.named("tensor").but(vocab=None)`."""
        if name not in PRESETS:
            near = difflib.get_close_matches(name, PRESETS, 1)
            hint = f"did you mean {near[0]}?" if near else f"expected {', '.join(PRESETS)}, or a kvjax.Rules"
            raise InputError(f"there are no rules named {name!r}: {hint}")
        return PRESETS[name]

    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        """Return the mesh axes that split a logical axis; none if it is whole."""
        given = getattr(self, axis)
        return () if given is None else given if isinstance(given, tuple) else (given,)

    def but(self, **changed: MeshAxes) -> Rules:
        """Change the mesh axes of some logical axes, and keep the other rules."""
        strange = sorted(changed.keys() - {*AXES})
        if strange:
            near = difflib.get_close_matches(strange[0], AXES, 1)
            hint = f"did you mean {near[0]}?" if near else f"expected {', '.join(AXES)}"
            raise InputError(f"rules have no axis {strange[0]!r}: {hint}")
        return dataclasses.replace(self, **changed)

    def used(self) -> Iterator[tuple[str, str]]:
        """(logical axis, mesh axis) for every split."""
        return ((axis, name) for axis in AXES for name in self.mesh_axes(axis))


AXES = tuple(field.name for field in dataclasses.fields(Rules) if field.name != "slots_from")

_BATCH = Rules(batch=DATA)
_HEADS = _BATCH.but(heads=MODEL, kv_heads=MODEL, mlp=MODEL, vocab=MODEL)
_TENSOR = dataclasses.replace(_HEADS, slots=MODEL, slots_from=2**20)
PRESETS = {
    "single": Rules(),
    "batch": _BATCH,
    "tensor": _TENSOR,
    "sequence": _BATCH.but(slots=SEQUENCE, tokens=SEQUENCE),
    "tensor+sequence": _HEADS.but(slots=SEQUENCE, tokens=SEQUENCE),
    "expert": _BATCH.but(experts=EXPERT),
    "fsdp": _BATCH.but(embed=DATA),
}
"""Rules by name. By its name, one that does more than split rows serves meshes without an axis for rows."""


def as_rules(rules: Any, names: Sequence[str]) -> Rules:
    """Rules or a preset's name as rules for a mesh with axes `names`.

    Raises InputError for another name, and for mesh axes that are not there.

    >>> as_rules("tensor", ("data", "model")).batch, as_rules("tensor", ("model",)).batch
    ('data', None)
    """
    if isinstance(rules, str):
        chosen, called = Rules.named(rules), f"rules {rules!r}"
        if DATA not in names and chosen not in (_BATCH, PRESETS["fsdp"]):
            chosen = chosen.but(batch=None)
    elif isinstance(rules, Rules):
        chosen, called = rules, "rules"
    else:
        raise InputError(f"rules is {rules!r}, expected a kvjax.Rules or one of {', '.join(PRESETS)}")
    for axis, name in chosen.used():
        if name not in names:
            raise InputError(
                f"{called}: {axis} is split over mesh axis {name!r}, and the mesh has {', '.join(names)}: "
                f"give the mesh an axis {name!r}, or rules with the names that it has, such as "
                f"Rules({axis}={names[0]!r})"
            )
    return chosen

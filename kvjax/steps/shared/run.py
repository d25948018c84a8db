"""The static part of a run, and the phase and layout that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from kvjax.compress.computed_keys import ComputedKeys
from kvjax.compress.group import UNSTACK, GroupMethod, group_method
from kvjax.compress.select import AsMet
from kvjax.grammar import Method
from kvjax.grammar.fitted import of_layer
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import AttentionSpec
from kvjax.grammar.phase import BY_POSITION, Phase
from kvjax.grammar.read_kinds import Foreseeing, Placing, Reusing
from kvjax.mesh.on_mesh import OnMesh
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer, Take
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.params import runs
from kvjax.models.stacking import Group, entries, groups_in, span
from kvjax.ops.attention.union import Keys
from kvjax.place.layer_pairs import pairs_of
from kvjax.state.cache import GroupState, Slots


class Run(NamedTuple):
    """The static part of a run: runs with equal values share compiled programs.

    implementation: of attention and recurrences, as in `kvjax.ops.base.dispatch.form`. GPU kernels exist for
    attention in decode steps and in prompts over picked blocks. on_mesh: how arrays are sharded, if they are.
    """

    config: Config
    method: Method
    implementation: str | None = None
    on_mesh: OnMesh | None = None

    def groups(self, params: Params) -> tuple[GroupMethod, ...]:
        """Return what the method means for each group of layers; cached, because every step needs it."""
        return _groups(self, groups_in(params))

    def acts(self, gm: GroupMethod, compress: bool) -> bool:
        """Whether a prefill selects among a group's slots: windowed layers always keep just their window."""
        return gm.keep is not None and (compress or self.config.window(gm.first) is not None)

    @property
    def without_gpu(self) -> str | None:
        """`implementation`, or None where GPUs have no kernel and use XLA's version of the reference."""
        return None if (self.implementation or "").startswith("gpu") else self.implementation

    @property
    def phase(self) -> Phase:
        """How keys and queries are rotated."""
        return BY_POSITION if self.method.keep is None else self.method.keep.phase

    def phase_in(self, layer: int) -> Phase:
        """Return the same in a given layer of a first prompt."""
        narrow = None if self.method.keep is None else self.method.keep.narrow
        return self.phase if narrow is None else narrow.phase_in(layer, self.config.layers, self.phase)

    @property
    def unrotated(self) -> bool:
        """Whether keys are stored before rotation."""
        return not self.phase.steady or (self.method.store is not None and self.method.store.unrotated)

    def met(self, layer: int) -> AsMet | None:
        """How a layer's stored slots become what its queries attend to; None if scores cannot use that."""
        mixer, window = mixer_of(self.config, layer), self.config.window(layer)
        slots = mixer.slots(self.config)
        if slots is None or not slots.expands:
            return None
        return lambda p, k, v, pos: mixer.met(p, self.config, window, k, v, pos)

    def attention_spec(self, layer: int) -> AttentionSpec:
        c = self.config
        return AttentionSpec(
            mixer_of(c, layer).slots_of(c).scale, c.attention_softcap, mixer_of(c, layer).rope(c, layer)
        )


@lru_cache(maxsize=1024)
def _groups(run: Run, groups: tuple[Group, ...]) -> tuple[GroupMethod, ...]:
    """Return the groups of a method, in a model whose layers are stacked in these groups."""
    found = [_group(run, group) for group in groups]
    for entry in entries(groups):
        if len(entry) > 1 and not _keeps_pattern(run, entry):
            raise ValueError(
                f"{run.method.id} treats the layers {span(entry)[0]} to {span(entry)[-1]} differently, which "
                f"are stacked as a pattern of {len(entry)}: {UNSTACK}"
            )
    return _with_pickers(run, found, sum(group.size for group in groups))


def _group(run: Run, group: Group) -> GroupMethod:
    stack, config = run.method.stack, run.config
    layers = group.layers
    first, last, several = layers[0], layers[-1], group.size > 1
    mixer = mixer_of(config, first)
    slots = mixer.slots(config)
    shared = slots.value if slots is not None and slots.shared else None
    kind = "state" if slots is None else "fixed" if slots.fixed else "slots"
    kind = kind if mixer.source_of("slots") is None else "reads"
    gm = group_method(run.method, layers, config.window(first), shared, kind)
    if mixer.grows:
        gm = gm.replaced(grows=mixer.grows, codecs=(None, None))
    keep = run.method.keep
    if keep is not None and keep.per_query_head and slots is not None:
        # Windowed layers select nothing, and latents serve all heads at once.
        once = slots.shared or config.window(first) is not None
        gm = gm.replaced(copies=1 if once else mixer.query_heads(config) // slots.heads)
    if run.on_mesh is not None and slots is not None:
        gm = gm.replaced(multiple=run.on_mesh.parts_of_a_list(slots.heads))
    if gm.read is not None and run.unrotated and not isinstance(gm.read, Placing):
        gm = gm.replaced(rope=mixer.rope(config, first))
    if gm.read is not None and slots is not None and slots.expands:
        each = mixer.met_heads(config) // slots.heads
        gm = gm.replaced(computed=ComputedKeys(mixer, config, config.window(first), each))
    lower = () if stack is None else pairs_of(stack, config)
    if any(i in layers or i + 1 in layers for i in lower):
        if several:
            raise ValueError(
                f"{run.method.id} merges pairs of single layers, and layers {first} to {last} are stacked: "
                f"{UNSTACK}"
            )
        gm = gm.replaced(stack=stack, upper=first - 1 in lower)
    sparse = gm.read_prompt
    if gm.sees_below and several:
        raise ValueError(
            f"{run.method.id} encodes a layer by the one below it, and layers {first} to {last} are stacked: "
            f"{UNSTACK}"
        )
    if sparse is not None and sparse.carries and several:
        raise ValueError(
            f"{run.method.id} picks blocks of a prompt by what the layer below picked, too, and layers "
            f"{first} to {last} are stacked: {UNSTACK}"
        )
    if isinstance(gm.read, Foreseeing) and several:
        raise ValueError(
            f"{run.method.id} selects slots of a layer by the input of one below, and layers {first} to "
            f"{last} are stacked: {UNSTACK}"
        )
    ids = slots is not None and slots.ids
    return gm.replaced(codecs=(gm.codecs[0], None)) if ids else gm


def _with_pickers(run: Run, gms: list[GroupMethod], layers: int) -> tuple[GroupMethod, ...]:
    """Return the groups with the layers whose picks they read, if only some layers choose pages."""
    out, picker = [], None
    ends = [gm.first for gm in gms[1:]] + [layers]
    for gm, end in zip(gms, ends, strict=True):
        if isinstance(gm.read, Reusing):
            due = max(at for at in gm.read.starts(layers) if at < end)
            if picker is None or picker < due:
                picker = gm.first
                if end > gm.first + 1:
                    raise ValueError(
                        f"{run.method.id} picks slots in layer {max(due, gm.first)} for those above it, "
                        f"and layers {gm.first} to {end - 1} are stacked: {UNSTACK}"
                    )
            gm = gm.replaced(picker=picker)
        out.append(gm)
    return tuple(out)


@lru_cache(maxsize=1024)
def stacks(run: Run, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """Cut these groups wherever a method treats two layers of one group differently.

    A pattern with such layers becomes runs of equal layers.

    >>> from kvjax.store.merged import MergedLayers
    >>> config = Config(layers=9, vocab=32, d_model=16, heads=2, kv_heads=1, head_dim=8, d_ff=32)
    >>> groups = (Group(0, 1), Group(1, 1), Group(2, 7))
    >>> [g.size for g in stacks(Run(config, Method()), groups)]
    [1, 1, 7]
    >>> [g.size for g in stacks(Run(config, Method(stack=MergedLayers())), groups)]
    [1, 1, 2, 1, 1, 1, 1, 1]
    """
    starts, out = _starts(run), []
    for entry in entries(groups):
        if len(entry) > 1 and _keeps_pattern(run, entry):
            out += entry
            continue
        for run_ in entry if len(entry) == 1 else runs(run.config, span(entry)):
            found = sorted({run_.first, *(starts & {*run_.layers})})
            ends = [*found[1:], run_.layers[-1] + 1]
            out += [Group(a, z - a) for a, z in zip(found, ends, strict=True)]
    return tuple(out)


@lru_cache(maxsize=1024)
def _each(run: Run) -> tuple[GroupMethod, ...]:
    """Return what the method means for every layer, stacked with no other."""
    layers = run.config.layers
    return _with_pickers(run, [_group(run, Group(i, 1)) for i in range(layers)], layers)


@lru_cache(maxsize=1024)
def _starts(run: Run) -> frozenset[int]:
    """Find the layers that cannot be stacked with the one below."""
    each, keep = _each(run), run.method.keep
    single = {i for i, gm in enumerate(each) if gm.alone}
    single |= {i - gm.read.ahead for i, gm in enumerate(each) if isinstance(gm.read, Foreseeing)}
    starts = single | {i + 1 for i in single}
    starts |= {i for i in range(1, len(each)) if each[i].same != each[i - 1].same}
    for word in (run.method.reread, None if keep is None else keep.narrow):
        starts |= set() if word is None else {after + 1 for after, _ in word.stages(len(each), 1)}
    return frozenset(starts)


def _keeps_pattern(run: Run, entry: Sequence[Group]) -> bool:
    """Whether a method treats the layers of each member of a pattern alike, none of them by the layer below.

    Prompts that upper layers read in part are cut between groups, layers in host memory are copied while
    the group below runs, and `reuse` counts layers in order: those methods keep runs of neighbours.
    """
    for word in run.method.sentences:
        if word.stack is not None or word.host is not None or word.reread is not None:
            return False
        if word.keep is not None and (word.keep.narrow is not None or word.keep.reuse > 1):
            return False
    each = _each(run)
    if any(gm.picker is not None or gm.alone for gm in each):
        return False
    if any(isinstance(gm.read, Foreseeing) for gm in each):
        return False
    return all(len({each[i].same for i in group.layers}) == 1 for group in entry)


def alike(gms: tuple[GroupMethod, ...]) -> list[tuple[Any, ...] | None]:
    """`Memory.alike` of a method's groups: None where a layer's own number or neighbours matter."""
    apart = (gm.alone or isinstance(gm.read, Foreseeing) or gm.codec_arrays for gm in gms)
    return [None if own else gm.same for gm, own in zip(gms, apart, strict=True)]


def held(layer: Layer, state: GroupState) -> list[Keys]:
    """Return the context that a layer holds, or the one that it reads; empty if there is none."""
    slots = layer.taken.get("slots")
    group, index = (state, layer.index) if slots is None else (slots.state, 0)
    return [s.layer(index).keys() for s in group.parts if isinstance(s, Slots) and s.capacity]


def answered(
    gm: GroupMethod, layer: Layer, state: GroupState, q: Float[Array, "B N T H"], params: Params
) -> list[tuple[Array, Array]]:
    """(out, lse) of a layer's rotated queries over its evicted slots, which the group's merge estimates."""
    assert gm.answering is not None
    if (carried := state.rows.get(key_of(gm.answering))) is None:
        return []
    mine = jax.tree.map(lambda x: x[layer.index], carried)
    return [gm.answering.answer(mine, q, of_layer(params, layer.number))]


def taken_by(gms: tuple[GroupMethod, ...], *more: dict[int, dict[str, Take]]) -> dict[int, dict[str, Take]]:
    """Return what groups take from other layers, by their first layers: decoded slots, and `more`."""
    below = {gm.first: {"below": Take("decoded", gm.first - 1)} for gm in gms if gm.sees_below}
    each = (*more, below)
    return {
        first: {n: t for one in each for n, t in one.get(first, {}).items()} for one in each for first in one
    }

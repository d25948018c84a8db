"""Layout classes: what decides the structure of a method's caches and of its steps.

Budgets, scores and most hyper-parameters decide *which* slots stay. The class is everything else:
methods of one class have caches of the same structure and steps of the same shape. Tests run
one method of every class through a whole conversation.
"""

from __future__ import annotations

from typing import NamedTuple

from kvjax.base.errors import InputError
from kvjax.grammar import Keep, Method, Store
from kvjax.grammar.calls import observations, written
from kvjax.grammar.fitted import fitted_words
from kvjax.grammar.read_kinds import EstimatingRest, Read, Recycling, Remembering, Reusing, Sampling
from kvjax.keep.observations.observe import Mass, Queries
from kvjax.mesh.on_mesh import OnMesh


class LayoutClass(NamedTuple):
    """The ways in which caches and steps of two methods can differ.

    storage: "dense", "pages" (unequal heads, a pool per layer) or "one pool" (slots move between layers).
    lists: "kv heads", or "query heads" if each of them selects its own slots. evicts: "never", "at prefill",
    "every few steps", or at every step by what that step must know of each slot: "every step", "every step by
    mass", "every step by query". merges: evicted slots are merged "into slots" that stay or "into rows", as a
    sum that queries attend to; else empty. tiers: 2 if evicted slots are stored with fewer bits. phase: what
    keys are rotated by: "position", "position, when read" (they are stored unrotated) or another phase's
    name, such as "rank". codec: "plain", "token" (tokens are encoded one by one) or "granule" (some tokens
    together, before an unencoded tail). reads: "all" slots, "pages" of them, "pages and the rest", if
    attention to the other slots is estimated, "picks of other layers" or "of other steps", or "samples",
    weighted by their probabilities. skips: the first layers are left out. reads_twice: the prompt is read
    again to be scored. sinks: the first tokens are stored apart from the codes of the others. fitted: codes
    are decoded with arrays fitted to each layer. pairs: two layers are stored as one. remembers: a read's
    summaries depend on traces. memory: "device", or "host" if keys and values of a body are there.
    """

    storage: str
    lists: str
    evicts: str
    merges: str
    tiers: int
    phase: str
    codec: str
    reads: str
    skips: bool
    reads_twice: bool
    sinks: bool
    fitted: bool
    pairs: bool
    remembers: bool
    memory: str

    def __str__(self) -> str:
        words = [self.storage, self.lists, f"evicts {self.evicts}"]
        words += [f"merges {self.merges}"] if self.merges else []
        words += ["two tiers"] if self.tiers == 2 else []
        words += [f"rotates by {self.phase}"] if self.phase != "position" else []
        codes = f"fitted {self.codec} codes" if self.fitted else f"{self.codec} codes"
        words += [codes] if self.codec != "plain" else []
        words += ["first tokens apart"] if self.sinks else []
        words += [f"reads {self.reads}"] if self.reads != "all" else []
        words += ["remembers"] if self.remembers else []
        words += ["in host memory"] if self.memory == "host" else []
        words += ["skips layers"] if self.skips else []
        words += ["layers in pairs"] if self.pairs else []
        return ", ".join([*words, "reads twice"] if self.reads_twice else words)


def layout_class(method: Method) -> LayoutClass:
    """Return the layout class of a method.

    >>> from kvjax.methods import method
    >>> str(layout_class(method("h2o", budget=0.5)))
    'dense, kv heads, evicts every step by mass'
    >>> layout_class(method("snapkv", budget=0.5)) == layout_class(method("snapkv", budget=64, window=8))
    True
    """
    keep, store, read = method.keep, method.store, method.read
    encoded = store is not None and (store.keys is not None or store.values is not None)
    granules = store is not None and (store.granule > 1 or store.residual > 0)
    return LayoutClass(
        storage=_storage(keep),
        lists="query heads" if keep is not None and keep.per_query_head else "kv heads",
        evicts=_evicts(keep),
        merges=_merges(keep),
        tiers=2 if keep is not None and keep.lower is not None else 1,
        phase=_phase(keep, store),
        codec="granule" if granules else "token" if encoded else "plain",
        reads=_reads(read),
        skips=any(part is not None and part.skip_layers > 0 for part in (keep, read)),
        reads_twice=keep is not None and keep.probe is not None,
        sinks=encoded and store is not None and store.sinks > 0,
        fitted=any(True for _ in fitted_words(store)),
        pairs=method.stack is not None,
        remembers=isinstance(read, Remembering),
        memory="device" if method.host is None else "host",
    )


def mesh_for(method: Method, on: OnMesh | None) -> OnMesh | None:
    """Return the mesh and rules by which a method's caches are split.

    If rules split slots only of KV heads that cannot be split themselves, and this method's slots cannot be
    split either, these stay whole. Raises InputError if rules split slots in any case, naming the class.
    """
    if on is None or on.devices("slots") == 1:
        return on
    classes = {layout_class(one) for one in method.sentences}
    whole = next((kind for kind in classes if not _lie_apart(kind)), None)
    if whole is None:
        return on
    if on.slots_instead:
        return on.with_whole_slots()
    raise InputError(
        f"{method.id} cannot have the slots of a list on several devices, here {on.over('slots')}: its "
        f"caches are of the class '{whole}', expected dense lists, read whole, in codes of single tokens or "
        "none, that turn by position: give rules that leave slots whole, such as 'tensor' or 'batch'"
    )


def _lie_apart(kind: LayoutClass) -> bool:
    """Whether a step with split slots communicates nothing as large as a KV head's slots.

    Ranks, granules, picked pages and evictions that compare keys with each other would gather all slots of a
    head; pools hold all heads.
    """
    return (
        kind.storage == "dense"
        and kind.phase == "position"
        and kind.codec in ("plain", "token")
        and kind.reads == "all"
        and kind.evicts != "every few steps"
        and not kind.sinks
        and kind.memory == "device"
    )


def _phase(keep: Keep | None, store: Store | None) -> str:
    if keep is not None and not keep.phase.steady:
        return keep.phase.name
    return "position, when read" if store is not None and store.unrotated else "position"


def _storage(keep: Keep | None) -> str:
    if keep is None or keep.allocate.uniform:
        return "dense"
    return "one pool" if keep.allocate.across_layers else "pages"


def _merges(keep: Keep | None) -> str:
    if keep is None or keep.merge is None:
        return ""
    return "into slots" if written(keep.merge) else "into rows"


def _reads(read: Read | None) -> str:
    if read is None:
        return "all"
    if isinstance(read, Sampling):
        return "samples"
    if isinstance(read, Reusing):
        return "picks of other layers"
    if isinstance(read, Recycling):
        return "picks of other steps"
    return "pages and the rest" if isinstance(read, EstimatingRest) else "pages"


def _evicts(keep: Keep | None) -> str:
    if keep is None:
        return "never"
    if not keep.when.in_steps:
        return "at prefill"
    if not keep.when.at_once:
        return "every few steps"
    needs = observations(keep, in_steps=True)
    if any(isinstance(o, Mass) for o in needs):
        return "every step by mass"
    return "every step by query" if any(isinstance(o, Queries) for o in needs) else "every step"

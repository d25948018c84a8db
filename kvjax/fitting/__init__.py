"""Fits the arrays that some methods need for a model, from a few texts or questions.

`fit` makes one or several passes over them, batch by batch, and never holds the activations of more than one
batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax.base.checks import finite_number, whole_number
from kvjax.base.errors import InputError
from kvjax.compat.lent_fits import with_settings
from kvjax.eval.tasks.sample import Sample
from kvjax.fitting.gates.blocks import fit_blocks
from kvjax.fitting.gates.controller import fit_controller
from kvjax.fitting.gates.dropping import fit_dropping
from kvjax.fitting.gates.eviction_gates import fit_attention_gate, fit_eviction_gate
from kvjax.fitting.gates.head_gates import fit_head_gates
from kvjax.fitting.gates.hidden_gate import fit_gate, fit_sink_gate
from kvjax.fitting.gates.retaining_heads import fit_retaining_heads
from kvjax.fitting.gates.run_gates import fit_run_gates
from kvjax.fitting.gates.write_gates import fit_write_gate
from kvjax.fitting.merges.convolutions import fit_convolutions
from kvjax.fitting.merges.hidden_cache import fit_states
from kvjax.fitting.merges.residue import fit_residue
from kvjax.fitting.prompts.distilled import fit_distilled
from kvjax.fitting.prompts.memory_tokens import fit_memory
from kvjax.fitting.prompts.restore import fit_restored
from kvjax.fitting.prompts.run_memory import fit_repetition
from kvjax.fitting.statistics.additive import fit_sums
from kvjax.fitting.statistics.atoms import fit_atoms
from kvjax.fitting.statistics.bases import fit_basis
from kvjax.fitting.statistics.channel_groups import fit_groups
from kvjax.fitting.statistics.clusters import fit_clusters
from kvjax.fitting.statistics.curves import fit_curves
from kvjax.fitting.statistics.drift import fit_drift
from kvjax.fitting.statistics.hierarchy import fit_biases
from kvjax.fitting.statistics.layer_bits import fit_layer_bits
from kvjax.fitting.statistics.levels import fit_levels
from kvjax.fitting.statistics.patterns import fit_patterns
from kvjax.fitting.statistics.predictors import fit_predictors
from kvjax.fitting.statistics.profiles import fit_copies, fit_profile, fit_semantic_heads
from kvjax.fitting.statistics.projections import fit_projections
from kvjax.fitting.statistics.queries import fit_centres, fit_filters, fit_norms, fit_statistics
from kvjax.fitting.statistics.ranges import fit_ranges
from kvjax.fitting.statistics.repeats import fit_repeating_heads
from kvjax.fitting.statistics.search import fit_budgets
from kvjax.fitting.statistics.sensitivities import fit_sensitivities
from kvjax.fitting.statistics.sharing import fit_sharing
from kvjax.fitting.statistics.vectors import fit_vectors
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted, fitted_words
from kvjax.keep.budgets.profile import CopyProfile, CurveProfile, DriftProfile, Profile, SearchedProfile
from kvjax.keep.gates.controller import Controller
from kvjax.keep.gates.dropping import FirstDroppingToken
from kvjax.keep.gates.eviction_gates import AttentionGate, EvictionGate
from kvjax.keep.gates.gate import HiddenGate
from kvjax.keep.gates.gate_forms import RetainingHead, SinkGate, WriteGate
from kvjax.keep.merges.merge_conv import ConvMerge
from kvjax.keep.merges.merge_runs import Opening
from kvjax.keep.merges.residue import Residue
from kvjax.keep.prompts.distilled import TokenScorer
from kvjax.keep.prompts.hierarchy import Hierarchy
from kvjax.keep.prompts.memory_tokens import MemoryTokens, RunMemory
from kvjax.keep.prompts.restore import RestoreTokens
from kvjax.keep.scores.expected import QueryStatistics
from kvjax.keep.scores.filters import QueryFilters
from kvjax.keep.scores.retrieval import HeadGates, RepeatingHeads
from kvjax.keep.scores.semantic import SemanticHeads
from kvjax.keep.scores.trigonometric import QueryCentres
from kvjax.make.clustered_heads import ClusteredHeads
from kvjax.make.eigen_heads import EigenHeads
from kvjax.make.grouped_low_rank import GroupedLowRank
from kvjax.make.hidden_cache import HiddenStateCache
from kvjax.make.pruned_channels import PrunedChannels
from kvjax.make.shared_layers import SharedLayers
from kvjax.methods.parse import parse_method
from kvjax.methods.registry import METHODS, takes
from kvjax.models.model import Model, check_single
from kvjax.read.head_patterns import HeadPatterns
from kvjax.read.pages import PageMeans
from kvjax.read.pooled_blocks import CompressedBlocks
from kvjax.store.additive import CommutingSums
from kvjax.store.atoms import Atoms
from kvjax.store.basis import InBasis
from kvjax.store.channels import QueryDrivenChannels
from kvjax.store.clustered import Clustered
from kvjax.store.coupled import CoupledCodes
from kvjax.store.fixed import StaticAffine
from kvjax.store.layer_bits import LayerBits
from kvjax.store.levels import ByChannel, Levels
from kvjax.store.predicted import Predicted


class Fitter(NamedTuple):
    """How the arrays of one word of a method are fitted: (model, batches, options) -> arrays.

    asks: its batches are samples that have an answer and spans, instead of rows of tokens. acts: the fit
    depends on what the method does, so it is passed the method.
    """

    fit: Callable[..., Fitted]
    asks: bool = False
    acts: bool = False


FITS: dict[type, Fitter] = {
    HiddenGate: Fitter(fit_gate),
    SinkGate: Fitter(fit_sink_gate),
    RetainingHead: Fitter(fit_retaining_heads, asks=True),
    WriteGate: Fitter(fit_write_gate),
    EvictionGate: Fitter(fit_eviction_gate, asks=True),
    AttentionGate: Fitter(fit_attention_gate, asks=True),
    Opening: Fitter(fit_run_gates, asks=True),
    FirstDroppingToken: Fitter(fit_dropping, asks=True),
    MemoryTokens: Fitter(fit_memory, asks=True, acts=True),
    RunMemory: Fitter(fit_repetition, asks=True, acts=True),
    TokenScorer: Fitter(fit_distilled, asks=True, acts=True),
    RestoreTokens: Fitter(fit_restored, asks=True, acts=True),
    QueryFilters: Fitter(fit_filters),
    Hierarchy: Fitter(fit_biases),
    QueryStatistics: Fitter(fit_statistics),
    QueryCentres: Fitter(fit_centres),
    Controller: Fitter(fit_controller, asks=True),
    Profile: Fitter(fit_profile, asks=True),
    CopyProfile: Fitter(fit_copies, asks=True),
    CurveProfile: Fitter(fit_curves, acts=True),
    DriftProfile: Fitter(fit_drift),
    SearchedProfile: Fitter(fit_budgets, asks=True, acts=True),
    RepeatingHeads: Fitter(fit_repeating_heads),
    SemanticHeads: Fitter(fit_semantic_heads, asks=True),
    HeadGates: Fitter(fit_head_gates, asks=True),
    Residue: Fitter(fit_residue, acts=True),
    ConvMerge: Fitter(fit_convolutions, acts=True),
    QueryDrivenChannels: Fitter(fit_norms),
    ByChannel: Fitter(fit_levels, acts=True),
    Levels: Fitter(fit_levels, acts=True),
    CoupledCodes: Fitter(fit_vectors, acts=True),
    CommutingSums: Fitter(fit_sums, acts=True),
    InBasis: Fitter(fit_basis, acts=True),
    Clustered: Fitter(fit_groups, acts=True),
    StaticAffine: Fitter(fit_ranges, acts=True),
    Atoms: Fitter(fit_atoms, acts=True),
    LayerBits: Fitter(fit_layer_bits, acts=True),
    Predicted: Fitter(fit_predictors, acts=True),
    GroupedLowRank: Fitter(fit_projections),
    EigenHeads: Fitter(fit_projections),
    PrunedChannels: Fitter(fit_sensitivities, acts=True),
    HeadPatterns: Fitter(fit_patterns, acts=True),
    PageMeans: Fitter(fit_blocks, acts=True),
    CompressedBlocks: Fitter(fit_blocks, acts=True),
    SharedLayers: Fitter(fit_sharing),
    ClusteredHeads: Fitter(fit_clusters),
    HiddenStateCache: Fitter(fit_states, asks=True, acts=True),
}


def fit(
    model: Model,
    method: Method | str,
    texts: Sequence[Sequence[int]] | Sequence[Sample],
    *,
    batch: int = 4,
    budget: float | int | None = None,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    **options: Any,
) -> Fitted:
    """Fit the arrays that a method needs for a model; the method takes them as `fitted=`.

    Args:
        model: the model to fit to.
        method: a method, or its text, such as "kvzap" or "ccm:tokens=8,chunk=32".
        texts: rows of token ids, or samples (`kvjax.eval.tasks.sample`): questions about contexts, their
            answers and the spans of the context that these need. A fit to texts reads the contexts of
            samples; a fit to questions reads the samples that have an answer and spans.
        batch: the number of texts per batch.
        budget: the budget of a method given as text, if the arrays depend on it.
        progress: wraps the loop, as `rich.progress.track` does.
        **options: the options of the method's own fit (`kvjax.fitting.gates.hidden_gate.fit_gate`,
            `kvjax.fitting.statistics.profiles.fit_profile`, `kvjax.fitting.gates.head_gates.fit_head_gates`,
            `kvjax.fitting.merges.residue.fit_residue`, `kvjax.fitting.statistics.queries.fit_statistics`,
            `kvjax.fitting.statistics.levels.fit_levels`, `kvjax.fitting.statistics.search.fit_budgets`).

    Returns:
        The fitted arrays, by name and layer; another word, or one of other settings, refuses them.

    Raises:
        InputError: if the method has nothing to fit, its fit has no such option, or `texts` contain nothing
            to fit it to.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> gate = kvjax.fit(model, "kvzap", [list(range(3, 67))])
    >>> sorted(gate.arrays), kvjax.method("kvzap", fitted=gate).id
    (['out', 'out_bias'], 'kvzap')
    """
    check_single(model, "words are fitted to one decoder's layers")
    model = model.in_runs()
    chosen, found = _fitter(method, budget)
    known = options_of(chosen)
    for name in options:
        if name not in known:
            takes = ", ".join(known) or "none"
            raise InputError(f"what is fitted for {chosen.id} has no option {name!r}, it takes {takes}")
        _check_option(name, options[name])
    read = _samples(chosen, texts) if found.asks else _rows(texts)
    batches = [read[i : i + batch] for i in range(0, len(read), batch)]
    options |= {"method": chosen} if found.acts else {}
    fitted = found.fit(model, batches, progress=progress, **options)
    if not all(np.isfinite(x).all() for x in fitted.arrays.values()):
        raise InputError(f"what was fitted for {chosen.id} is not finite: lower rate=, or look at the texts")
    return with_settings(fitted, chosen)


# The smallest allowed value of each whole-number option, and what it counts; all other options are numbers >=
# 0.
_WHOLE = {
    "hidden": (0, "hidden channels"),
    "rank": (1, "dimensions"),
    "bits": (1, "bits"),
    "epochs": (1, "readings"),
    "seed": (0, "seeds to skip"),
    "imitate": (0, "first steps"),
    "sinks": (0, "first tokens"),
    "recent": (1, "newest tokens"),
    "tokens": (2, "tokens of a text"),
    "layers": (1, "layers"),
    "repeats": (2, "times that they are written"),
    "sink_keys": (1, "learned sinks"),
    "steps": (1, "steps on a batch"),
    "slots": (1, "slots that are mixtures"),
    "size": (1, "atoms of a dictionary"),
    "neighbours": (1, "neighbours of a convolution"),
    "heads": (1, "heads of a gate"),
    "channels": (1, "channels of a controller"),
}


def _check_option(name: str, value: Any) -> None:
    if name in _WHOLE:
        least, what = _WHOLE[name]
        whole_number(name, value, least, what)
    else:
        finite_number(name, value, 0.0)


def learns_from_questions(method: Method | str) -> bool:
    """Whether a method is fitted to questions and answers instead of to texts alone.

    Raises InputError if no word of the method is fitted.
    """
    return _fitter(method, None)[1].asks


def options_of(method: Method | str) -> list[str]:
    """Return the options that `fit` takes for a method; InputError if it has no word that is fitted.

    >>> options_of("headkv")
    []
    """
    ours = ("model", "batches", "method", "progress")
    parameters = inspect.signature(_fitter(method, None)[1].fit).parameters
    return [name for name in parameters if name not in ours]


def _fitter(method: Method | str, budget: float | int | None) -> tuple[Method, Fitter]:
    """Return the method, and the fitter of its first word that needs one."""
    needs = False
    if isinstance(method, Method):
        chosen = method
    else:
        _, build = parse_method(method)
        needs = build.takes_budget
        chosen = build((1.0 if budget is None else budget) if needs else None)
    words = [word for word in fitted_words(chosen) if type(word) in FITS]
    # A method such as xquant has a word that could be fitted, and no hyper-parameter for the arrays.
    if not words or (chosen.id in METHODS and not takes(chosen.id, "fitted")):
        raise InputError(f"{chosen.id} has no word that is fitted, expected a method such as kvzap")
    # First the word without whose arrays the method cannot run.
    found = FITS[type(min(words, key=lambda word: not word.fit_first))]
    if budget is not None and not (needs and found.acts):
        raise InputError(f"what is fitted for {chosen.id} does not depend on a budget: leave budget= out")
    return chosen, found


def _rows(texts: Sequence[Any]) -> list[list[int]]:
    contexts = [text.context if isinstance(text, Sample) else text for text in texts]
    rows = [list(row) for row in contexts if len(row)]
    if not rows:
        raise InputError("no tokens were given to fit on, expected rows of token ids")
    return rows


def _samples(method: Method, texts: Sequence[Any]) -> list[Sample]:
    samples = [text for text in texts if isinstance(text, Sample) and text.answer and text.spans]
    if not samples:
        raise InputError(
            f"{method.id} learns from questions with answers and the spans of the context that these need, "
            "and none was given: fit it on tasks such as get, not on texts"
        )
    return samples

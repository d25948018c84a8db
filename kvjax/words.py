"""Imports for authors of methods: the parts of a method, the inputs of words, and common words.

A method is a `Method` of words. A word is a frozen dataclass that subclasses its kind: `Word` (scores),
`Pattern`, `Allocation`, `Merge`, `Observation`, `Trace`, `Read`, `Codec`. What it does not define, it
inherits from there. All other words are in `kvjax.keep`, `kvjax.store` and `kvjax.read`;
docs/tutorials/write-a-method.md writes one.

>>> from kvjax.words import Budget, Keep, KeyNorm, Method, Uniform
>>> Method(Keep(KeyNorm(), Budget(0.5), Uniform())).keep.budget
Budget(amount=0.5)
"""

from kvjax.base.errors import InputError
from kvjax.grammar import Budget, Keep, Method, Store
from kvjax.grammar.facts import Fact
from kvjax.grammar.fitted import Fitted, FittedWord, as_fitted
from kvjax.grammar.kinds import (
    Allocation,
    AttentionSpec,
    Inputs,
    Merge,
    Observation,
    Observed,
    Pattern,
    Score,
    Trace,
    View,
)
from kvjax.grammar.model_kinds import Make, Residence, Stacking
from kvjax.grammar.phase import ByPosition, ByRank, Clamped, Phase
from kvjax.grammar.prompt_edits import Narrow, Rereading
from kvjax.grammar.prompt_reads import PromptQueries, PromptRead
from kvjax.grammar.read_kinds import Read
from kvjax.grammar.when import PREFILL_END, STEP, Every, When, WhenFull
from kvjax.keep.algebra import Pool, Word, rank, stage, standardised
from kvjax.keep.budgets.budget import AcrossHeads, AcrossLayers, PerLayer, Threshold, Uniform, UpTo
from kvjax.keep.budgets.pyramid import Pyramid
from kvjax.keep.observations.observe import (
    DecayedMass,
    Hidden,
    Mass,
    Queries,
    QueryCount,
    QueryMoments,
    UnrotatedKeys,
)
from kvjax.keep.observations.trace import AccumulatedDecayedMass, AccumulatedMass, ConstantTrace, Surprisal
from kvjax.keep.patterns import Recent, Sink
from kvjax.keep.scores.score import (
    AccumulatedAttention,
    DecayedAttention,
    KeyNorm,
    KeyRedundancy,
    LastLogits,
    OutputNorm,
    Position,
    ValueNorm,
    WindowAttention,
)
from kvjax.methods import chain, paper
from kvjax.methods.papers import Press
from kvjax.methods.parameters import Range
from kvjax.methods.shared import (
    Amount,
    Bits,
    Depth,
    Fit,
    Group,
    Kernel,
    Layers,
    Page,
    Rank,
    Ratio,
    Seed,
    Share,
    TokenIds,
    Tokens,
    Window,
)
from kvjax.ops.attention.block_sparse import Picks
from kvjax.read.pages import PageBounds
from kvjax.read.ranked import RankedSlots
from kvjax.read.segment_scores import SegmentScores
from kvjax.state.cache import Slots
from kvjax.state.codes import Codec, dense
from kvjax.store.affine import Affine, Float8
from kvjax.store.outlier_channels import OutlierChannels
from kvjax.store.outliers import Outliers
from kvjax.store.rotate import Rotate
from kvjax.store.split import Split
from kvjax.store.wrap import WrappedCodec, Wrapper

__all__ = [
    # A method and its parts.
    "Method", "Keep", "Store", "Budget", "chain",
    # What words see: slots under choice, what is known of their row, what a layer computes, a cache's slots
    # and their plain arrays.
    "View", "Observed", "AttentionSpec", "Inputs", "Slots", "dense",
    # The kinds of words, as base classes.
    "Score", "Pattern", "Allocation", "Merge", "Observation", "Trace",
    "Read", "PromptRead", "PromptQueries", "Picks", "Fact",
    "Codec",
    "Phase", "When",
    "Narrow", "Rereading", "Make", "Stacking", "Residence",
    # Scores: their base class, which adds, multiplies and chains scores, and those that most methods use.
    "Word", "Pool", "rank", "stage", "standardised",
    "WindowAttention", "AccumulatedAttention", "DecayedAttention", "LastLogits", "KeyNorm", "ValueNorm",
    "KeyRedundancy", "OutputNorm", "Position",
    # Patterns: tokens that always stay.
    "Sink", "Recent",
    # Budgets of layers and heads.
    "Uniform", "AcrossHeads", "AcrossLayers", "PerLayer", "Pyramid", "Threshold", "UpTo",
    # When slots are evicted.
    "PREFILL_END", "STEP", "Every", "WhenFull",
    # What layers record for scores.
    "Queries", "Mass", "DecayedMass", "QueryCount", "UnrotatedKeys", "QueryMoments", "Hidden",
    # Traces: values accumulated per slot, from its token's arrival on.
    "AccumulatedMass", "AccumulatedDecayedMass", "ConstantTrace", "Surprisal",
    # The positions by which keys and queries are rotated.
    "ByPosition", "ByRank", "Clamped",
    # Codecs, and wrappers around codecs.
    "Affine", "Float8", "Split",
    "Wrapper", "WrappedCodec",
    "Rotate", "Outliers", "OutlierChannels",
    # Reads: bases that rank slots or pages for every query.
    "RankedSlots",
    "PageBounds",
    # Reads in prompts.
    "SegmentScores",
    # Fitted arrays.
    "Fitted", "FittedWord", "as_fitted",
    # The facts about a paper, the types of hyper-parameters, and the error for their wrong values.
    "paper", "Press",
    "Amount", "Bits", "Depth", "Fit", "Group", "Kernel", "Layers", "Page", "Rank", "Ratio", "Seed", "Share",
    "TokenIds", "Tokens", "Window",
    "Range",
    "InputError",
]  # fmt: skip

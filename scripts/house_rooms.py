"""The floors and rooms of kvjax, from the ground up: which files lie in which, and what for."""

from __future__ import annotations

from typing import NamedTuple


class Room(NamedTuple):
    """Folders and files of one purpose, and in a few words which."""

    name: str
    paths: tuple[str, ...]
    about: str


def _room(name: str, about: str, *paths: str) -> Room:
    return Room(name, paths, about)


# From the ground up. Rooms of a floor know nothing of each other. A floor without a name belongs to the named
# one below it.
FLOORS: tuple[tuple[str, tuple[Room, ...]], ...] = (
    (
        "ground",
        (
            _room("pallas_kernels", "kernels only", "pallas_kernels"),
            _room(
                "errors, files",
                "what a user's mistake raises; checks of arguments; files that appear whole or not at all; "
                "the public names",
                "kvjax/base/errors.py",
                "kvjax/base/checks.py",
                "kvjax/base/ranges.py",
                "kvjax/base/atomic_files.py",
                "kvjax/base/interrupts.py",
                "kvjax/base/streams.py",
                "kvjax/__init__.py",
            ),
        ),
    ),
    (
        "operations",
        (
            _room(
                "ops/base",
                "softmax, rope, chunks, dtypes; which implementation runs",
                "kvjax/ops/base",
                "kvjax/ops/__init__.py",
            ),
            _room("mesh", "rules: which axes of arrays are split over which axes of a mesh", "kvjax/mesh"),
            _room(
                "hosts", "several processes as one program: how they meet and what they say", "kvjax/hosts"
            ),
        ),
    ),
    (
        "",
        (
            _room("ops/attention", "attention of many tokens over a union of slots", "kvjax/ops/attention"),
            _room(
                "ops/recurrent", "linear attentions and other states of constant size", "kvjax/ops/recurrent"
            ),
        ),
    ),
    ("", (_room("ops/decode", "attention and appends of one token", "kvjax/ops/decode"),)),
    (
        "state",
        (
            _room(
                "cache",
                "`Slots`, `Pages`, `Paged`, `Codes`, `State`, `Cache`, how rows are written, what "
                "attention asks of codes, and which device holds what",
                "kvjax/state/codes.py",
                "kvjax/state/cache.py",
                "kvjax/state/axes.py",
                "kvjax/state/shardings.py",
                "kvjax/state/code_forms.py",
                "kvjax/state/page_gather.py",
                "kvjax/state/write.py",
            ),
        ),
    ),
    (
        "grammar, models",
        (
            _room(
                "grammar",
                "the sentence (`Method`, `Keep`, `Store`, `Budget`) and what its words promise",
                "kvjax/grammar/sentence.py",
                "kvjax/grammar/protocols.py",
                "kvjax/grammar/read_protocols.py",
                "kvjax/grammar/keys.py",
                "kvjax/grammar/calls.py",
                "kvjax/grammar/refuse_keep.py",
                "kvjax/grammar/refuse_method.py",
                "kvjax/grammar/validate.py",
                "kvjax/grammar/when.py",
                "kvjax/grammar/phase.py",
                "kvjax/grammar/fitted.py",
                "kvjax/grammar/to_text.py",
            ),
            _room(
                "models",
                "the decoder: config, mixers, feed-forwards, the stack; Hugging Face files; shipped models",
                "models",
            ),
        ),
    ),
    (
        "words",
        (
            _room("make", "what a method makes of a model's weights before anything is read", "kvjax/make"),
            _room("keep", "which slots stay: scores, budgets, patterns, merges", "kvjax/keep"),
            _room("store", "how a slot's numbers are encoded", "kvjax/store"),
            _room("read", "which slots a step looks at", "kvjax/read"),
            _room(
                "place", "how slots lie in memory: pages, rows of a batch, and layers in pairs", "kvjax/place"
            ),
        ),
    ),
    (
        "sentences",
        (
            _room(
                "segments",
                "what a sentence means for a run of layers (`group.py`), which slots stay (`choose.py`), "
                "how they are moved (`segments.py`; `pairs.py` where two layers become one), and what lies "
                "beside them for reads (`summaries.py`)",
                "kvjax/compress/group.py",
                "kvjax/compress/select.py",
                "kvjax/compress/segments.py",
                "kvjax/compress/pages.py",
                "kvjax/compress/summaries.py",
                "kvjax/compress/layer_merge.py",
                "kvjax/compress/capacity.py",
                "kvjax/compress/sinks.py",
            ),
            _room(
                "methods",
                "one short function per paper, with what is known of the paper, in its family's file",
                "kvjax/methods",
            ),
            _room(
                "layout",
                "classes of sentences whose caches are laid out alike",
                "kvjax/compat/layout_class.py",
            ),
            _room(
                "suits",
                "whether a method suits a model, and how long its texts may get",
                "kvjax/compat/model_fit.py",
                "kvjax/compat/max_length.py",
            ),
        ),
    ),
    (
        "steps",
        (_room("steps", "the two pure functions: `prefill` (many tokens) and `step` (one)", "kvjax/steps"),),
    ),
    (
        "verbs",
        (
            _room(
                "verbs",
                "`prefill`, `step` and `generate`: checks, buckets, sampling, beams; their pure forms; "
                "models that methods make; what a method scores and keeps; contexts for cross-attention; "
                "two decoders as one",
                "kvjax/api/chunks.py",
                "kvjax/api/prefill.py",
                "kvjax/api/step.py",
                "kvjax/api/verify.py",
                "kvjax/api/likelihood.py",
                "kvjax/api/fork.py",
                "kvjax/api/generate.py",
                "kvjax/api/nan_checks.py",
                "kvjax/api/program_limit.py",
                "kvjax/api/memory.py",
                "kvjax/pure.py",
                "kvjax/api/prepare.py",
                "kvjax/compat/shipped_fits.py",
                "kvjax/api/fit_arrays.py",
                "kvjax/api/contexts.py",
                "kvjax/api/sampling.py",
                "kvjax/api/decode_loop.py",
                "kvjax/api/logit_processors.py",
                "kvjax/api/beam_search.py",
                "kvjax/api/stop_strings.py",
                "kvjax/api/scores.py",
                "kvjax/api/summary.py",
                "kvjax/api/kept_texts.py",
                "kvjax/api/types.py",
                "kvjax/api/block_transformer.py",
            ),
        ),
    ),
    (
        "files",
        (
            _room(
                "loading",
                "`load` for every kind of model, checkpoints, saved caches",
                "kvjax/io/load.py",
                "kvjax/io/checkpoint.py",
                "kvjax/io/cache_file.py",
                "kvjax/io/cache_tree.py",
                "kvjax/io/cache_arrays.py",
            ),
            _room(
                "presets",
                "hyper-parameters from gin files",
                "kvjax/io/gin_files.py",
                "kvjax/io/gin_bindings.py",
                "configs",
            ),
        ),
    ),
    (
        "evaluation",
        (
            _room("eval/tasks", "questions, and how answers are graded", "kvjax/eval/tasks"),
            _room("eval/report", "cells, the printed table, the plot, the page", "kvjax/eval/report"),
        ),
    ),
    ("", (_room("eval/run", "which cells, how answers are asked, the log, memory", "kvjax/eval/run"),)),
    (
        "",
        (
            _room(
                "eval",
                "`compare`, on questions or on a text",
                "kvjax/eval/compare.py",
                "kvjax/eval/run/perplexity.py",
                "kvjax/eval/__init__.py",
            ),
        ),
    ),
    (
        "tools",
        (
            _room("fitting", "what words are taught about a model, from a few texts", "kvjax/fitting"),
            _room("nnx", "models as modules of flax, and a cache in a user's own", "kvjax/nnx.py"),
            _room("aot", "kernels and decoders through the compilers of TPUs and GPUs", "kvjax/aot"),
        ),
    ),
    (
        "",
        (
            _room(
                "plan",
                "whether models and caches fit many devices, and what a step costs there",
                "kvjax/plan",
            ),
            _room("train", "training loops, conversion of layers, grouping of heads", "kvjax/train"),
        ),
    ),
    (
        "commands",
        (
            _room(
                "commands",
                "the command line, thin",
                "kvjax/commands",
                "kvjax/commands/main.py",
                "kvjax/__main__.py",
            ),
        ),
    ),
    ("scripts", (_room("scripts", "benchmarks, fixtures, the tables of docs/, this picture", "scripts"),)),
)
ROOMS = {room.name: room for _, rooms in FLOORS for room in rooms}
FLOOR = {room.name: i for i, (_, rooms) in enumerate(FLOORS) for room in rooms}

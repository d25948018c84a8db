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
                "kvjax/errors.py",
                "kvjax/inputs.py",
                "kvjax/ranges.py",
                "kvjax/files.py",
                "kvjax/interrupts.py",
                "kvjax/streams.py",
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
                "kvjax/codes.py",
                "kvjax/cache.py",
                "kvjax/axes.py",
                "kvjax/who_holds.py",
                "kvjax/stored.py",
                "kvjax/gathered.py",
                "kvjax/writing.py",
            ),
        ),
    ),
    (
        "grammar, models",
        (
            _room(
                "grammar",
                "the sentence (`Method`, `Keep`, `Store`, `Budget`) and what its words promise",
                "kvjax/grammar.py",
                "kvjax/protocols.py",
                "kvjax/read_protocols.py",
                "kvjax/word_keys.py",
                "kvjax/words.py",
                "kvjax/refusals.py",
                "kvjax/refused_parts.py",
                "kvjax/word_protocols.py",
                "kvjax/when.py",
                "kvjax/phase.py",
                "kvjax/fitted.py",
                "kvjax/written.py",
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
                "kvjax/group.py",
                "kvjax/choose.py",
                "kvjax/segments.py",
                "kvjax/paging.py",
                "kvjax/summaries.py",
                "kvjax/pairs.py",
                "kvjax/room.py",
                "kvjax/sinks.py",
            ),
            _room(
                "methods",
                "one short function per paper, with what is known of the paper, in its family's file",
                "kvjax/methods",
            ),
            _room("layout", "classes of sentences whose caches are laid out alike", "kvjax/layout.py"),
            _room(
                "suits",
                "whether a method suits a model, and how long its texts may get",
                "kvjax/suits.py",
                "kvjax/reach.py",
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
                "kvjax/chunking.py",
                "kvjax/prefilling.py",
                "kvjax/stepping.py",
                "kvjax/verifying.py",
                "kvjax/text_likelihood.py",
                "kvjax/forking.py",
                "kvjax/generation.py",
                "kvjax/not_numbers.py",
                "kvjax/program_limit.py",
                "kvjax/memory.py",
                "kvjax/pure.py",
                "kvjax/making.py",
                "kvjax/ready.py",
                "kvjax/fits_trace.py",
                "kvjax/context.py",
                "kvjax/sampling.py",
                "kvjax/samples.py",
                "kvjax/processors.py",
                "kvjax/beams.py",
                "kvjax/stopping.py",
                "kvjax/oracle.py",
                "kvjax/cache_summary.py",
                "kvjax/cache_text.py",
                "kvjax/verbs.py",
                "kvjax/block_transformer.py",
            ),
        ),
    ),
    (
        "files",
        (
            _room(
                "loading",
                "`load` for every kind of model, checkpoints, saved caches",
                "kvjax/loading.py",
                "kvjax/checkpoint.py",
                "kvjax/cache_file.py",
                "kvjax/cache_tree.py",
                "kvjax/cache_arrays.py",
            ),
            _room(
                "presets",
                "hyper-parameters from gin files",
                "kvjax/gin_files.py",
                "kvjax/gin_bindings.py",
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
                "kvjax/eval/streaming.py",
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
        (_room("commands", "the command line, thin", "kvjax/commands", "kvjax/cli.py", "kvjax/__main__.py"),),
    ),
    ("scripts", (_room("scripts", "benchmarks, fixtures, the tables of docs/, this picture", "scripts"),)),
)
ROOMS = {room.name: room for _, rooms in FLOORS for room in rooms}
FLOOR = {room.name: i for i, (_, rooms) in enumerate(FLOORS) for room in rooms}

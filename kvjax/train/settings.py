"""What a training run is told: model, data, optimiser and loop, as values that are checked at once."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from kvjax.errors import InputError
from kvjax.eval.tasks.recall_tasks import TASKS
from kvjax.models.block_transformer import BlockConfig
from kvjax.models.config import Config
from kvjax.models.config_json import config_from_json
from kvjax.ops.base.rope import Rope

S = TypeVar("S")


FROM_FILES = ("text", "json", "parquet")
# Of words of the recall language, with its tokenizer.
OF_WORDS = ("recall", "pairs")
KINDS = (*FROM_FILES, "python", *OF_WORDS)


def _known(what: str, given: Any, known: Any) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
            raise InputError(f"unknown {what} {name!r}: {hint}")


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        near = difflib.get_close_matches(str(value), known, 1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise InputError(f"{name} is {value!r}, expected one of {', '.join(known)}{hint}")


def _between(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InputError(f"{name} is {value!r}, expected a number from {low} to {high}")


def _count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} is {value!r}, expected a whole number of at least {least}")


@dataclasses.dataclass(frozen=True)
class Data:
    """Which texts are read. kind: "text" (files), "json" (a field of every line), "parquet" (a column),
    "python" (the standard library's source of the running interpreter), "recall" (the language of
    `recall-tiny`) or "pairs" (associative recall: half of a row tells pairs, the rest asks for them all).

    files: paths, or patterns such as "corpus/**/*.txt", from the current folder. field: the field or column
    that holds a text. tokenizer: "bytes", or a model whose tokenizer it is, as `kvjax.load` takes one.
    held_out: the share of texts, chosen by a hash of them, that is never trained on. segments: texts that lie
    in one row do not see each other. seed: of the order of texts. tasks: which tasks of `kvjax compare` rows
    of "recall" ask; all of them, in their shares, unless given.
    """

    kind: str = "python"
    files: tuple[str, ...] = ()
    field: str = "text"
    tokenizer: str = "bytes"
    held_out: float = 0.05
    segments: bool = True
    seed: int = 0
    tasks: tuple[str, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "tasks", tuple([self.tasks] if isinstance(self.tasks, str) else self.tasks))
        files = (self.files,) if isinstance(self.files, str) else tuple(self.files)
        object.__setattr__(self, "files", files)
        _one_of("data.kind", self.kind, KINDS)
        _between("data.held_out", self.held_out, 0.0, 0.5)
        _count("data.seed", self.seed, 0)
        needs = self.kind in FROM_FILES
        if needs and not files:
            raise InputError(f"data.kind is {self.kind!r} and data.files names no file: give a list of paths")
        if files and not needs:
            raise InputError(f"data.kind is {self.kind!r}, which reads no files, but data.files is {files}")
        for task in self.tasks:
            _one_of("each of data.tasks", task, tuple(TASKS))
        if self.tasks and self.kind != "recall":
            raise InputError(f"data.tasks is {self.tasks}, which are asked by data.kind 'recall' alone")


@dataclasses.dataclass(frozen=True)
class Optimiser:
    """How gradients become steps. name: "adamw" or "muon" (matrices of layers by Muon,
    all else by Adam with Nesterov's momentum).

    peak: the largest learning rate. schedule: "cosine" down to floor * peak, "wsd" (constant, then linear
    down to floor * peak over the last `decay` of all steps) or "constant"; each behind `warmup` steps. clip:
    the largest norm of a gradient. weight_decay acts on matrices alone.
    """

    name: str = "adamw"
    peak: float = 3e-3
    schedule: str = "cosine"
    warmup: int = 100
    decay: float = 0.2
    floor: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self):
        _one_of("optimiser.name", self.name, ("adamw", "muon"))
        _one_of("optimiser.schedule", self.schedule, ("cosine", "wsd", "constant"))
        _between("optimiser.peak", self.peak, 0.0, math.inf)
        for name in ("decay", "floor", "b1", "b2"):
            _between(f"optimiser.{name}", getattr(self, name), 0.0, 1.0)
        _count("optimiser.warmup", self.warmup, 0)


@dataclasses.dataclass(frozen=True)
class Loop:
    """How long and how often. batch: rows of `length` tokens per step, read in `accumulate` parts.

    stages: (steps, length, batch) one after the other, in place of these three; what learning rates do
    over steps they then do over tokens. compute: the dtype of layers; weights are kept in float32. remat:
    compute layers anew for the gradient instead of keeping what lies inside them. balance: what unequal
    use of experts costs, times the loss of Switch Transformers (arXiv:2101.03961). codes: what the distance
    of keys from their codes costs (Transformer-VQ, arXiv:2309.16354). distil: with a
    teacher, the share of the loss that is the divergence from its predictions; distil_hidden,
    distil_attention: what the squared distance from its hidden states and from the outputs of its mixers
    is multiplied by, the mean over channels and layers. log_every, evaluate_every: in steps.
    evaluate_rows: of held-out texts. passes: where layers read slots from above, how many passes without
    a gradient and then with one stand for all of them (LCKV, arXiv:2405.10637; its code has 7 and 2).
    context: tokens at the start of every row that an encoder reads and the model does not (XC-Cache,
    arXiv:2404.15420), `chunk` of them at a time, apart from each other (CEPE, arXiv:2402.16617), or all at
    once. method: they are read by the model under this method instead, and the rest is said over what it
    leaves in the cache (`kvjax.train.compressed`). repeat: with the method "loma", what it costs to say runs
    of the context again from their memory alone (arXiv:2401.09486).
    """

    steps: int = 1000
    batch: int = 16
    length: int = 256
    accumulate: int = 1
    stages: tuple[tuple[int, int, int], ...] = ()
    compute: str = "bfloat16"
    remat: bool = False
    passes: tuple[int, int] = (7, 2)
    context: int = 0
    chunk: int = 0
    method: str | None = None
    repeat: float = 1.0
    balance: float = 0.01
    codes: float = 1e-3
    distil: float = 0.5
    distil_hidden: float = 0.0
    distil_attention: float = 0.0
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 200
    evaluate_rows: int = 64
    save_seconds: float = 60.0

    def __post_init__(self):
        self._stage()
        object.__setattr__(self, "passes", tuple(self.passes))
        if len(self.passes) != 2:
            raise InputError(f"train.passes is {self.passes}, expected two numbers, as in (7, 2)")
        for least, value in enumerate(self.passes):
            _count("each of train.passes", value, least)
        for name in ("steps", "batch", "length", "accumulate", "log_every", "evaluate_every"):
            _count(f"train.{name}", getattr(self, name), 1)
        _count("train.evaluate_rows", self.evaluate_rows, 1)
        _count("train.context", self.context, 0)
        _count("train.chunk", self.chunk, 0)
        _count("train.seed", self.seed, 0)
        _between("train.distil", self.distil, 0.0, 1.0)
        for name in ("balance", "codes", "repeat", "distil_hidden", "distil_attention"):
            _between(f"train.{name}", getattr(self, name), 0.0, math.inf)
        if not isinstance(self.method, str | None):
            raise InputError(
                f"train.method is {self.method!r}, expected a method in words, such as 'gisting'"
            )
        _one_of("train.compute", self.compute, ("bfloat16", "float32"))
        for batch in {self.batch, *(batch for *_, batch in self.stages)}:
            if batch % self.accumulate:
                raise InputError(
                    f"train.batch is {batch} rows and train.accumulate {self.accumulate} parts: the first "
                    "must be a multiple of the second"
                )

    def _stage(self) -> None:
        """Checks the stages, of which steps and the largest length and batch follow."""
        stages = tuple(tuple(stage) for stage in self.stages)
        if any(len(stage) != 3 for stage in stages):
            raise InputError(f"train.stages is {self.stages}, expected a list of (steps, length, batch)")
        for stage in stages:
            for name, value in zip(("steps", "length", "batch"), stage, strict=True):
                _count(f"{name} of train.stages", value, 1)
        if stages:
            steps, lengths, batches = zip(*stages, strict=True)
            found = dict(stages=stages, steps=sum(steps), length=max(lengths), batch=max(batches))
            for name, value in found.items():
                object.__setattr__(self, name, value)

    def size(self, step: int) -> tuple[int, int]:
        """Length and rows of a step.

        >>> loop = Loop(stages=((2, 128, 8), (1, 256, 4)))
        >>> [loop.size(step) for step in range(3)], loop.tokens(3)
        ([(128, 8), (128, 8), (256, 4)], 3072)
        """
        for steps, length, batch in self.stages:
            if step < steps:
                return length, batch
            step -= steps
        return self.length, self.batch

    def tokens(self, steps: int) -> int:
        """How many tokens so many steps read."""
        found, left = 0, steps
        for count, length, batch in self.stages or ((self.steps, self.length, self.batch),):
            found += min(left, count) * length * batch
            left -= min(left, count)
        return found

    @property
    def ends(self) -> tuple[int, ...]:
        """The steps behind which stages end, the last one included."""
        return tuple(itertools.accumulate(steps for steps, *_ in self.stages)) or (self.steps,)


@dataclasses.dataclass(frozen=True)
class Tune:
    """Which weights learn, by patterns of names such as "layers.*.q".

    trained: those that do; all unless they or `lora` are given. frozen: those that do not, whatever else
    names them. lora: matrices that learn by a change of low rank (arXiv:2106.09685),
    down @ up * alpha / rank. encoder: an encoder of contexts learns with the model (CEPE, arXiv:2402.16617).
    """

    trained: tuple[str, ...] | None = None
    frozen: tuple[str, ...] = ()
    lora: tuple[str, ...] = ()
    rank: int = 8
    alpha: float = 16.0
    encoder: bool = False

    def __post_init__(self):
        for name in ("trained", "frozen", "lora"):
            given = getattr(self, name)
            given = (given,) if isinstance(given, str) else given if given is None else tuple(given)
            object.__setattr__(self, name, given)
        _count("tune.rank", self.rank, 1)
        _between("tune.alpha", self.alpha, 0.0, math.inf)

    @property
    def all(self) -> bool:
        """Whether every weight of the model learns, as itself."""
        return self == Tune(rank=self.rank, alpha=self.alpha, encoder=self.encoder)


@dataclasses.dataclass(frozen=True)
class Devices:
    """On which devices a run computes, as in `kvjax.load`. mesh: axes in words, such as "data=8"; rules: by
    which of them weights and rows are split. workers: processes that make the rows of the tasks "recall" and
    "pairs" while the devices compute, which a GPU or TPU needs; 0: the run's own. A run may go on by another
    mesh, other rules and other workers."""

    mesh: str | None = None
    rules: str | None = None
    workers: int = 0

    def __post_init__(self):
        _count("devices.workers", self.workers, 0)
        if self.mesh is not None and self.rules is None:
            object.__setattr__(self, "rules", "batch")


@dataclasses.dataclass(frozen=True)
class Training:
    """A whole run. start: a model's directory to go on from; else `config` is started at random, or by init
    "circuit" with the heads of `kvjax.train.recall_init`.

    teacher: a model's directory, from whose predictions the run learns, too. encoder: the directory of one
    that reads the first `loop.context` tokens of every row for the model's layers of cross-attention, or the
    sizes of one that starts at random.
    """

    config: Config | BlockConfig | None = None
    start: str | None = None
    teacher: str | None = None
    encoder: str | Config | None = None
    init: str = "random"
    data: Data = Data()
    optimiser: Optimiser = Optimiser()
    loop: Loop = Loop()
    tune: Tune = Tune()
    devices: Devices = Devices()

    def __post_init__(self):
        if (self.config is None) == (self.start is None):
            raise InputError(
                "a run starts from a config or from a model: bind model.d_model and the other sizes, or "
                "model.start, and not both"
            )
        _one_of("model.init", self.init, ("random", "circuit"))


SIZES = dict(layers=4, d_model=128, heads=4, kv_heads=4, head_dim=32, d_ff=352, max_positions=8192)
SECTIONS = {"data": Data, "optimiser": Optimiser, "train": Loop, "tune": Tune, "devices": Devices}


def training(bound: Mapping[str, Mapping[str, Any]], vocab: int | None = None) -> Training:
    """A run from what a file binds: the section "model" and those of `SECTIONS`.

    The model's fields are those of a `Config` as JSON, with `mixer` and `mlp` for all layers at once; vocab
    fills in what the tokenizer knows. A model to start from takes the place of all of them. Raises InputError
    for unknown names, with the nearest, and for values that do not fit.

    >>> run = training({"model": {"layers": 2, "mixer": {"word": "Attention"}}, "train": {"steps": 3}}, 257)
    >>> run.config.vocab, run.loop.steps
    (257, 3)
    """
    _known("section", bound, ("model", *SECTIONS))
    parts = {name: _built(name, kind, bound.get(name, {})) for name, kind in SECTIONS.items()}
    model = dict(bound.get("model", {}))
    start, teacher = model.pop("start", None), model.pop("teacher", None)
    if teacher is None and (given := [n for n in bound.get("train", {}) if n.startswith("distil")]):
        raise InputError(
            f"train.{given[0]} is given and no teacher to learn from: bind model.teacher, or leave it out"
        )
    first, encoder = model.pop("init", "random"), model.pop("encoder", None)
    if isinstance(encoder, Mapping):
        encoder = _config(dict(encoder), vocab)
        if not isinstance(encoder, Config):
            raise InputError("model.encoder gives the sizes of two decoders, expected those of one encoder")
    config = _config(model, vocab)
    config = config if start is None else None
    parts["loop"] = parts.pop("train")
    return Training(config, start, teacher, encoder, first, **parts)


def _built(section: str, kind: type[S], given: Mapping[str, Any]) -> S:
    _known(f"setting of {section}", given, [f.name for f in dataclasses.fields(kind)])  # pyright: ignore
    return kind(**given)


def _config(model: dict[str, Any], vocab: int | None) -> Config | BlockConfig:
    if "blocks" in model or "tokens" in model:
        return _two_decoders(model, vocab)
    known = [f.name for f in dataclasses.fields(Config)]
    _known("setting of model", model, (*known, "mixer", "mlp", "start", "teacher", "encoder", "init"))
    rope = dataclasses.asdict(Rope()) | model.get("rope", {})
    fields = {"vocab": vocab or 256} | SIZES | model | {"rope": rope}
    for one, many in (("mixer", "mixers"), ("mlp", "mlps")):
        if one in fields:
            if many in model:
                raise InputError(f"model.{one} and model.{many} were both given: give one of them")
            fields[many] = [fields.pop(one)] * fields["layers"]
    return _read(fields)


def _two_decoders(model: dict[str, Any], vocab: int | None) -> BlockConfig:
    """A Block Transformer: model.blocks and model.tokens are the settings of its decoders."""
    known = [f.name for f in dataclasses.fields(BlockConfig)]
    _known("setting of a model of two decoders", model, (*known, "start", "teacher", "encoder", "init"))
    sizes = {name: model[name] for name in ("length", "prefix") if name in model}
    tokens = _config(model.get("tokens", {}), vocab)
    assert isinstance(tokens, Config)
    said = {"vocab": sizes.get("prefix", BlockConfig.prefix) * tokens.d_model}
    blocks = _config(model.get("blocks", {}) | said, None)
    assert isinstance(blocks, Config)
    try:
        return BlockConfig(blocks, tokens, **sizes)
    except (ValueError, TypeError) as error:
        raise InputError(f"the settings of model are those of no model: {error}") from error


def _read(fields: dict[str, Any]) -> Config:
    try:
        config = config_from_json(fields)
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"the settings of model are those of no model: {error}") from error
    assert isinstance(config, Config)
    return config

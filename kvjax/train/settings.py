"""A training run's settings: model, data, optimiser and loop, as values that are checked at once."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from kvjax.base.errors import InputError
from kvjax.base.ranges import REFUSED, Count, FieldError, Range, Whole, check_fields, expected, read
from kvjax.eval.tasks.recall_tasks import TASKS
from kvjax.models.block_transformer import BlockConfig
from kvjax.models.config import Config
from kvjax.models.config_json import config_from_json
from kvjax.ops.base.rope import Rope

S = TypeVar("S")


FROM_FILES = ("text", "json", "parquet")
# Kinds of data in the recall language, with its tokenizer.
OF_WORDS = ("recall", "pairs")
Seed = Annotated[int, Range(0, 2**32 - 1)]
Share = Annotated[float, Range(0, 1)]
# A moving mean with decay 1 would stay at its start.
Decay = Annotated[float, Range(0, 1, below=True)]
Weight = Annotated[float, Range(0)]


def _texts(given: Any) -> Any:
    """Make a single text a list."""
    return (given,) if isinstance(given, str) else given


def _known(what: str, given: Any, known: Any) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
            raise InputError(f"unknown {what} {name!r}: {hint}")


@dataclasses.dataclass(frozen=True)
class Data:
    """The texts of a run.

    kind: "text" (files), "json" (a field of every line), "parquet" (a column), "python" (the source of the
    running interpreter's standard library), "recall" (the language of `recall-tiny`) or "pairs" (associative
    recall: half of a row gives pairs, and the rest asks for all of them).

    files: paths, or patterns such as "corpus/**/*.txt", from the current folder. field: the field or column
    that holds a text. tokenizer: "bytes", or a model whose tokenizer it is, as `kvjax.load` takes one.
    held_out: the share of texts, chosen by a hash of them, that is never trained on. segments: texts in one
    row do not attend to each other. seed: of the order of texts. tasks: the tasks of `kvjax compare` in rows
    of "recall"; by default all of them, in fixed shares.
    """

    kind: Literal["text", "json", "parquet", "python", "recall", "pairs"] = "python"
    files: tuple[str, ...] = ()
    field: str = "text"
    tokenizer: str = "bytes"
    held_out: Annotated[float, Range(0, 0.5)] = 0.05
    segments: bool = True
    seed: Seed = 0
    tasks: tuple[str, ...] = ()

    def __post_init__(self):
        for name in ("files", "tasks"):
            object.__setattr__(self, name, _texts(getattr(self, name)))
        check_fields(self, "data.")
        needs = self.kind in FROM_FILES
        if needs and not self.files:
            raise InputError(f"data.kind is {self.kind!r} and data.files names no file: give a list of paths")
        if self.files and not needs:
            raise InputError(
                f"data.kind is {self.kind!r}, which reads no files, but data.files is {self.files}"
            )
        _known("task in data.tasks", self.tasks, TASKS)
        if self.tasks and self.kind != "recall":
            raise InputError(f"data.tasks is {self.tasks}, which are asked by data.kind 'recall' alone")


@dataclasses.dataclass(frozen=True)
class Optimiser:
    """How gradients become updates.

    name: "adamw" or "muon" (matrices of layers by Muon, all else by Adam with Nesterov's momentum).

    peak: the largest learning rate. schedule: "cosine" down to floor * peak, "wsd" (constant, then linear
    down to floor * peak over the last `decay` of all steps) or "constant"; each after `warmup` steps. clip:
    the largest norm of a gradient. weight_decay applies to matrices alone.
    """

    name: Literal["adamw", "muon"] = "adamw"
    peak: Weight = 3e-3
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: Whole = 100
    decay: Share = 0.2
    floor: Share = 0.1
    b1: Decay = 0.9
    b2: Decay = 0.95
    # A smaller eps is 0 in float32, and the update of a weight without a gradient would be 0 / 0.
    eps: Annotated[float, Range(1e-30)] = 1e-8
    weight_decay: Weight = 0.1
    clip: Annotated[float, Range(0, above=True)] = 1.0

    def __post_init__(self):
        check_fields(self, "optimiser.")


@dataclasses.dataclass(frozen=True)
class Loop:
    """The length of training and the losses. batch: rows of `length` tokens per step, in `accumulate` parts.

    stages: (steps, length, batch) in sequence, in place of these three; learning-rate schedules then count
    tokens instead of steps. compute: the dtype of layers; weights are kept in float32. remat: recompute
    layers for the gradient instead of storing their activations. balance: the weight of the loss for unequal
    use of experts, that of Switch Transformers (arXiv:2101.03961) within each part. codes: the weight of the
    distance of keys from their codes (Transformer-VQ, arXiv:2309.16354). distil: with a teacher, the share of
    the loss that is the divergence from its predictions; distil_hidden, distil_attention: the weights of the
    squared distances from its hidden states and from its mixers' outputs, the mean over channels and layers.
    log_every, evaluate_every: in steps. evaluate_rows: of held-out texts. passes: if layers use slots from
    above, how many passes without a gradient, and then with one, approximate all of them (LCKV,
    arXiv:2405.10637; its code has 7 and 2). context: how many tokens at the start of every row an encoder
    reads instead of the model (XC-Cache, arXiv:2404.15420), `chunk` of them at a time, apart from each other
    (CEPE, arXiv:2402.16617), or all at once. method: the model itself reads them under this method instead,
    and predicts the rest from the compressed cache (`kvjax.train.compressed`). repeat: with the method
    "loma", the weight of the loss of repeating runs of the context from their memory alone
    (arXiv:2401.09486).
    """

    steps: Count = 1000
    batch: Count = 16
    length: Count = 256
    accumulate: Count = 1
    stages: tuple[tuple[int, int, int], ...] = ()
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    remat: bool = False
    passes: tuple[Whole, Count] = (7, 2)
    context: Whole = 0
    chunk: Whole = 0
    method: str | None = None
    repeat: Weight = 1.0
    balance: Weight = 0.01
    codes: Weight = 1e-3
    distil: Share = 0.5
    distil_hidden: Weight = 0.0
    distil_attention: Weight = 0.0
    seed: Seed = 0
    log_every: Count = 10
    evaluate_every: Count = 200
    evaluate_rows: Count = 64
    save_seconds: Weight = 60.0

    def __post_init__(self):
        self._stage()
        check_fields(self, "train.")
        for batch in {self.batch, *(batch for *_, batch in self.stages)}:
            if batch % self.accumulate:
                raise InputError(
                    f"train.batch is {batch} rows and train.accumulate {self.accumulate} parts: the first "
                    "must be a multiple of the second"
                )

    def _stage(self) -> None:
        """Check the stages, and derive the steps and the largest length and batch from them."""
        given = self.stages
        if not isinstance(given, list | tuple) or not all(
            isinstance(stage, list | tuple) and len(stage) == 3 for stage in given
        ):
            raise InputError(f"train.stages is {given!r}, expected a list of (steps, length, batch)")
        stages = tuple(map(tuple, given))
        for stage in stages:
            for name, value in zip(("steps", "length", "batch"), stage, strict=True):
                if read(Count, value) is REFUSED:
                    raise InputError(f"{name} of train.stages is {value!r}, expected {expected(Count)}")
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
        """How many tokens so many steps process."""
        found, left = 0, steps
        for count, length, batch in self.stages or ((self.steps, self.length, self.batch),):
            found += min(left, count) * length * batch
            left -= min(left, count)
        return found

    @property
    def ends(self) -> tuple[int, ...]:
        """The steps after which stages end, the last one included."""
        return tuple(itertools.accumulate(steps for steps, *_ in self.stages)) or (self.steps,)


@dataclasses.dataclass(frozen=True)
class Tune:
    """Which weights are trained, by patterns of names such as "layers.*.q".

    trained: by default all, unless `lora` is given. frozen: takes precedence over the other two. lora:
    matrices trained by a low-rank update (arXiv:2106.09685), down @ up * alpha / rank. encoder: whether an
    encoder of contexts is trained, too (CEPE, arXiv:2402.16617).
    """

    trained: tuple[str, ...] | None = None
    frozen: tuple[str, ...] = ()
    lora: tuple[str, ...] = ()
    rank: Count = 8
    alpha: Weight = 16.0
    encoder: bool = False

    def __post_init__(self):
        for name in ("trained", "frozen", "lora"):
            object.__setattr__(self, name, _texts(getattr(self, name)))
        check_fields(self, "tune.")

    @property
    def all(self) -> bool:
        """Whether every weight of the model is trained directly."""
        return self == Tune(rank=self.rank, alpha=self.alpha, encoder=self.encoder)


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a run, as in `kvjax.load`.

    mesh: axes, such as "data=8"; rules: which axes shard weights and rows. workers: processes that make the
    rows of the tasks "recall" and "pairs" while the devices compute, which a GPU or TPU needs; 0: none. A run
    may continue on another mesh, with other rules and other workers.
    """

    mesh: str | None = None
    rules: str | None = None
    workers: Whole = 0

    def __post_init__(self):
        check_fields(self, "devices.")
        if self.mesh is not None and self.rules is None:
            object.__setattr__(self, "rules", "batch")


@dataclasses.dataclass(frozen=True)
class Training:
    """Settings of a whole run.

    start: a model's directory to continue from; else `config` is started at random, or by init "circuit" with
    the heads of `kvjax.train.recall_init`.

    teacher: a model's directory, whose predictions the run also learns from. encoder: the directory of an
    encoder that reads the first `loop.context` tokens of every row for the model's cross-attention layers, or
    the sizes of a randomly initialised one.
    """

    config: Config | BlockConfig | None = None
    start: str | None = None
    teacher: str | None = None
    encoder: str | Config | None = None
    init: Literal["random", "circuit"] = "random"
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
        check_fields(self, "model.")


SIZES = dict(layers=4, d_model=128, heads=4, kv_heads=4, head_dim=32, d_ff=352, max_positions=8192)
SECTIONS = {"data": Data, "optimiser": Optimiser, "train": Loop, "tune": Tune, "devices": Devices}


def training(bound: Mapping[str, Mapping[str, Any]], vocab: int | None = None) -> Training:
    """Build a run from a file's bindings: the section "model" and those of `SECTIONS`.

    The model's fields are those of a `Config` as JSON, with `mixer` and `mlp` for all layers at once; vocab:
    the tokenizer's size. A model to start from replaces all of them. Raises InputError for unknown names,
    with the nearest, and for values that do not fit.

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
        encoder = _config(dict(encoder), vocab, "model.encoder")
        if not isinstance(encoder, Config):
            raise InputError("model.encoder gives the sizes of two decoders, expected those of one encoder")
    config = _config(model, vocab)
    config = config if start is None else None
    parts["loop"] = parts.pop("train")
    return Training(config, start, teacher, encoder, first, **parts)


def _built(section: str, kind: type[S], given: Mapping[str, Any]) -> S:
    _known(f"setting of {section}", given, [f.name for f in dataclasses.fields(kind)])  # pyright: ignore
    return kind(**given)


def _config(model: dict[str, Any], vocab: int | None, within: str = "model") -> Config | BlockConfig:
    if "blocks" in model or "tokens" in model:
        return _two_decoders(model, vocab)
    known = [f.name for f in dataclasses.fields(Config)]
    _known(f"setting of {within}", model, (*known, "mixer", "mlp", "start", "teacher", "encoder", "init"))
    rope = dataclasses.asdict(Rope()) | _mapping(f"{within}.rope", model.get("rope", {}))
    fields = {"vocab": vocab or 256} | SIZES | model | {"rope": rope}
    for one, many in (("mixer", "mixers"), ("mlp", "mlps")):
        if one in fields:
            if many in model:
                raise InputError(f"{within}.{one} and {within}.{many} were both given: give one of them")
            layers = read(Count, fields["layers"])
            fields[many] = [fields.pop(one)] * (1 if layers is REFUSED else layers)
    config = _read(within, lambda: config_from_json(fields))
    assert isinstance(config, Config)
    return config


def _two_decoders(model: dict[str, Any], vocab: int | None) -> BlockConfig:
    """Build a Block Transformer: model.blocks and model.tokens are the settings of its decoders."""
    known = [f.name for f in dataclasses.fields(BlockConfig)]
    _known("setting of a model of two decoders", model, (*known, "start", "teacher", "encoder", "init"))
    sizes = {name: model[name] for name in ("length", "prefix") if name in model}
    blocks, tokens = (_mapping(f"model.{name}", model.get(name, {})) for name in ("blocks", "tokens"))
    inner = _config(tokens, vocab, "model.tokens")
    assert isinstance(inner, Config)
    prefix = read(Count, sizes.get("prefix", BlockConfig.prefix))
    said = {"vocab": (1 if prefix is REFUSED else prefix) * inner.d_model}
    outer = _config(blocks | said, None, "model.blocks")
    assert isinstance(outer, Config)
    return _read("model", lambda: BlockConfig(outer, inner, **sizes))


def _mapping(name: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise InputError(f"{name} is {given!r}, expected a dict of settings, such as {{'theta': 1e6}}")
    return dict(given)


def _read(within: str, make: Callable[[], S]) -> S:
    try:
        return make()
    except FieldError as error:
        raise InputError(f"{within}.{error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"the settings of {within} are those of no model: {error}") from error


def check_changes(bound: Mapping[str, Mapping[str, Any]], changes: Sequence[str]) -> None:
    """Raise InputError for overrides without effect: steps beside stages, or sizes beside a model's own.

    >>> check_changes({"train": {"stages": [(500, 128, 16)]}}, ["train.steps=3"])
    Traceback (most recent call last):
    kvjax.InputError: train.steps=3 changes nothing, because train.stages is [(500, 128, 16)], which \
decides steps, length and batch: give other stages, or train.stages=() with the three
    """
    stages, start = bound.get("train", {}).get("stages", ()), bound.get("model", {}).get("start")
    for change in changes:
        section, _, name = change.partition("=")[0].strip().partition(".")
        if stages and section == "train" and name in ("steps", "length", "batch"):
            raise InputError(
                f"{change} changes nothing, because train.stages is {stages}, which decides steps, length "
                "and batch: give other stages, or train.stages=() with the three"
            )
        if start is not None and section == "model" and name not in ("start", "teacher", "encoder"):
            raise InputError(
                f"{change} changes nothing, because the run goes on from {start}, which has its own sizes: "
                "leave it out, or convert the model first (kvjax convert)"
            )

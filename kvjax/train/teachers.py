"""Models that are loaded beside a trained one: a teacher, and an encoder or a method that reads contexts."""

from __future__ import annotations

from typing import Any

import jax

from kvjax.base.errors import InputError
from kvjax.io.load import load
from kvjax.models.block_transformer import BlockConfig
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.mixers.cross_attention import CrossAttention
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.train.compressed import ContextCompressor, compressor
from kvjax.train.data.sources import RunTokenizer
from kvjax.train.settings import OF_WORDS, Training
from kvjax.train.step import Companions, Frozen


def beside(run: Training, config: Config | BlockConfig, params: Params, words: RunTokenizer) -> Companions:
    """Build the teacher and the encoder or method of a run; InputError if they do not fit the model."""
    teacher = None if run.teacher is None else _teacher(run, run.teacher, config, words)
    if run.loop.method is not None:
        return Companions(teacher, None, _compressor(run, run.loop.method, config, params))
    return Companions(teacher, _encoder(run, config, words))


def learning(run: Training, others: Companions) -> Any:
    """Return what is trained beside the model: an encoder's parameters, or learned tokens; or None."""
    if others.compressor is not None:
        return others.compressor.learns
    return others.encoder.params if run.tune.encoder and others.encoder is not None else None


def check_tokenizer(path: str, model: Model, words: RunTokenizer, run: Training) -> None:
    """Raise InputError if a model's token ids differ from those of the run's texts."""
    if model.tokenizer is not None and model.tokenizer.get_vocab() != words.tokenizer.get_vocab():
        of_words = run.data.kind in OF_WORDS
        texts = "data.kind is" if of_words else "data.tokenizer is"
        read = run.data.kind if of_words else run.data.tokenizer
        raise InputError(
            f"{texts} {read!r}, and {path} has another tokenizer: give texts of its language, and "
            f"data.tokenizer={path}"
        )


def _teacher(run: Training, path: str, config: Config | BlockConfig, words: RunTokenizer) -> Frozen:
    model = load(path, mesh=run.devices.mesh, rules=run.devices.rules)
    if not isinstance(model.config, Config) or model.config.vocab != config.vocab:
        raise InputError(
            f"the teacher {path} is no decoder of {config.vocab} ids, as the model is: teach with one "
            "that has the same tokenizer"
        )
    check_tokenizer(path, model, words, run)
    asked = run.loop.distil_hidden or run.loop.distil_attention
    if asked and isinstance(config, Config) and model.config.d_model != config.d_model:
        raise InputError(
            f"the teacher {path} has {model.config.d_model} channels and the model {config.d_model}: set "
            "train.distil_hidden and train.distil_attention to 0, or teach with one as wide"
        )
    return Frozen(model.params, model.config)


def _compressor(
    run: Training, method: str, config: Config | BlockConfig, params: Params
) -> ContextCompressor:
    loop = run.loop
    if not 1 <= loop.context < min(length for _, length, _ in loop.stages or ((0, loop.length, 0),)):
        raise InputError(
            f"train.method is {method!r}, which reads the first train.context tokens of every row, and "
            f"that is {loop.context} of {loop.length}: set it to a part of a row, such as {loop.length // 2}"
        )
    if run.encoder is not None or run.tune.encoder or loop.chunk:
        raise InputError("a context is read by an encoder or by train.method: leave one of them out")
    if run.devices.mesh is not None or loop.distil_hidden or loop.distil_attention:
        raise InputError(
            "train.method trains on one device, and what layers give is not learned under it from a teacher: "
            "leave out devices.mesh, train.distil_hidden and train.distil_attention"
        )
    assert isinstance(config, Config)  # one of two decoders was refused
    return compressor(method, Model(config, params), loop.seed)


def _encoder(run: Training, config: Config | BlockConfig, words: RunTokenizer) -> Frozen | None:
    if isinstance(config, BlockConfig):
        return None
    widths = {m.width for i in range(config.layers) if isinstance(m := mixer_of(config, i), CrossAttention)}
    if run.encoder is None and not widths and not run.loop.context and not run.tune.encoder:
        return None
    if run.encoder is None or not widths or not 1 <= run.loop.context < run.loop.length:
        given = "sizes" if isinstance(run.encoder, Config) else run.encoder
        raise InputError(
            "layers of cross-attention read what an encoder made of the start of every row: model.encoder "
            f"is {given}, train.context {run.loop.context} of {run.loop.length} tokens, and the model has "
            f"{'such' if widths else 'no such'} layers (kvjax convert --to xc-cache or cepe makes them): "
            "give all"
        )
    if run.teacher is not None:
        raise InputError("a teacher reads whole rows, and a context is apart: leave one of them out")
    if run.tune.encoder and run.devices.mesh is not None:
        raise InputError("an encoder learns on one device: leave out devices, or tune.encoder")
    encoder = _fresh(run, run.encoder, words) if isinstance(run.encoder, Config) else _known(run, words)
    if widths != {encoder.config.d_model}:
        raise InputError(
            f"the encoder has {encoder.config.d_model} channels, and the layers of cross-attention read "
            f"{', '.join(map(str, sorted(widths)))}"
        )
    reads = run.loop.chunk or run.loop.context
    if min(reads, run.loop.context) > encoder.config.max_positions:
        raise InputError(
            f"the encoder has {encoder.config.max_positions} positions and is to read {reads} tokens at "
            "once: lower train.chunk"
        )
    return encoder


def _fresh(run: Training, config: Config, words: RunTokenizer) -> Frozen:
    """Make an encoder with random initial weights."""
    if not run.tune.encoder:
        raise InputError(
            "model.encoder gives the sizes of an encoder that starts at random, and it does not learn: set "
            "tune.encoder=True, or name the directory of one that has learned"
        )
    if config.vocab < words.vocab:
        raise InputError(
            f"the tokenizer has {words.vocab} ids and the encoder {config.vocab}: leave vocab out"
        )
    return Frozen(init(config, jax.random.key(run.loop.seed + 1)), config)


def _known(run: Training, words: RunTokenizer) -> Frozen:
    """Load an encoder from a directory."""
    assert isinstance(run.encoder, str)
    model = load(run.encoder, dtype="float32", mesh=run.devices.mesh, rules=run.devices.rules)
    if not isinstance(model.config, Config):
        raise InputError(f"the encoder {run.encoder} is a model of two decoders, expected one of one")
    check_tokenizer(run.encoder, model, words, run)
    return Frozen(model.params, model.config)

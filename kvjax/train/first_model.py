"""The model that a training run starts from: a given one, or a new one of its config."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax

from kvjax.base.errors import InputError
from kvjax.io.load import load
from kvjax.models.block_transformer import BlockConfig
from kvjax.models.block_transformer import init as init_blocks
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.params import init
from kvjax.train.data.sources import RunTokenizer
from kvjax.train.recall_init import check_circuit, circuit_init
from kvjax.train.settings import Training
from kvjax.train.teachers import check_tokenizer

AnyConfig = Config | BlockConfig


def first_model(run: Training, words: RunTokenizer) -> tuple[AnyConfig, Callable[[], Params]]:
    """Return the config, and a function that creates the first weights.

    Raises InputError for a tokenizer or rows that do not fit the model.
    """
    if run.start is not None:
        model = load(run.start, dtype="float32", mesh=run.devices.mesh, rules=run.devices.rules)
        check_tokenizer(run.start, model, words, run)
        config, start = model.config, lambda: model.params
    else:
        assert run.config is not None
        config = run.config
        key = jax.random.key(run.loop.seed)
        start = partial(init if isinstance(config, Config) else init_blocks, config, key)
        if run.init == "circuit":
            if isinstance(config, BlockConfig):
                raise InputError("model.init is 'circuit', which is of one decoder: leave it out")
            try:
                check_circuit(config)
            except ValueError as error:
                raise InputError(f"model.init is 'circuit': {error}") from error
            start = partial(circuit_init, key, config)
    if config.vocab < words.vocab:
        raise InputError(
            f"the tokenizer has {words.vocab} ids and the model {config.vocab}: leave model.vocab out, or "
            "give the tokenizer of the model"
        )
    if run.loop.length > config.max_positions:
        raise InputError(
            f"train.length is {run.loop.length}, and the model has {config.max_positions} positions: shorten "
            "the rows, or raise model.max_positions"
        )
    return config, start

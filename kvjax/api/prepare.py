"""Models that methods run on, rewritten from the given one before anything is read: `prepare`."""

from __future__ import annotations

from kvjax.base.errors import InputError
from kvjax.compat.model_fit import check_fit
from kvjax.compat.shipped_fits import ready
from kvjax.grammar import Method
from kvjax.methods import as_method
from kvjax.models.axes import spread_params
from kvjax.models.config import Config
from kvjax.models.model import Model, check_single
from kvjax.models.stacking import groups_in
from kvjax.steps import Run
from kvjax.steps.shared.run import stacks


def prepare(model: Model, method: Method | str) -> Model:
    """Build the model that a method runs on: its weights rewritten, or stacked layers taken apart.

    `kvjax.prefill` and the other functions do this by themselves, once per model and method, and keep the
    result as long as the model lives. A new model has its own weights and config, can be called and trained,
    and takes any method that fits its layers. Its caches are those of the method on the given model. If
    layers are stacked, as on TPUs, and the method treats layers of one stack differently (it merges some,
    stores them in several ways, or drops tokens above one), the stack is cut there; its weights are then in
    memory twice, unless the given model is released.

    Args:
        model: a model of one decoder.
        method: a method, or its text.

    Returns:
        A new model, or the given one if the method neither rewrites weights nor cuts a stack.

    Raises:
        InputError: if the method does not fit the model, or another method rewrote the model.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> made = kvjax.prepare(model, kvjax.method("palu", rank=0.5))
    >>> made.config.mixers[0], kvjax.prepare(model, "full") is model
    (GroupedLatent(group=2, key_rank=32, value_rank=32), True)
    """
    return made(model, ready(model, as_method(method)))


def made(model: Model, method: Method | None) -> Model:
    """Build the model that a method runs on. Raises InputError as `prepare`."""
    if method is None:
        return model
    return _restacked(model if method.make is None else _remade(model, method), method)


def _restacked(model: Model, method: Method) -> Model:
    """Cut stacks of the model where the method treats their layers differently; often there are none."""
    if not isinstance(model, Model) or not isinstance(model.config, Config):
        if method.stack is not None:
            check_single(model, f"{method.id} merges layers of one decoder")
        return model
    now = groups_in(model.params)
    if all(group.size == 1 for group in now):
        return model
    groups = stacks(Run(model.config, method), now)
    if groups == now:
        return model
    if groups not in model.models_made:
        model.models_made[groups] = model.regrouped(groups)
    return model.models_made[groups]


def _remade(model: Model, method: Method) -> Model:
    """Rewrite the model by a method's `make`."""
    assert method.make is not None
    check_single(model, f"{method.id} rewrites the weights of one decoder")
    if model.made_by == method.make:
        return model
    if model.made_by is not None:
        raise InputError(
            f"{method.id} makes its own weights of a model's, and {model.name} was made by "
            f"{model.made_by!r}: give the model that this one was made of"
        )
    check_fit(method, model.config)
    if method.make not in model.models_made:
        params, config = method.make.params(model.params, model.config), method.make.config(model.config)
        if model.on_mesh is not None:
            params = spread_params(params, config, model.on_mesh)
        model.models_made[method.make] = model.remade(method.make, config, params)
    return model.models_made[method.make]

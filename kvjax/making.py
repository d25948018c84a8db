"""The models that methods make of a model, before anything is read: `prepare`."""

from __future__ import annotations

from kvjax.errors import InputError
from kvjax.grammar import Method
from kvjax.methods import as_method
from kvjax.models.axes import spread_params
from kvjax.models.model import Model, check_single
from kvjax.suits import check_fit


def prepare(model: Model, method: Method | str) -> Model:
    """The model that a method's `make` makes of this one; the model itself where the method has none.

    The verbs do this by themselves, once per model and method, and remember it as long as the model lives.
    What is made is a model like any other: it has weights and a config of its own, can be called and trained,
    and takes any method that fits its layers. Its caches are those of the method on the model that was given.

    Raises InputError where the method does not fit the model, or the model was made by another method.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> made = kvjax.prepare(model, kvjax.method("palu", rank=0.5))
    >>> made.config.mixers[0], kvjax.prepare(model, "full") is model
    (GroupedLatent(group=2, key_rank=32, value_rank=32), True)
    """
    return made(model, as_method(method))


def made(model: Model, method: Method | None) -> Model:
    """The model that a method runs on. Raises InputError as `prepare`."""
    if method is None or method.make is None:
        return model
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

"""Deep models whose programs loop over equal layers, because compile time dominates with many programs."""

from __future__ import annotations

from kvjax.compat.model_fit import config_of
from kvjax.grammar import Method
from kvjax.models.model import Model
from kvjax.models.params import plan
from kvjax.models.stacking import groups_in
from kvjax.steps import Run
from kvjax.steps.shared.run import stacks

# From this many layers on, a loop over layers is worthwhile.
DEEP = 12


def scanned(model: Model) -> Model:
    """Stack equal layers of the model, if it is deep: programs then compile in a third of the time.

    A loop copies every layer's weights before it uses them. A pass over many tokens is as fast all the same;
    a step of one token takes twice as long, so `kvjax.generate` does not loop on CPUs and GPUs.
    """
    if model.config.layers < DEEP or model.on_mesh is not None:
        return model
    return model.regrouped(plan(model.config, stacked=True))


def runs_scanned(model: Model, method: Method) -> bool:
    """Whether a method treats all layers alike that the model has stacked, in prompts and in steps."""
    if any(one.keep is not None and one.keep.narrow is not None for one in method.sentences):
        return False
    groups = groups_in(model.params)
    return stacks(Run(config_of(method, model.config), method), groups) == groups

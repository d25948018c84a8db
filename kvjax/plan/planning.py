"""A plan: the request, checked before anything runs, and all results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from kvjax.base.errors import InputError
from kvjax.compat.model_fit import check_fit, config_of
from kvjax.grammar import Method
from kvjax.mesh.rules import MeshAxes
from kvjax.methods.parse import parse_method
from kvjax.models.axes import left_whole, without_axes
from kvjax.models.config import Config
from kvjax.plan.children import in_child, missing
from kvjax.plan.job import CompileJob
from kvjax.plan.largest import Overhead, Search, beside, largest_rows, largest_tokens
from kvjax.plan.layouts import AUTO, MeshLayout, check_preset, layout
from kvjax.plan.prompts import in_words
from kvjax.plan.roofline import NOTE
from kvjax.plan.sizes import DeviceSizes
from kvjax.plan.topologies import Topology

# The default budget if a method's text has none.
BUDGET = 0.25
# Progress messages: (what is being done) -> shown to the user.
Said = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """A model on a topology. model: its name. context: tokens per row, batch: rows. method: as text.

    preset, mesh, changed: as of `kvjax.plan.layouts.layout`. chunk: tokens of a prefill to compile.

    Raises InputError if something is unknown or inconsistent.
    """

    model: str
    config: Config
    topology: Topology
    context: int
    batch: int
    method: str = "full"
    preset: str = AUTO
    mesh: str | None = None
    changed: Mapping[str, MeshAxes] = dataclasses.field(default_factory=dict)
    dtype: str = "bfloat16"
    chunk: int = 2048

    def __post_init__(self):
        check_preset(self.preset)
        if not isinstance(self.config, Config):
            raise InputError(
                f"{self.model} is a model of two decoders, expected one decoder: plan those one by one"
            )
        _ = self.sentence

    @property
    def sentence(self) -> Method:
        """The method. InputError if it does not exist, or does not fit the model."""
        _, build = parse_method(self.method)
        method = build(BUDGET if build.takes_budget else None)
        check_fit(method, self.config)
        return method

    @property
    def label(self) -> str:
        """The method as text, with the given budget."""
        label, build = parse_method(self.method)
        return repr(self.sentence) if build.takes_budget else label

    def notes(self) -> list[str]:
        """Write notes for the user."""
        most = self.config.max_positions
        if self.context <= most:
            return []
        return [f"{self.context} tokens are beyond the {most} positions that {self.model} was made for"]


class Planner:
    """The results for one request, each computed once. Raises InputError for what cannot be split."""

    def __init__(self, asked: PlanRequest):
        method, config = asked.sentence, asked.config
        if method.make is not None:
            config, method = config_of(method, config), dataclasses.replace(method, make=None)
        self.asked, self.config, self.method = asked, config, method
        self.sizes = DeviceSizes(config, method, asked.topology, asked.dtype)

        def here(on: Any) -> int:
            return self.sizes.weights(on) + self.sizes.cache(on, asked.batch, asked.context, roughly=True)

        try:
            self.layout: MeshLayout = layout(
                config, method, asked.topology, asked.batch, asked.preset, here, asked.mesh, asked.changed
            )
        except NotImplementedError as error:
            raise InputError(
                f"{asked.method} cannot be planned for {asked.topology.name}: {error}"
            ) from error
        self._found: dict[tuple[int, int, int], dict[str, Any]] = {}

    @property
    def parameters(self) -> int:
        return sum(math.prod(x.shape) for x in jax.tree.leaves(self.sizes.params))

    def compiled(self, batch: int, context: int, chunk: int) -> dict[str, Any]:
        """Compile a decode step (chunk 0), or a chunk of a prefill, as `kvjax.plan.compiling.compiled`."""
        key = (batch, context, chunk)
        if key not in self._found:
            asked, on = self.asked, self.layout.on
            self._found[key] = in_child(
                CompileJob(
                    self.config, self.method, asked.topology, self.layout.mesh, on.rules, batch, context,
                    asked.dtype, chunk,
                )
            )  # fmt: skip
        return self._found[key]

    def search(self) -> Search | None:
        """Build a search for what fits, given what was compiled so far; None if the memory is unknown."""
        if self.asked.topology.memory is None:
            return None
        rows = [beside(b, c, found) for (b, c, _), found in self._found.items() if "weights" in found]
        measured: Overhead | None = max((one for one in rows if one), key=lambda one: one.bytes, default=None)
        return Search(self.sizes, self.layout.on, self.asked.topology.memory, measured)

    def plan(
        self, compile: bool = True, largest: bool = True, said: Said = lambda text: None
    ) -> dict[str, Any]:
        """Make the whole plan as JSON data. compile: also run the compilers. largest: also what would fit."""
        asked, on = self.asked, self.layout.on
        topology, why = asked.topology, missing(asked.topology)
        said("sizing")
        weights, cache = self.sizes.weights(on), self.sizes.cache(on, asked.batch, asked.context)
        out: dict[str, Any] = {
            "model": asked.model, "parameters": self.parameters, "method": asked.label, "dtype": asked.dtype,
            "context": asked.context, "batch": asked.batch, "topology": topology.name,
            "devices": topology.count, "mesh": self.layout.mesh, "preset": self.layout.preset,
            "changed": dict(self.layout.changed), "memory": topology.memory, "weights": weights,
            "cache": cache, "host": self.sizes.host(on, asked.batch, asked.context),
            "decode": None, "prefill": None, "roofline_note": NOTE,
        }  # fmt: skip
        notes = [*asked.notes(), *left_whole(asked.config, on), *without_axes(asked.config, on)]
        if compile and why:
            notes.append(f"not compiled, so temporaries, collectives and seconds are not known: {why}")
        if compile and not why:
            said("compiling a decode step")
            out["decode"] = self.judged(asked.batch, asked.context, 0)
            if asked.chunk:
                said(f"compiling {asked.chunk} tokens of a prefill")
                out["prefill"] = self.judged(asked.batch, asked.context, asked.chunk)
        out["prompt"] = self._prompt()
        out["fits"] = self._fits(out)
        out["largest"] = self._largest(compile and not why, said) if largest else None
        return out | {"notes": notes}

    def _prompt(self) -> list[str]:
        """How a chunk's tokens, split over several devices, attend to each other and to the context."""
        asked, on = self.asked, self.layout.on
        sizes = asked.batch, asked.chunk, asked.context
        return list(in_words(self.config, on, *sizes, asked.dtype)) if asked.chunk else []

    def judged(self, batch: int, context: int, chunk: int) -> dict[str, Any]:
        """Judge what the compiled program costs, and whether it fits a device's memory (None: not known)."""
        found, memory = self.compiled(batch, context, chunk), self.asked.topology.memory
        if "error" in found:
            return found | {"fits": False if found.get("too_large") else None}
        return found | {"fits": None if memory is None else found["needs"] <= memory}

    def _fits(self, out: dict[str, Any]) -> bool | None:
        """Whether everything compiled fits, or weights and cache if nothing was compiled; None: not known."""
        programs = [out[name]["fits"] for name in ("decode", "prefill") if out[name] is not None]
        if programs:
            return False if False in programs else None if None in programs else True
        return None if out["memory"] is None else out["weights"] + out["cache"] <= out["memory"]

    def _largest(self, compile: bool, said: Said) -> dict[str, Any] | None:
        asked, search = self.asked, self.search()
        if search is None:
            return None
        longest = max(
            (key for key, found in self._found.items() if found.get("needs")),
            key=lambda key: self._found[key]["needs"], default=(0, 0, 0),
        )  # fmt: skip

        def confirm(batch: int, context: int) -> dict[str, Any]:
            said(f"compiling for {batch} rows of {context} tokens")
            return self.compiled(batch, context, longest[2])

        said("looking for what fits")
        rows = largest_rows(search, asked.context, confirm if compile else None)
        tokens = largest_tokens(search, asked.batch, confirm if compile else None)
        return {
            "rows": rows.rows, "rows_confirmed": rows.confirmed,
            "tokens": tokens.tokens, "tokens_confirmed": tokens.confirmed,
        }  # fmt: skip

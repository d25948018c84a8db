"""The time of an iteration: a file of numbers, from a roofline or fitted to measured iterations."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.base.errors import InputError


@dataclass(frozen=True)
class Costs:
    """Seconds of an iteration: base + max(bytes, operations), or base + their sum, linear in its counts.

    Bytes take weights + slot * (slots read), operations take token * tokens + pair * (query, key) pairs; all
    in seconds. base and weights are of every pass over the weights. move: seconds to move one token's slots
    to or from host memory. memory: bytes for slots; slot_bytes: bytes per token. by: the source of the
    numbers, to show with results. slice: how many iterations without prompts a device runs before it hears of
    arrivals. pieces: the sizes to which pieces of prompts are padded; none if they are not. gathers: whether
    tables are padded too, as of `ProgramSizes`. sums: whether bytes and operations take time one after the
    other, as fitted costs do.
    """

    by: str
    base: float
    weights: float
    slot: float
    token: float
    pair: float
    move: float
    memory: float
    slot_bytes: float
    slice: int = 1
    pieces: tuple[int, ...] = ()
    gathers: bool = False
    sums: bool = False

    def seconds(self, tokens: float, slots: float, pairs: float, passes: float = 1) -> float:
        """Seconds of an iteration with so many tokens, slots read, and pairs of a query and a key."""
        read, computed = passes * self.weights + self.slot * slots, self.token * tokens + self.pair * pairs
        return passes * self.base + (read + computed if self.sums else max(read, computed))

    @property
    def bringing(self) -> float:
        """Seconds to bring all weights from host memory: their bytes at the rate at which slots move."""
        if not (self.weights and self.slot and self.move):
            raise InputError(
                f"{self.by}: weights={self.weights:g}, slot={self.slot:g} and move={self.move:g} do not say "
                "how long weights take from host memory, expected numbers above 0: take a roofline"
            )
        return self.weights / self.slot * self.move

    def pages(self, page: int) -> int:
        """How many pages of `page` tokens fit in the memory."""
        return int(self.memory / (self.slot_bytes * page))

    def compressed(self, ratio: float) -> Costs:
        """Costs with slots of `ratio` times the bytes: more of them fit, and a step reads fewer bytes.

        The operations are unchanged: quantised slots need as many products; fewer slots would need fewer.
        """
        if not 0 < ratio <= 1:
            raise InputError(f"--compress is {ratio}, expected a share of the cache's bytes in (0, 1]")
        by = self.by if ratio == 1 else f"{self.by}, slots of {ratio:g} of the bytes"
        scaled = {name: ratio * getattr(self, name) for name in ("slot", "move", "slot_bytes")}
        return dataclasses.replace(self, by=by, **scaled)


SIZES = "slice", "pieces", "gathers"
NUMBERS = tuple(field.name for field in dataclasses.fields(Costs) if field.type == "float")


def read_costs(path: str | Path, *more: str | Path) -> Costs:
    """Read the costs of a JSON file: fields of `Costs`, or measured iterations, to which they are fitted.

    more: files of further iterations of the same engine, such as those of shorter texts.

    Measured iterations are {"iterations": [[tokens, slots, pairs, passes, seconds], ...], "memory",
    "slot_bytes", "move", "slice", "pieces", "gathers"}, as `kvjax serve run --record` writes them. Raises
    InputError, with the file and the field, for another shape.
    """
    found = _object_of(path)
    if more:
        return fitted(_joined(path, more), " and ".join(map(str, (path, *more))))
    if "iterations" in found:
        return fitted(found, str(path))
    unknown = [name for name in found if name not in ("by", *SIZES, "sums", *NUMBERS)]
    if unknown:
        raise InputError(
            f"costs file {path} has an unknown field {unknown[0]!r}, expected {', '.join(NUMBERS)}"
        )
    numbers = {name: _number(found, name, path) for name in NUMBERS}
    by = f"{path}: {found.get('by', 'source not said')}"
    sums = found.get("sums", False)
    if not isinstance(sums, bool):
        raise InputError(f"costs file {path} has sums={sums!r}, expected true or false")
    return Costs(by=by, **numbers, **_sizes(found, path), sums=sums)


def _joined(first: str | Path, more: Sequence[str | Path]) -> dict[str, Any]:
    """Return what the first file holds, with the iterations of all."""
    each = {path: _object_of(path) for path in (first, *more)}
    found = dict(each[first])
    for path, one in each.items():
        if not isinstance(one.get("iterations"), list):
            raise InputError(f"costs file {path} has no measured iterations, expected them beside others")
        if [one.get(name) for name in SIZES] != [found.get(name) for name in SIZES]:
            raise InputError(f"costs files {first} and {path} differ in {', '.join(SIZES)}: give one of them")
    return found | {"iterations": [row for one in each.values() for row in one["iterations"]]}


def _object_of(path: str | Path) -> dict[str, Any]:
    """Read the object of a JSON file."""
    try:
        found = json.loads(Path(path).read_text())
    except OSError as error:
        raise InputError(f"costs file {path} cannot be read ({error.strerror}): give another path") from error
    except ValueError as error:
        raise InputError(f"costs file {path} is no JSON ({error}): write it anew") from error
    if not isinstance(found, dict):
        raise InputError(f"costs file {path} holds a {type(found).__name__}, expected an object of numbers")
    return found


def fitted(found: dict[str, Any], path: str) -> Costs:
    """Non-negative least squares: seconds per token, slot, pair and pass.

    Errors count relative to what the fit says, not to what was measured: then iterations that a busy machine
    made slow do not count less than others, and the fit's mean is that of the measurements.
    """
    from scipy.optimize import nnls

    try:
        rows = np.array(found["iterations"], float)
    except (TypeError, ValueError):
        rows = np.zeros((0, 0))
    if rows.ndim != 2 or rows.shape[1] != 5 or len(rows) < 4 or not (rows[:, 4] > 0).all():
        raise InputError(
            f"costs file {path} has other iterations than expected: four or more rows of tokens, slots, "
            "pairs, passes, seconds > 0"
        )
    design, seconds = rows[:, :4], rows[:, 4]
    scale = np.abs(design).max(0)
    scale[scale == 0] = 1
    said = seconds
    for _ in range(20):
        weights, _ = nnls(design / scale / said[:, None], seconds / said)
        said = np.maximum(design / scale @ weights, 1e-3 * seconds.mean())
    token, slot, pair, base = (weights / scale).tolist()
    rest = {name: _number(found, name, path) for name in ("move", "memory", "slot_bytes")}
    by = f"{path}: fitted to {len(rows)} measured iterations"
    per = {"base": base, "weights": 0.0, "slot": slot, "token": token, "pair": pair}
    return Costs(by=by, **per, **rest, **_sizes(found, path), sums=True)


def _sizes(found: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """Return a slice's iterations, the sizes of pieces, and whether tables are padded, by their fields."""
    slice, pieces, gathers = found.get("slice", 1), found.get("pieces", []), found.get("gathers", False)
    if type(slice) is not int or slice < 1:
        raise InputError(f"costs file {path} has slice={slice!r}, expected a whole number from 1 up")
    whole = isinstance(pieces, list) and all(type(one) is int and one > 0 for one in pieces)
    if not whole or sorted(pieces) != pieces:
        raise InputError(
            f"costs file {path} has pieces={pieces!r}, expected whole numbers from 1 up that ascend"
        )
    if not isinstance(gathers, bool) or (gathers and not pieces):
        raise InputError(
            f"costs file {path} has gathers={gathers!r}, expected true, beside sizes of pieces, or false"
        )
    return {"slice": slice, "pieces": tuple(pieces), "gathers": gathers}


def _number(found: dict[str, Any], name: str, path: str | Path) -> float:
    value = found.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise InputError(f"costs file {path} has {name}={value!r}, expected a number from 0 up")
    if name in ("memory", "slot_bytes") and value == 0:
        raise InputError(f"costs file {path} has {name}=0, expected bytes")
    return float(value)

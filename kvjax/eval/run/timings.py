"""Timings of a comparison's cells, from the seconds of their units."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvjax.eval.run.cellplan import PlannedCell
from kvjax.grammar.keys import name_of

# Timings by (label, budget); their names are those of `timings_of`.
CellTimings = dict[tuple[str, float | int | None], dict[str, float]]


def timings_of(entries: Iterable[PlannedCell], done: Mapping[str, Mapping[str, Any]]) -> CellTimings:
    """Milliseconds of a prefill per prompt and tokens per second of a batch that decodes; compiling is apart.

    `prefill_ms` and `decode_tokens_per_s` are medians over the batches that were timed alone; each is
    accompanied by the number of timings (`_timings`), the least and the largest (`_low`, `_high`).
    """
    out: CellTimings = {}
    for entry in entries:
        keep = entry.method.keep
        probe = "" if keep is None or keep.probe is None else name_of(keep.probe)
        units = [u for k, u in done.items() if k.endswith(f"/{entry.label}/{entry.budget!r}")]
        timed = [u for u in units if u["seconds"] is not None]
        read = [
            (_read(u, probe) + u["seconds"]["settle"]) / u["batch"]
            for u in timed
            if u["read_s"] or "read" in u["seconds"]
        ]
        speeds = [u["steps"] / u["seconds"]["ask"] for u in timed if u["steps"]]
        out[entry.label, entry.budget] = {
            **_spread("prefill_ms", [1000 * seconds for seconds in read]),
            **_spread("decode_tokens_per_s", speeds),
        }
    return out


def _read(unit: Mapping[str, Any], probe: str) -> float:
    """Seconds of reading a unit's prompt: its own, or what all cells share, and its probe."""
    shared = unit["read_s"]
    return unit["seconds"].get("read") or shared[""] + (shared[probe] if probe else 0)


def _spread(name: str, found: Sequence[float]) -> dict[str, float]:
    if not found:
        return {}
    ends = {f"{name}_low": min(found), f"{name}_high": max(found), f"{name}_timings": len(found)}
    return {name: statistics.median(found), **ends}

"""Metrics of a run, as `vllm bench serve` names and defines them, and its memory and work.

TTFT: seconds to the first token. TPOT: (last - first) / (tokens - 1). ITL: every gap between two tokens.
E2EL: seconds to the last token. Goodput: requests per second whose TTFT and TPOT meet an objective (SLO).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvjax.serve.grammar.words import Blocks, Lanes, Place
from kvjax.serve.policies.room import pages
from kvjax.serve.requests import ENDED, Request, RequestProgress
from kvjax.serve.sim import Outcome

PERCENTILES = (50, 90, 99)


class Slo(NamedTuple):
    """A service-level objective: the most seconds to a request's first token, and per token after it."""

    ttft: float = float("inf")
    tpot: float = float("inf")


class Times(NamedTuple):
    """Seconds of every finished request, [requests]; itl has every gap of all of them."""

    ttft: np.ndarray
    tpot: np.ndarray
    itl: np.ndarray
    e2el: np.ndarray


def times(out: Outcome) -> Times:
    """TTFT, TPOT (0 for a single token), ITL and E2EL of the requests that ended."""
    ttft, tpot, itl, e2el = [], [], [np.zeros(0)], []
    for entry in ended(out):
        got = np.concatenate([out.ends[first : first + count] for first, count in entry.spans])
        ttft.append(got[0] - entry.request.arrived)
        e2el.append(got[-1] - entry.request.arrived)
        tpot.append((got[-1] - got[0]) / (len(got) - 1) if len(got) > 1 else 0.0)
        itl.append(np.diff(got))
    return Times(np.array(ttft), np.array(tpot), np.concatenate(itl), np.array(e2el))


def metrics(out: Outcome, slo: Slo | None = None) -> dict[str, Any]:
    """Return all metrics of a run, by name; in milliseconds if the name ends in _ms.

    Goodput only with an SLO; waste only where requests lie in the pool.
    """
    found, done = times(out), ended(out)
    # The run lasts from the first arrival to the last token.
    first = min((entry.request.arrived for entry in done), default=0.0)
    duration = float(out.ends.max() - first) if len(out.ends) else 0.0
    outputs = sum(entry.written for entry in done)
    prompts = sum(entry.request.prompt for entry in done)
    figures: dict[str, Any] = {
        "completed": len(done),
        "refused": len(out.entries) - len(done),
        "duration": duration,
        "request_throughput": _per(len(done), duration),
        "output_throughput": _per(outputs, duration),
        "total_token_throughput": _per(outputs + prompts, duration),
        "iterations": len(out.ends),
        "preemptions": sum(entry.preempted for entry in done),
        "recomputed_tokens": sum(entry.computed + entry.matched - entry.request.prompt for entry in done),
        "moved_tokens": out.moved,
        "hit_rate": _per(sum(entry.matched for entry in done), prompts),
    }
    if not done or not all(entry.outside for entry in done):
        figures["waste"] = waste(out)
    if slo is not None:
        kept = (found.ttft <= slo.ttft) & (found.tpot <= slo.tpot)
        figures |= {
            "request_goodput": _per(int(kept.sum()), duration),
            "slo_attained": _per(int(kept.sum()), len(out.entries)),
        }
    for name, seconds in found._asdict().items():
        # As in vLLM, a single token has no time per token.
        some = seconds[[entry.written > 1 for entry in done]] if name == "tpot" else seconds
        figures |= {f"mean_{name}_ms": 1e3 * float(some.mean()) if len(some) else 0.0}
        figures |= {
            f"p{q}_{name}_ms": 1e3 * float(np.percentile(some, q)) if len(some) else 0.0 for q in PERCENTILES
        }
    return figures


def ended(out: Outcome) -> list[RequestProgress]:
    """List the requests that were answered."""
    return [entry for entry in out.entries if entry.state == ENDED]


def waste(out: Outcome) -> float:
    """1 - used / held slots of the pool, over all iterations with decoding or idle requests; ignores sharing.

    A slot is used if it holds a token that its method kept. Requests outside the pool are left out.
    """
    used, held, place = 0.0, 0, out.system.place
    for entry in ended(out):
        if entry.outside:
            continue
        first, last = (count - entry.evicted for count in (entry.request.prompt, entry.request.most))
        used += sum_up_to(last) - sum_up_to(first) - entry.shorter * (last - first)
        held += _held(place, entry.request, first, last) + entry.idle * _room(place, entry.request, last)
    return 1 - used / held if held else 0.0


def _held(place: Place, request: Request, first: int, last: int) -> int:
    """Slots that a request holds when it stores first + 1, ... `last` slots, summed up."""
    holding = request.holding
    if isinstance(place, Blocks) and (holding is None or not holding.plain):
        page = place.page if holding is None else holding.page
        return pages_up_to(last, page) - pages_up_to(first, page)
    if not isinstance(place, Lanes) or place.room == "predicted":
        return sum(_room(place, request, slots) for slots in range(first + 1, last + 1))
    return (last - first) * _room(place, request, last)


def _room(place: Place, request: Request, slots: int) -> int:
    """Slots of the pages that a request holds when it stores `slots`."""
    held = pages(place, request, slots)
    return held * place.page if request.holding is None else request.holding.tokens(held)


def sum_up_to(count: int) -> int:
    """1 + 2 + ... + count."""
    return count * (count + 1) // 2


def pages_up_to(count: int, page: int) -> int:
    """Slots of the pages that hold 1, 2, ... `count` tokens, summed up.

    >>> pages_up_to(5, 2) == 2 + 2 + 4 + 4 + 6
    True
    """
    whole, rest = divmod(count, page)
    return page * (page * sum_up_to(whole) + rest * (whole + 1))


def _per(count: int | float, whole: int | float) -> float:
    return count / whole if whole else 0.0

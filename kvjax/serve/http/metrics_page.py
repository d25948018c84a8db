"""Metrics of a service in Prometheus's text format."""

from __future__ import annotations

from kvjax.serve.http.service import Service

COUNTERS = {
    "requests": "requests that were taken",
    "requests_ended": "requests that were answered",
    "requests_failed": "requests that could not be answered",
    "requests_gone": "requests whose client went away, or that ended with a stop text",
    "turned_away": "requests that were refused because too many were under way",
    "prompt_tokens": "tokens of prompts",
    "matched_tokens": "tokens of prompts that were there already",
    "generated_tokens": "tokens that were written",
    "preemptions": "times that a request gave way",
    "policy_faults": "iterations that simpler policies decided because the system's failed",
    "engine_faults": "times that the engine failed and began anew",
}


def metrics_page(service: Service) -> str:
    """Write the page; all names begin with kvjax_, and those of counters end with _total."""
    loop, gone = service.engine.loop, service.engine.gone
    gauges = {
        "requests_running": ("requests that hold pages", len(loop.reading) + len(loop.writing)),
        "requests_waiting": ("requests that hold none", len(loop.waiting) + len(loop.away)),
        # Pages are freed between iterations: while a program compiles they are still held.
        "requests_leaving": ("requests whose client went away, and that leave next", len(gone)),
        "pages": ("pages of the pool", loop.ledger.pages),
        "pages_free": ("pages that are free or may be evicted", loop.ledger.free + loop.ledger.idle),
    }
    lines = []
    for name, (about, value) in gauges.items():
        lines += [f"# HELP kvjax_{name} {about}", f"# TYPE kvjax_{name} gauge", f"kvjax_{name} {value}"]
    for name, about in COUNTERS.items():
        full = f"kvjax_{name}_total"
        lines += [f"# HELP {full} {about}", f"# TYPE {full} counter", f"{full} {service.counts[name]}"]
    return "\n".join(lines) + "\n"

"""Workloads in, figures out: traces, requests that are drawn like them, and metrics."""

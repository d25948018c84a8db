"""Workloads and metrics: traces, synthetic requests with their statistics, and the figures of a run."""
